"""The LoRA kernels in Pallas-Triton.

The cost follows the true ranks. All tile shapes follow from the table's shape alone (`w`, the
widths, `max_rank`) and the card, never from the batch, and every sum has a fixed order. The layer
is an operand: all layers share one compiled kernel.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike
from jaxtyping import Float

from pallas_kernels.lora import _triton_decode, _triton_gated, _triton_prefill
from pallas_kernels.lora._triton_common import MAX_SPLITS, Outputs, rank_tile, tiling
from pallas_kernels.lora.tables import FactorTables, Routing
from pallas_kernels.lora.tilings import Choice, choice


def check(tables: FactorTables) -> None:
    """Raise NotImplementedError for a pool these kernels cannot read."""
    w, dtype = tables.pool.shape[1], tables.pool.dtype
    if w < 16 or w & (w - 1):
        raise NotImplementedError(f"triton: the pool's w must be a power of two from 16, got {w}")
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"triton: the pool must be float32 or bfloat16, got {dtype}")


def shrink(
    x: Array,
    tables: FactorTables,
    routing: Routing,
    layer: Array,
    *,
    kinds: tuple[int, ...],
    max_rank: int,
    phase: str,
    interpret: bool,
    cut_by: Choice | None = None,  # None: this card's
) -> Float[Array, "kinds splits tokens max_rank"]:
    return _shrink(
        x, *_routed(tables, routing, phase), layer,
        kinds=kinds, max_rank=max_rank, phase=phase, interpret=interpret,
        choice=cut_by or choice(f"{phase}_shrink"),
    )  # fmt: skip


def expand_add(
    y: Array,
    h: Array,
    tables: FactorTables,
    routing: Routing,
    layer: Array,
    *,
    kinds: tuple[int, ...],
    widths: tuple[int, ...],
    phase: str,
    interpret: bool,
    cut_by: Choice | None = None,
) -> Float[Array, "tokens d_out"]:
    return _expand_add(
        y, h, *_routed(tables, routing, phase), layer,
        kinds=kinds, widths=widths, phase=phase, interpret=interpret,
        choice=cut_by or choice(f"{phase}_expand"),
    )  # fmt: skip


def decode_delta(
    h: Array,
    tables: FactorTables,
    routing: Routing,
    layer: Array,
    *,
    kinds: tuple[int, ...],
    widths: tuple[int, ...],
    dtype: DTypeLike,
    interpret: bool,
    cut_by: Choice | None = None,
) -> Float[Array, "tokens d_out"]:
    """float32 deltas for a y of `dtype`; what has none is not written."""
    return _decode_delta(
        h, *_routed(tables, routing, "decode"), layer,
        kinds=kinds, widths=widths, dtype=jnp.dtype(dtype), interpret=interpret,
        choice=cut_by or choice("decode_delta"),
    )  # fmt: skip


def expand_gated(
    y: Array,
    h: Array,
    tables: FactorTables,
    routing: Routing,
    layer: Array,
    *,
    kinds: tuple[int, int],
    phase: str,
    interpret: bool,
    cut_by: Choice | None = None,
) -> Float[Array, "tokens d"]:
    """silu(gate) * up of y with the deltas added, in one kernel."""
    return _expand_gated(
        y, h, *_routed(tables, routing, phase), layer,
        kinds=kinds, phase=phase, interpret=interpret, choice=cut_by or choice(f"{phase}_gate"),
    )  # fmt: skip


def splits(d_in: int, w: int, phase: str) -> int:
    """How many partial sums of h the shrink makes."""
    return tiling(d_in, w, choice(f"{phase}_shrink"), MAX_SPLITS).programs


def _routed(tables: FactorTables, routing: Routing, phase: str) -> tuple[FactorTables, Array]:
    """The tables as the kernels of a phase index them, and what says which tokens are whose."""
    if phase == "decode":
        return _triton_decode.resolve(tables, routing), jnp.asarray(routing.tiles)
    return tables, jnp.asarray(routing.segments)


def _operands(tables: FactorTables, route: Array, layer: Array) -> tuple:
    return (layer.reshape(1), route, tables.pool, tables.first_row, tables.rank, tables.scale)


def _params(choice: Choice) -> pltriton.CompilerParams:
    return pltriton.CompilerParams(num_warps=choice.warps, num_stages=choice.stages)


# The inner jit makes a program of many layers trace and lower each kernel once.
@functools.partial(jax.jit, static_argnames=("kinds", "max_rank", "phase", "interpret", "choice"))
def _shrink(
    x, tables: FactorTables, route, layer, *, kinds, max_rank, phase, interpret, choice: Choice
):
    tokens, d = x.shape
    cut = tiling(d, tables.pool.shape[1], choice, MAX_SPLITS)
    ranks = rank_tile(max_rank, choice)
    if phase == "decode":
        programs = min(route.shape[0], choice.programs)
        grid = (cut.programs, len(kinds), programs)
        unroll = choice.stages == 1
        body = functools.partial(_triton_decode.shrink_kernel, programs=programs, unroll=unroll)
    else:
        grid = (len(kinds), cut.programs, pl.cdiv(tokens, choice.tokens))
        body = functools.partial(_triton_prefill.shrink_kernel, rows=choice.tokens)
    shape = (len(kinds), cut.programs, tokens, max_rank)
    return pl.pallas_call(
        functools.partial(body, kinds=kinds, cut=cut, ranks=ranks),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=grid,
        interpret=interpret,
        compiler_params=_params(choice),
        name=f"lora_{phase}_shrink",
    )(*_operands(tables, route, layer), x)


@functools.partial(jax.jit, static_argnames=("kinds", "widths", "phase", "interpret", "choice"))
def _expand_add(
    y, h, tables: FactorTables, route, layer, *, kinds, widths, phase, interpret, choice: Choice
):
    outputs = Outputs.of(kinds, widths, tables.pool.shape[1], choice)
    if phase == "decode":
        programs = min(route.shape[0], choice.programs)
        unroll = choice.stages == 1
        body = functools.partial(_triton_decode.expand_kernel, programs=programs, unroll=unroll)
    else:
        body = functools.partial(_triton_prefill.expand_kernel, rows=choice.tokens)
        programs = pl.cdiv(y.shape[0], choice.tokens)
    operands = _operands(tables, route, layer)
    return pl.pallas_call(
        functools.partial(body, outputs=outputs, ranks=rank_tile(h.shape[3], choice)),
        out_shape=jax.ShapeDtypeStruct(y.shape, y.dtype),
        grid=(outputs.programs, programs),
        interpret=interpret,
        input_output_aliases={len(operands) + 1: 0},
        compiler_params=_params(choice),
        name=f"lora_{phase}_expand_add",
    )(*operands, h, y)


@functools.partial(jax.jit, static_argnames=("kinds", "widths", "dtype", "interpret", "choice"))
def _decode_delta(
    h, tables: FactorTables, route, layer, *, kinds, widths, dtype, interpret, choice: Choice
):
    outputs = Outputs.of(kinds, widths, tables.pool.shape[1], choice)
    programs = min(route.shape[0], choice.programs)
    return pl.pallas_call(
        functools.partial(
            _triton_decode.delta_kernel,
            outputs=outputs, ranks=rank_tile(h.shape[3], choice), programs=programs,
            unroll=choice.stages == 1, terms_for=dtype,
        ),
        out_shape=jax.ShapeDtypeStruct((h.shape[2], sum(widths)), jnp.float32),
        grid=(outputs.programs, programs),
        interpret=interpret,
        compiler_params=_params(choice),
        name="lora_decode_delta",
    )(*_operands(tables, route, layer), h)  # fmt: skip


@functools.partial(jax.jit, static_argnames=("kinds", "phase", "interpret", "choice"))
def _expand_gated(
    y, h, tables: FactorTables, route, layer, *, kinds, phase, interpret, choice: Choice
):
    tokens, d = y.shape[0], y.shape[1] // 2
    cut = tiling(d, tables.pool.shape[1], choice)
    if phase == "decode":
        programs = min(route.shape[0], choice.programs)
        body = functools.partial(_triton_gated.decode_kernel, programs=programs)
    else:
        programs = pl.cdiv(tokens, choice.tokens)
        body = functools.partial(_triton_gated.prefill_kernel, rows=choice.tokens)
    return pl.pallas_call(
        functools.partial(body, kinds=kinds, cut=cut, ranks=rank_tile(h.shape[3], choice)),
        out_shape=jax.ShapeDtypeStruct((tokens, d), y.dtype),
        grid=(cut.programs, programs),
        interpret=interpret,
        compiler_params=_params(choice),
        name=f"lora_{phase}_gate",
    )(*_operands(tables, route, layer), h, y)
