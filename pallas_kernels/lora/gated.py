"""The gated activation silu(gate) * up (SwiGLU, Shazeer 2020), of gate and up side by side.

Whether Pallas makes it depends on platform and rows alone, never on adapters: a row without an
adapter has the same bits here and where one kernel adds the other rows' deltas as well.
"""

from __future__ import annotations

import functools

import jax
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float

from pallas_kernels.lora import _triton_gated
from pallas_kernels.lora._triton_common import tiling
from pallas_kernels.lora.checks import check_rows
from pallas_kernels.lora.tilings import Choice, choice


MIN_ROWS = 512  # for fewer, what follows the product is a small part of it


def in_pallas(rows: int, *, interpret: bool = False) -> bool:
    """Whether `gate` of so many rows is Pallas's."""
    return interpret or (rows >= MIN_ROWS and jax.default_backend() == "gpu")


def gate(
    y: Float[Array, "tokens d2"],
    *,
    interpret: bool = False,
    cut_by: Choice | None = None,  # None: this card's
) -> Float[Array, "tokens d"]:
    """silu(y[:, :d]) * y[:, d:] in y's dtype, d half of y's columns.

    On a GPU from MIN_ROWS rows on, or interpreted, Pallas-Triton: computed in float32, rounded
    once. Elsewhere XLA, in y's dtype. Raises ValueError for an odd number of columns.
    """
    check_rows("y", y)
    if y.shape[1] % 2:
        raise ValueError(f"y: wanted gate and up of equal width, got {y.shape[1]} columns")
    if in_pallas(y.shape[0], interpret=interpret):
        return _gate(y, interpret=interpret, choice=cut_by or choice("gate", 0))
    d = y.shape[1] // 2
    return jax.nn.silu(y[:, :d]) * y[:, d:]


# The inner jit makes a program of many layers trace and lower the kernel once.
@functools.partial(jax.jit, static_argnames=("interpret", "choice"))
def _gate(y, *, interpret, choice: Choice):
    tokens, d = y.shape[0], y.shape[1] // 2
    cut = tiling(d, choice.columns, choice)
    return pl.pallas_call(
        functools.partial(_triton_gated.gate_kernel, cut=cut, rows=choice.tokens),
        out_shape=jax.ShapeDtypeStruct((tokens, d), y.dtype),
        grid=(cut.programs, pl.cdiv(tokens, choice.tokens)),
        interpret=interpret,
        compiler_params=pltriton.CompilerParams(num_warps=choice.warps, num_stages=choice.stages),
        name="gate",
    )(y)
