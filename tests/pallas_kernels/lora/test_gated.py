"""silu(gate) * up, alone and with the deltas of gate and up added in the same kernel."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lora import (
    add_delta,
    add_delta_gated,
    gate,
    pallas_triton,
    shrink,
    supported_backends,
)
from tests.pallas_kernels.lora import world as wd
from tests.pallas_kernels.lora.test_api import lowered, shapes
from tests.pallas_kernels.lora.test_numerics import ALL_DIFFERENT, INTERPRET, LONG, MIXED
from tests.tolerances import GATED, LORA_KERNEL


pytestmark = pytest.mark.pallas
KINDS = (0, 1)  # NOT_EVERYWHERE has no rank at the second
D = wd.GATED_WIDTH
HOW = {"kinds": KINDS, "max_rank": wd.MAX_RANK, "interpret": INTERPRET}
PHASES = ("decode", "prefill")


def inputs(tokens: int, dtype: str = "float32"):
    """x, and y whose rows include what only a select keeps."""
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((tokens, wd.D_IN)), dtype)
    y = rng.standard_normal((tokens, 2 * D)) * 3
    y[:, ::7] = -0.0
    return x, jnp.asarray(y, dtype)


@functools.partial(jax.jit, static_argnames=("phase", "backend"))
def fused(y, x, tables, routing, layer=wd.LAYER, *, phase, backend):
    return add_delta_gated(
        y, x, tables, routing, layer=layer, widths=(D, D), phase=phase, backend=backend, **HOW
    )


@functools.partial(jax.jit, static_argnames=("phase", "backend"))
def summed(y, x, tables, routing, *, phase, backend):
    return add_delta(
        y, x, tables, routing,
        layer=wd.LAYER, widths=(D, D), phase=phase, backend=backend, **HOW,
    )  # fmt: skip


plain = jax.jit(functools.partial(gate, interpret=INTERPRET))


@pytest.fixture(params=PHASES)
def phase(request):
    return request.param


@pytest.fixture(params=supported_backends())
def backend(request):
    if request.param == "mosaic" and INTERPRET:
        pytest.skip("mosaic is not interpreted")
    return request.param


@pytest.fixture
def run(phase, backend):
    """run(slots, x, y, pool dtype) of one backend and phase."""

    def run(slots, x, y, pool="float32"):
        tables = wd.world(pool, widths=wd.GATED_WIDTHS).tables
        return fused(y, x, tables, wd.routing(slots), phase=phase, backend=backend)

    return run


def in_float64(y) -> np.ndarray:
    y = np.asarray(jnp.asarray(y, jnp.float32), np.float64)
    with np.errstate(over="ignore"):
        return y[:, :D] / (1 + np.exp(-y[:, :D])) * y[:, D:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 4, 13])
def test_the_gate_against_float64(dtype, tokens):
    _, y = inputs(tokens, dtype)
    out = plain(y)
    assert out.shape == (tokens, D)
    assert out.dtype == y.dtype
    want = in_float64(y)
    error = np.abs(np.asarray(out.astype(jnp.float32), np.float64) - want)
    assert (error <= GATED[dtype] * np.abs(want)).all()


def test_the_gate_of_values_that_overflow():
    values = jnp.asarray([-np.inf, -200.0, -0.0, 0.0, 200.0, np.inf, np.nan], jnp.float32)
    y = jnp.concatenate([values, jnp.full(7, 2.0)])[None]
    want = [np.nan, -0.0, -0.0, 0.0, 400.0, np.inf, np.nan]
    np.testing.assert_array_equal(plain(y)[0], np.asarray(want, np.float32))


@pytest.mark.skipif(not INTERPRET, reason="on a GPU the gate is Pallas's")
def test_off_a_gpu_the_gate_is_xlas():
    _, y = inputs(5, "bfloat16")
    want = jax.jit(lambda y: jax.nn.silu(y[:, :D]) * y[:, D:])(y)
    np.testing.assert_array_equal(wd.bits(jax.jit(gate)(y)), wd.bits(want))


def test_gate_and_up_of_different_widths_are_refused():
    x, y = inputs(2)
    with pytest.raises(ValueError, match="y: wanted gate and up of equal width, got 7 columns"):
        gate(y[:, :7])
    args = (wd.world().tables, wd.routing((0, 1)))
    how = {"layer": 0, "kinds": KINDS, "max_rank": wd.MAX_RANK, "phase": "decode"}
    with pytest.raises(ValueError, match=r"widths: wanted two that are equal, got \(150, 40\)"):
        add_delta_gated(y[:, :190], x, *args, widths=(150, 40), **how)
    with pytest.raises(ValueError, match="x: wanted 2 tokens"):
        more = {"backend": "triton", "interpret": True}
        add_delta_gated(y, x[:1], *args, widths=(D, D), **how, **more)


@pytest.mark.parametrize(
    ("pool", "dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
)
@pytest.mark.parametrize("slots", [MIXED, ALL_DIFFERENT, LONG, (wd.WIDE,) * 5])
def test_it_is_the_gate_of_the_sums(run, phase, backend, pool, dtype, slots):
    x, y = inputs(len(slots), dtype)
    x = wd.poison(x, slots)
    out = run(slots, x, y, pool)
    assert out.dtype == y.dtype
    tables = wd.world(pool, widths=wd.GATED_WIDTHS).tables
    sums = summed(y, x, tables, wd.routing(slots), phase=phase, backend=backend)
    want = plain(sums)
    error = np.abs(np.asarray(out.astype(jnp.float32)) - np.asarray(want.astype(jnp.float32)))
    np.testing.assert_array_equal(wd.bits(out), wd.bits(want))
