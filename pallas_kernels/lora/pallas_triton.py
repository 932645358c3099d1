"""The LoRA kernels in Pallas-Triton.

The cost follows the true ranks. All tile shapes follow from the table's shape alone (`w`, the
widths, `max_rank`) and the card, never from the batch, and every sum has a fixed order. What a
layer has of its own are operands: all layers share one compiled kernel.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from pallas_kernels.lora import _triton_decode, _triton_gated, _triton_prefill
from pallas_kernels.lora._triton_common import (
    MAX_RANK_PROGRAMS,
    MAX_SPLITS,
    Outputs,
    rank_tile,
    tiling,
)
from pallas_kernels.lora.checks import STATIC
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
    layer: int | Array,
    *,
    kinds: tuple[int, ...],
    max_rank: int,
    phase: str,
    interpret: bool,
    beside: bool = False,
    cut_by: Choice | None = None,  # None: this card's
) -> Float[Array, "kinds splits tokens max_rank"]:
    """`beside`: a product runs at the same time. The bits are the same."""
    kernel = f"{phase}_shrink beside" if beside else f"{phase}_shrink"
    return _shrink(
        x, _operands(tables, routing, layer, phase, interpret),
        kinds=kinds, max_rank=max_rank, phase=phase, interpret=interpret,
        choice=cut_by or choice(kernel, max_rank),
    )  # fmt: skip


def expand_add(
    y: Array,
    h: Array,
    tables: FactorTables,
    routing: Routing,
    layer: int | Array,
    *,
    kinds: tuple[int, ...],
    widths: tuple[int, ...],
    phase: str,
    interpret: bool,
    cut_by: Choice | None = None,
) -> Float[Array, "tokens d_out"]:
    return _expand_add(
        y, h, _operands(tables, routing, layer, phase, interpret),
        kinds=kinds, widths=widths, phase=phase, interpret=interpret,
        choice=cut_by or choice(f"{phase}_expand", h.shape[3]),
    )  # fmt: skip


def decode_delta(
    h: Array,
    tables: FactorTables,
    routing: Routing,
    layer: int | Array,
    *,
    kinds: tuple[int, ...],
    widths: tuple[int, ...],
    dtype: DTypeLike,
    interpret: bool,
    cut_by: Choice | None = None,
) -> Float[Array, "tokens d_out"]:
    """float32 deltas for a y of `dtype`; what has none is not written."""
    return _decode_delta(
        h, _operands(tables, routing, layer, "decode", interpret),
        kinds=kinds, widths=widths, dtype=jnp.dtype(dtype), interpret=interpret,
        choice=cut_by or choice("decode_delta", h.shape[3]),
    )  # fmt: skip


def prefill_gate(
    y: Array,
    h: Array,
    tables: FactorTables,
    routing: Routing,
    layer: int | Array,
    *,
    kinds: tuple[int, int],
    interpret: bool,
    cut_by: Choice | None = None,
) -> Float[Array, "tokens d"]:
    """silu(gate) * up of y with the deltas of a prefill added, in one kernel."""
    return _prefill_gate(
        y, h, _operands(tables, routing, layer, "prefill", interpret),
        kinds=kinds, interpret=interpret, choice=cut_by or choice("prefill_gate", h.shape[3]),
    )  # fmt: skip


def splits(d_in: int, w: int, phase: str, max_rank: int) -> int:
    """How many partial sums of h the shrink makes."""
    return tiling(d_in, w, choice(f"{phase}_shrink", max_rank), MAX_SPLITS).programs


def _operands(
    tables: FactorTables, routing: Routing, layer: int | Array, phase: str, interpret: bool
) -> tuple[Array, ...]:
    """What says which tokens are whose and where factors lie, for a phase. The pool is third."""
    if phase == "prefill":
        layer = jnp.asarray(layer, jnp.int32).reshape(1)
        return (layer, jnp.asarray(routing.segments), *tables)
    entries = routing.entries
    if entries is None:
        entries = resolve(tables, routing, interpret=interpret)
    at = entries[layer] if isinstance(layer, STATIC) else jnp.stack(entries)[layer]
    return (jnp.asarray(routing.tiles), at, tables.pool)


def resolve(
    tables: FactorTables, routing: Routing, *, interpret: bool
) -> tuple[Int[Array, "kinds tiles 4*parts"], ...]:
    """`Routing.entries`: one dependent read in a program instead of layer, slot, factor."""
    kinds, layers, _, parts = tables.rank.shape
    tiles = jnp.asarray(routing.tiles)
    shape = jax.ShapeDtypeStruct((kinds, tiles.shape[0], 4 * parts), jnp.int32)
    entries = pl.pallas_call(
        _triton_decode.resolve_kernel,
        out_shape=[shape] * layers,
        grid=(layers, kinds),
        interpret=interpret,
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        name="lora_resolve",
    )(tiles, tables.first_row, tables.rank, tables.scale)
    return tuple(entries)


def _params(choice: Choice) -> pltriton.CompilerParams:
    return pltriton.CompilerParams(num_warps=choice.warps, num_stages=choice.stages)


# The inner jit makes a program of many layers trace and lower each kernel once.
@functools.partial(jax.jit, static_argnames=("kinds", "max_rank", "phase", "interpret", "choice"))
def _shrink(x, operands, *, kinds, max_rank, phase, interpret, choice: Choice):
    tokens, d = x.shape
    cut = tiling(d, operands[2].shape[1], choice, MAX_SPLITS)
    ranks = rank_tile(max_rank, choice)
    if phase == "decode":
        programs = min(operands[0].shape[0], choice.programs)
        rank_programs = min(pl.cdiv(max_rank, ranks), MAX_RANK_PROGRAMS)
        grid = (cut.programs, len(kinds) * rank_programs, programs)
        body = functools.partial(
            _triton_decode.shrink_kernel,
            rank_programs=rank_programs, programs=programs, unroll=choice.stages == 1,
        )  # fmt: skip
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
    )(*operands, x)


@functools.partial(jax.jit, static_argnames=("kinds", "widths", "phase", "interpret", "choice"))
def _expand_add(y, h, operands, *, kinds, widths, phase, interpret, choice: Choice):
    outputs = Outputs.of(kinds, widths, operands[2].shape[1], choice)
    if phase == "decode":
        programs = min(operands[0].shape[0], choice.programs)
        unroll = choice.stages == 1
        body = functools.partial(_triton_decode.expand_kernel, programs=programs, unroll=unroll)
    else:
        body = functools.partial(_triton_prefill.expand_kernel, rows=choice.tokens)
        programs = pl.cdiv(y.shape[0], choice.tokens)
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
def _decode_delta(h, operands, *, kinds, widths, dtype, interpret, choice: Choice):
    outputs = Outputs.of(kinds, widths, operands[2].shape[1], choice)
    programs = min(operands[0].shape[0], choice.programs)
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
    )(*operands, h)  # fmt: skip


@functools.partial(jax.jit, static_argnames=("kinds", "interpret", "choice"))
def _prefill_gate(y, h, operands, *, kinds, interpret, choice: Choice):
    tokens, d = y.shape[0], y.shape[1] // 2
    cut = tiling(d, operands[2].shape[1], choice)
    body = functools.partial(
        _triton_gated.prefill_kernel,
        kinds=kinds, cut=cut, ranks=rank_tile(h.shape[3], choice), rows=choice.tokens,
    )  # fmt: skip
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((tokens, d), y.dtype),
        grid=(cut.programs, pl.cdiv(tokens, choice.tokens)),
        interpret=interpret,
        compiler_params=_params(choice),
        name="lora_prefill_gate",
    )(*operands, h, y)
