"""Linear layers cut over the tensor-parallel ranks. They run inside shard_map.

Each is made of one or more adaptable modules. An adapter's delta is added to the product before
the bias, as peft does; in a row-parallel layer to the float32 partial sum, before the psum. DoRA's
gain multiplies that sum, and is linear; a bias of an adapter's own is added where the base's is.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jaxlora import compat
from jaxlora.adapters.modules import AdaptableModule
from jaxlora.layers.parameter import parameter
from jaxlora.layers.product import product
from jaxlora.parallel.mesh import TP_AXIS
from pallas_kernels.lora import gate, product_cut, product_parts, sum_parts


class AdapterStep(Protocol):
    """What a layer knows of the adapters of a step (jaxlora.adapters.routing has the real one).

    `modules` share the input x; their outputs stand side by side in y, `widths` columns each, which
    are this rank's. Rows without an adapter come back with the same bits from every method.
    """

    def add_delta(
        self,
        y: Float[Array, "tokens d_out"],
        x: Float[Array, "tokens d_in"],
        *,
        layer: int,
        modules: tuple[str, ...],
        widths: tuple[int, ...],
    ) -> Float[Array, "tokens d_out"]:
        """y plus each token's delta, times DoRA's gain where its adapter has one."""
        ...

    def add_bias(
        self,
        y: Float[Array, "tokens d_out"],
        bias: Float[Array, "d_out"] | None,
        *,
        layer: int,
        modules: tuple[str, ...],
        widths: tuple[int, ...],
    ) -> Float[Array, "tokens d_out"]:
        """y plus each token's own bias: its adapter's where that has one, else the base's."""
        ...

    def add_embedding_delta(
        self, rows: Float[Array, "tokens hidden"], ids: Int[Array, "tokens"]
    ) -> Float[Array, "tokens hidden"]:
        """Embedding rows with each token's delta and gain; `ids` count from this rank's first."""
        ...

    def replace_rows(
        self, rows: Float[Array, "tokens hidden"], tokens: Int[Array, "tokens"]
    ) -> Float[Array, "tokens hidden"]:
        """Embedding rows, with an adapter's own where it has one for the token."""
        ...

    def replace_scores(
        self,
        scores: Float[Array, "rows vocab_local"],
        hidden: Float[Array, "rows hidden"],
        first_id: int | Int[Array, ""],
    ) -> Float[Array, "rows vocab_local"]:
        """Scores of this rank's tokens, with those of an adapter's own head rows in their place."""
        ...

    def add_delta_to_parts(
        self,
        parts: Float[Array, "splits tokens d_out"],
        x: Float[Array, "tokens d_in"],
        *,
        dtype: DTypeLike,
        layer: int,
        modules: tuple[str, ...],
        widths: tuple[int, ...],
    ) -> Float[Array, "tokens d_out"]:
        """The same for a product in parts, to be added in order and rounded to `dtype`."""
        ...

    def add_delta_gated(
        self,
        y: Float[Array, "tokens d2"],
        x: Float[Array, "tokens d_in"],
        bias: Float[Array, "d2"] | None,
        *,
        layer: int,
        modules: tuple[str, ...],
        widths: tuple[int, ...],
    ) -> Float[Array, "tokens d"]:
        """silu(gate) * up of `add_delta` and `add_bias`; `modules` are gate and up."""
        ...


class ColumnLinear(nnx.Module):
    """One or several modules of the same input, d_out cut over the ranks, in one product.

    A rank's weight is [first module's rows | second's | ...] of its cut.
    """

    def __init__(
        self,
        layer: int,
        prefix: str,
        modules: tuple[AdaptableModule, ...],
        bias: bool,
        tp: int,
        dtype: DTypeLike,
    ) -> None:
        paths = {f"{prefix}.{module.name}": module for module in modules}
        self.layer = layer
        self.names = tuple(module.name for module in modules)
        self.widths = tuple(module.d_out // tp for module in modules)
        self.weight = parameter(
            {f"{path}.weight": (module.d_out, module.d_in) for path, module in paths.items()},
            0,
            tp,
            dtype,
        )
        self.bias = (
            parameter(
                {f"{path}.bias": (module.d_out,) for path, module in paths.items()}, 0, tp, dtype
            )
            if bias
            else None
        )

    def __call__(
        self, x: Float[Array, "tokens d_in"], adapters: AdapterStep | None
    ) -> list[Float[Array, "tokens d_out_local"]]:
        """This rank's outputs, one per module, in x's dtype."""
        weight = self.weight[...]
        y = linear(x, weight, x.dtype, adapters, self.layer, self.names, self.widths)
        y = _add_bias(adapters, y, self.bias, self.layer, self.names, self.widths)
        starts = [sum(self.widths[:i]) for i in range(1, len(self.widths))]
        return jnp.split(y, starts, axis=1)

    def gated(
        self, x: Float[Array, "tokens d_in"], adapters: AdapterStep | None
    ) -> Float[Array, "tokens d_local"]:
        """silu(gate) * up of this rank's outputs, where the modules are gate and up."""
        return gated_linear(
            x, self.weight[...], self.bias, adapters, self.layer, self.names, self.widths
        )


class RowLinear(nnx.Module):
    """A module whose d_in is cut over the ranks; the partial sums are added up by a psum."""

    def __init__(
        self,
        layer: int,
        prefix: str,
        module: AdaptableModule,
        bias: bool,
        tp: int,
        dtype: DTypeLike,
    ) -> None:
        path = f"{prefix}.{module.name}"
        self.layer = layer
        self.name = module.name
        self.weight = parameter({f"{path}.weight": (module.d_out, module.d_in)}, 1, tp, dtype)
        self.bias = parameter({f"{path}.bias": (module.d_out,)}, None, tp, dtype) if bias else None

    def __call__(
        self, x: Float[Array, "tokens d_in_local"], adapters: AdapterStep | None
    ) -> Float[Array, "tokens d_out"]:
        """The whole output on every rank, in x's dtype."""
        tp = compat.axis_size(TP_AXIS)
        weight = self.weight[...]
        dtype = x.dtype if tp == 1 else jnp.float32
        y = linear(x, weight, dtype, adapters, self.layer, (self.name,), (weight.shape[0],))
        if tp > 1:
            y = lax.psum(y, TP_AXIS).astype(x.dtype)
        return _add_bias(adapters, y, self.bias, self.layer, (self.name,), (weight.shape[0],))


def linear(
    x: Float[Array, "tokens d_in"],
    weight: Float[Array, "d_out d_in"],
    dtype: DTypeLike,
    adapters: AdapterStep | None,
    layer: int,
    modules: tuple[str, ...],
    widths: tuple[int, ...],
    elementwise_next: bool = False,
) -> Float[Array, "tokens d_out"]:
    """x @ weight^T in `dtype`, plus the deltas.

    The barriers keep what follows the same operations with and without adapters, so that base rows
    get the same bits. Where only elementwise operations follow they do so without one, which saves
    a launch.
    """
    at: dict[str, Any] = {"layer": layer, "modules": modules, "widths": widths}
    cut = product_cut(x.shape[0], weight.shape, x.dtype)
    if cut is None:
        y = product(x, weight, dtype)
        return y if adapters is None else lax.optimization_barrier(adapters.add_delta(y, x, **at))
    x = lax.optimization_barrier(x)
    parts = lax.optimization_barrier(product_parts(x, weight, dtype=dtype, cut=cut))
    if adapters is None:
        y = sum_parts(parts, dtype)
    else:
        y = adapters.add_delta_to_parts(parts, x, dtype=dtype, **at)
    fused = cut.splits == 1 and (adapters is None or elementwise_next)
    return y if fused else lax.optimization_barrier(y)


def gated_linear(
    x: Float[Array, "tokens d_in"],
    weight: Float[Array, "d2 d_in"],
    bias: nnx.Param | None,
    adapters: AdapterStep | None,
    layer: int,
    modules: tuple[str, ...],
    widths: tuple[int, ...],
) -> Float[Array, "tokens d"]:
    """silu(gate) * up of gate and up, x @ weight^T plus the deltas and the bias, in x's dtype."""
    own_product = product_cut(x.shape[0], weight.shape, x.dtype) is not None
    if adapters is None or own_product:
        y = linear(x, weight, x.dtype, adapters, layer, modules, widths, elementwise_next=True)
        return gate(_add_bias(adapters, y, bias, layer, modules, widths))
    at: dict[str, Any] = {"layer": layer, "modules": modules, "widths": widths}
    y = product(x, weight, x.dtype)
    return adapters.add_delta_gated(y, x, None if bias is None else bias[...], **at)


def _add_bias(
    adapters: AdapterStep | None,
    y: Array,
    parameter: nnx.Param | None,
    layer: int,
    modules: tuple[str, ...],
    widths: tuple[int, ...],
) -> Array:
    bias = None if parameter is None else parameter[...]
    if adapters is not None:
        return adapters.add_bias(y, bias, layer=layer, modules=modules, widths=widths)
    return y if bias is None else y + bias[None]
