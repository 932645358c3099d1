"""Add LoRA deltas of many adapters to a batch: y += scale * B (A x), by each token's own slot.

`shrink` makes h = A x, `expand_add` adds scale * B h, `add_delta` does both; `add_delta_gated` is
silu(gate) * up of such sums. Products and sums are float32 throughout (never TF32); the delta is
added in float32 and the sum cast to y's dtype.

What holds for every backend:

- Rows of slot 0, rows of padding and kinds at which a slot has rank 0 keep y's bits; a NaN stays
  one, but may lose its payload.
- A row's bits depend on its own x and its own slot's factors alone, within a phase and a backend:
  not on the batch, on the row's place in it, or on the neighbours' adapters and ranks.
- Pool rows that no slot names, h past a row's rank, and h of rows without an adapter may hold
  anything, NaN included.
- A backend named by the caller is used or refused (NotImplementedError), never replaced.
- Shapes, dtypes and static numbers that do not fit are refused (ValueError). What stands in the
  arrays is not looked at and is the caller's duty: slots and a traced layer inside the tables,
  factors inside the pool and as wide as x and `widths`, ranks within max_rank, routing.segments and
  tiles as `Routing` says, entries of these tables and tiles. Else rows come out wrong, and on a GPU
  memory of others is read or written.

`phase` picks the kernels: "decode" routes by `routing.slots` and `tiles` and suits few rows with an
adapter each; "prefill" routes by `routing.segments` and suits runs of tokens of one slot.
`layer` may be traced. The rank rows of part p of a slot start in h at the sum of the earlier parts'
ranks; the ranks of a slot sum to at most max_rank, the static bound.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from pallas_kernels.lora import mosaic_gpu, pallas_triton, reference
from pallas_kernels.lora.checks import (
    Phase,
    check_call,
    check_h,
    check_outputs,
    check_routing,
    check_rows,
    check_tables,
)
from pallas_kernels.lora.gated import gate, in_pallas
from pallas_kernels.lora.product import add_parts_and_delta, sum_parts
from pallas_kernels.lora.tables import FactorTables, Routing


Backend = Literal["xla", "triton", "mosaic"]


def supported_backends() -> tuple[str, ...]:
    """The names that `backend` takes."""
    return get_args(Backend)


def default_backend(platform: str | None = None) -> Backend:
    """The backend used on a platform ("cpu", "gpu"; None: JAX's default) when none is named."""
    platform = platform or jax.default_backend()
    return "triton" if platform in ("gpu", "cuda") else "xla"


def resolve(
    tables: FactorTables,
    routing: Routing,
    *,
    phase: Phase,
    backend: Backend | None = None,
    interpret: bool = False,
) -> Routing:
    """The routing with `entries` where the backend's kernels want it, for all calls of a step.

    A call whose routing has none makes its own. Raises as `shrink`.
    """
    check_tables(tables)
    check_routing(tables, routing._replace(entries=None), phase)
    if phase != "decode" or _chosen(backend, tables, interpret) != "triton":
        return routing
    return routing._replace(entries=pallas_triton.resolve(tables, routing, interpret=interpret))


def shrink(
    x: Float[Array, "tokens d_in"],
    tables: FactorTables,
    routing: Routing,
    *,
    layer: int | Int[Array, ""],
    kinds: tuple[int, ...],
    max_rank: int,
    phase: Phase,
    backend: Backend | None = None,
    interpret: bool = False,
) -> Float[Array, "kinds splits tokens max_rank"]:
    """h = A x of every kind in float32, as a fixed number of partial sums over d_in to be added.

    x and the pool are float32 or bfloat16. Raises ValueError for shapes that do not fit, and
    NotImplementedError where the named backend cannot run.
    """
    check_rows("x", x)
    check_call(tables, routing, x.shape[0], layer, kinds, max_rank, phase)
    chosen = _chosen(backend, tables, interpret)
    if chosen == "triton":
        return pallas_triton.shrink(
            x, tables, routing, layer,
            kinds=kinds, max_rank=max_rank, phase=phase, interpret=interpret,
        )  # fmt: skip
    args = (x, tables, routing, _index(layer))
    if chosen == "mosaic":
        return mosaic_gpu.shrink(*args, kinds=kinds, max_rank=max_rank)
    return reference.shrink(*args, kinds=kinds, max_rank=max_rank, phase=phase)


def expand_add(
    y: Float[Array, "tokens d_out"],
    h: Float[Array, "kinds splits tokens max_rank"],
    tables: FactorTables,
    routing: Routing,
    *,
    layer: int | Int[Array, ""],
    kinds: tuple[int, ...],
    widths: tuple[int, ...],
    max_rank: int,
    phase: Phase,
    backend: Backend | None = None,
    interpret: bool = False,
) -> Float[Array, "tokens d_out"]:
    """y + scale * B h, in place where the backend can and the caller's y is not used again.

    y (float32 or bfloat16) holds the outputs of `kinds` one beside the other, widths[i] columns
    each. h is what `shrink` of the same backend and phase made. Raises as `shrink`.
    """
    check_rows("y", y)
    check_call(tables, routing, y.shape[0], layer, kinds, max_rank, phase)
    check_outputs(y.shape[1], kinds, widths)
    chosen = _chosen(backend, tables, interpret)
    splits = None if chosen == "triton" else 1
    check_h(h, (len(kinds), y.shape[0], max_rank), splits)
    if chosen == "triton":
        return pallas_triton.expand_add(
            y, h, tables, routing, layer,
            kinds=kinds, widths=widths, phase=phase, interpret=interpret,
        )  # fmt: skip
    args = (y, h, tables, routing, _index(layer))
    if chosen == "mosaic":
        return mosaic_gpu.expand_add(*args, kinds=kinds, widths=widths)
    return reference.expand_add(*args, kinds=kinds, widths=widths, max_rank=max_rank, phase=phase)


def add_delta(
    y: Float[Array, "tokens d_out"],
    x: Float[Array, "tokens d_in"],
    tables: FactorTables,
    routing: Routing,
    *,
    layer: int | Int[Array, ""],
    kinds: tuple[int, ...],
    widths: tuple[int, ...],
    max_rank: int,
    phase: Phase,
    backend: Backend | None = None,
    interpret: bool = False,
) -> Float[Array, "tokens d_out"]:
    """y + scale * B (A x): `expand_add` of `shrink`, fused where the backend gains by it."""
    check_rows("y", y)
    check_call(tables, routing, y.shape[0], layer, kinds, max_rank, phase)
    check_outputs(y.shape[1], kinds, widths)
    check_rows("x", x, y.shape[0])
    if _chosen(backend, tables, interpret) == "xla":
        return reference.add_delta(
            y,
            x,
            tables,
            routing,
            _index(layer),
            kinds=kinds,
            widths=widths,
            max_rank=max_rank,
            phase=phase,
        )
    h = shrink(
        x,
        tables,
        routing,
        layer=layer,
        kinds=kinds,
        max_rank=max_rank,
        phase=phase,
        backend=backend,
        interpret=interpret,
    )
    return expand_add(
        y,
        h,
        tables,
        routing,
        layer=layer,
        kinds=kinds,
        widths=widths,
        max_rank=max_rank,
        phase=phase,
        backend=backend,
        interpret=interpret,
    )


def add_delta_to_parts(
    parts: Float[Array, "splits tokens d_out"],
    x: Float[Array, "tokens d_in"],
    tables: FactorTables,
    routing: Routing,
    *,
    dtype: DTypeLike,
    layer: int | Int[Array, ""],
    kinds: tuple[int, ...],
    widths: tuple[int, ...],
    max_rank: int,
    phase: Phase,
    backend: Backend | None = None,
    interpret: bool = False,
) -> Float[Array, "tokens d_out"]:
    """`sum_parts(parts, dtype)` with the deltas added in float32 before it is rounded.

    Of a single part in `dtype` the product is rounded already, and the sum with the delta again.
    In decode with Triton the deltas are made without y, so beside the product, and XLA adds them.
    """
    if parts.ndim != 3 or not parts.shape[0]:
        raise ValueError(f"parts: wanted [splits, tokens, d_out], got {parts.shape}")
    check_call(tables, routing, parts.shape[1], layer, kinds, max_rank, phase)
    check_outputs(parts.shape[2], kinds, widths)
    check_rows("x", x, parts.shape[1])
    how = {"kinds": kinds, "phase": phase, "interpret": interpret}
    if phase != "decode" or _chosen(backend, tables, interpret) != "triton":
        y = sum_parts(parts, dtype)
        more = {"widths": widths, "max_rank": max_rank, "backend": backend}
        return add_delta(y, x, tables, routing, layer=layer, **how, **more)
    h = pallas_triton.shrink(
        x, tables, routing, layer, max_rank=max_rank, beside=True, **how
    )  # fmt: skip
    delta = pallas_triton.decode_delta(
        h, tables, routing, layer,
        kinds=kinds, widths=widths, dtype=dtype, interpret=interpret,
    )  # fmt: skip
    live = _has_delta(tables, routing)[:, layer]
    columns = [
        jnp.broadcast_to(live[kind][:, None], (x.shape[0], width))
        for kind, width in zip(kinds, widths, strict=True)
    ]
    return add_parts_and_delta(parts, delta, jnp.concatenate(columns, axis=1), dtype)


def add_delta_gated(
    y: Float[Array, "tokens d2"],
    x: Float[Array, "tokens d_in"],
    tables: FactorTables,
    routing: Routing,
    *,
    layer: int | Int[Array, ""],
    kinds: tuple[int, int],
    widths: tuple[int, int],
    max_rank: int,
    phase: Phase,
    backend: Backend | None = None,
    interpret: bool = False,
) -> Float[Array, "tokens d"]:
    """`gate` of `add_delta`: silu(gate) * up; in a prefill with Triton one kernel does both.

    `kinds` are gate and up, of equal widths. Rows without a delta have the bits of `gate(y)`.
    Raises as `add_delta`.
    """
    check_rows("y", y)
    check_call(tables, routing, y.shape[0], layer, kinds, max_rank, phase)
    check_outputs(y.shape[1], kinds, widths)
    if len(widths) != 2 or widths[0] != widths[1]:
        raise ValueError(f"widths: wanted two that are equal, got {widths}")
    check_rows("x", x, y.shape[0])
    how = {"layer": layer, "kinds": kinds, "max_rank": max_rank, "phase": phase}
    at = {"backend": backend, "interpret": interpret}
    chosen = _chosen(backend, tables, interpret)
    if chosen != "triton" or phase != "prefill" or not in_pallas(len(y), interpret=interpret):
        y = add_delta(y, x, tables, routing, widths=widths, **how, **at)
        # What follows stays the operation that it is in a program without deltas.
        return gate(lax.optimization_barrier(y), interpret=interpret)
    h = shrink(x, tables, routing, **how, **at)
    return pallas_triton.prefill_gate(
        y, h, tables, routing, layer, kinds=kinds, interpret=interpret
    )  # fmt: skip


@jax.jit
def _has_delta(tables: FactorTables, routing: Routing) -> Bool[Array, "kinds layers tokens"]:
    """Which tokens' slots have any rank. Of all layers: XLA makes it once a step."""
    return (tables.rank.sum(-1) > 0)[:, :, routing.slots]


def _index(layer: int | Array) -> Array:
    return jnp.asarray(layer, jnp.int32)


def _chosen(backend: str | None, tables: FactorTables, interpret: bool) -> str:
    name = default_backend() if backend is None else backend
    if name not in supported_backends():
        raise NotImplementedError(f"no LoRA backend {name!r}; there are {supported_backends()}")
    where = jax.default_backend()
    if name == "triton":
        if not interpret and where != "gpu":
            raise NotImplementedError(
                f"triton: needs a GPU or interpret=True, the platform is {where}"
            )
        pallas_triton.check(tables)
    if name == "mosaic":
        if interpret or where != "gpu":
            raise NotImplementedError(f"mosaic: needs a GPU, the platform is {where}")
        mosaic_gpu.check(tables)
    return name
