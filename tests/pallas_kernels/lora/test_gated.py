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
    gated,
    pallas_triton,
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


WORLD = functools.partial(wd.world, widths=wd.GATED_WIDTHS)
plain = jax.jit(functools.partial(gate, interpret=INTERPRET))


@pytest.fixture(autouse=True)
def in_pallas_from_one_row_on(monkeypatch):
    """On a GPU; interpreted it always is."""
    monkeypatch.setattr(gated, "MIN_ROWS", 1)


@pytest.fixture(params=supported_backends())
def backend(request):
    wd.skip_unless_it_runs(request.param, INTERPRET)
    return request.param


@pytest.fixture
def run(backend):
    """run(slots, x, y, pool dtype) of one backend, in a prefill."""

    def run(slots, x, y, pool="float32"):
        tables = WORLD(pool).tables
        return fused(y, x, tables, wd.routing(slots), phase="prefill", backend=backend)

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


def assert_same(a, b) -> None:
    """The same bits, but for those of NaN, which no operation promises."""
    nan = np.isnan(np.asarray(b.astype(jnp.float32)))
    np.testing.assert_array_equal(np.isnan(np.asarray(a.astype(jnp.float32))), nan)
    np.testing.assert_array_equal(np.where(nan, 0, wd.bits(a)), np.where(nan, 0, wd.bits(b)))


def check(out, y, x, slots, pool="float32"):
    """Against float64; an error of the sums goes through the activation with slopes below 1.1."""
    sums, size = wd.expected(WORLD(pool), y, x, slots, wd.GATED_WIDTHS)
    want = in_float64(sums)
    dtype = out.dtype.name
    slack = LORA_KERNEL[dtype] * (
        1.1 * size[:, :D] * np.abs(sums[:, D:]) + size[:, D:] * size[:, :D]
    )
    error = np.abs(np.asarray(out.astype(jnp.float32), np.float64) - want)
    assert (error <= slack + GATED[dtype] * np.abs(want)).all()


@pytest.mark.parametrize(
    ("pool", "dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
)
def test_it_is_the_gate_of_the_sums(run, backend, pool, dtype):
    x, y = inputs(len(MIXED), dtype)
    x = wd.poison(x, MIXED)
    out = run(MIXED, x, y, pool)
    assert out.dtype == y.dtype
    check(out, y, x, MIXED, pool)
    tables = WORLD(pool).tables
    sums = summed(y, x, tables, wd.routing(MIXED), phase="prefill", backend=backend)
    if INTERPRET:
        np.testing.assert_array_equal(wd.bits(out), wd.bits(plain(sums)))


def test_in_decode_it_is_the_gate_of_the_sums_too(backend):
    x, y = inputs(len(MIXED))
    args = (y, wd.poison(x, MIXED), WORLD().tables, wd.routing(MIXED))
    out = fused(*args, phase="decode", backend=backend)
    check(out, y, x, MIXED)
    if INTERPRET:
        sums = summed(*args, phase="decode", backend=backend)
        np.testing.assert_array_equal(wd.bits(out), wd.bits(plain(sums)))


@pytest.mark.parametrize("slots", [ALL_DIFFERENT, LONG, (wd.WIDE,) * len(MIXED)])
def test_error_with_rows_alike_and_different_and_runs_across_tiles(run, slots):
    x, y = inputs(len(slots))
    x = wd.poison(x, slots)
    check(run(slots, x, y), y, x, slots)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_without_a_delta_have_the_bits_of_the_gate_alone(run, dtype):
    x, y = inputs(len(MIXED), dtype)
    odd = jnp.asarray([np.inf, -np.inf, -0.0, 1e-40, np.nan, -200.0], y.dtype)
    y = y.at[1, : len(odd)].set(odd).at[1, D : D + len(odd)].set(odd[::-1])
    out, base = run(MIXED, wd.poison(x, MIXED), y, dtype), plain(y)
    slots = np.asarray(MIXED)
    rows = np.flatnonzero(slots == wd.BASE)
    assert_same(out[rows], base[rows])
    assert (wd.bits(out) != wd.bits(base))[slots != wd.BASE].any(axis=1).all()
    assert_same(run((wd.BASE,) * len(MIXED), x * np.nan, y, dtype), base)


def test_a_kind_of_rank_0_keeps_its_bits(run):
    """up has no rank there: its -0.0 gives zeros of the gate's opposite sign."""
    slots = (wd.NOT_EVERYWHERE,) * len(MIXED)
    x, y = inputs(len(slots))
    up = y[:, D:].at[:, ::5].set(-0.0)
    y = y.at[:, D:].set(up)
    out = np.asarray(run(slots, x, y))
    gated = in_float64(wd.expected(WORLD(), y, x, slots, wd.GATED_WIDTHS)[0])
    signs = np.signbit(out[:, ::5])
    np.testing.assert_array_equal(out[:, ::5], 0)
    np.testing.assert_array_equal(signs, np.signbit(gated[:, ::5]))


def test_a_row_has_the_same_bits_alone_at_any_position_and_beside_any_neighbours(run):
    x, y = inputs(len(MIXED))
    together = wd.bits(run(MIXED, x, y))
    for t in (0, 6, 9):
        alone = run(MIXED[t : t + 1], x[t : t + 1], y[t : t + 1])
        np.testing.assert_array_equal(wd.bits(alone)[0], together[t])
    order = np.random.default_rng(2).permutation(len(MIXED))
    moved = wd.bits(run(np.asarray(MIXED)[order], x[order], y[order]))
    np.testing.assert_array_equal(moved, together[order])
    others, keep = np.asarray(ALL_DIFFERENT), [0, 2, 6]
    others[keep] = np.asarray(MIXED)[keep]
    beside = wd.bits(run(others, x, y))
    np.testing.assert_array_equal(beside[keep], together[keep])


def test_a_row_has_the_same_bits_in_a_longer_run(run):
    x, y = inputs(len(LONG))
    long = wd.bits(run(LONG, x, y))
    few = slice(len(LONG) - len(MIXED), None)
    short = wd.bits(run(LONG[few], x[few], y[few]))
    np.testing.assert_array_equal(short, long[few])


def test_a_row_of_nan_and_infinity_stays_a_matter_of_its_own(run):
    x, y = inputs(len(MIXED))
    clean = wd.bits(run(MIXED, x, y))
    bad = wd.bits(run(MIXED, x.at[2].set(np.nan).at[4].set(np.inf), y))
    others = [t for t in range(len(MIXED)) if t not in (2, 4)]
    np.testing.assert_array_equal(bad[others], clean[others])


def test_an_adapter_of_nan_stays_a_matter_of_its_own(run):
    x, y = inputs(len(MIXED))
    clean = wd.bits(run(MIXED, x, y))
    slots = np.asarray(MIXED)
    slots[[2, 4]] = wd.UNUSED
    bad = run(slots, x, y)
    others = [t for t in range(len(MIXED)) if t not in (2, 4)]
    np.testing.assert_array_equal(wd.bits(bad)[others], clean[others])
    assert np.isnan(np.asarray(bad)[[2, 4]]).all()


def prefill_shrink(x):
    args = (WORLD().tables, wd.routing(MIXED), wd.LAYER)
    return args, pallas_triton.shrink(x, *args, phase="prefill", **HOW)


def test_h_that_counts_for_nothing_may_hold_anything():
    x, y = inputs(len(MIXED))
    args, h = prefill_shrink(x)
    tables, routing = args[:2]
    rank = tables.rank[: len(KINDS), wd.LAYER].sum(-1)[:, routing.slots, None]
    outside = (jnp.arange(wd.MAX_RANK)[None, None] >= rank)[:, None]
    outs = [
        pallas_triton.prefill_gate(
            y, jnp.where(outside, filler, h), *args, kinds=KINDS, interpret=INTERPRET
        )
        for filler in (np.nan, 0.0)
    ]
    np.testing.assert_array_equal(wd.bits(outs[0]), wd.bits(outs[1]))


def test_tiles_of_any_shape_give_the_same_bits():
    x, y = inputs(len(MIXED))
    args, h = prefill_shrink(x)
    usual = pallas_triton.choice("prefill_gate", wd.MAX_RANK)
    more = usual._replace(columns=64, span=128)
    outs = [
        pallas_triton.prefill_gate(y, h, *args, kinds=KINDS, cut_by=c, interpret=INTERPRET)
        for c in (usual, more)
    ]
    np.testing.assert_array_equal(wd.bits(outs[0]), wd.bits(outs[1]))


def test_the_layer_may_be_traced(run, backend):
    x, y = inputs(len(MIXED))
    args = (y, x, WORLD().tables, wd.routing(MIXED))
    layers = map(jnp.int32, (0, wd.LAYER))
    at = [fused(*args, layer, phase="prefill", backend=backend) for layer in layers]
    np.testing.assert_array_equal(wd.bits(at[1]), wd.bits(run(MIXED, x, y)))
    assert (wd.bits(at[0]) != wd.bits(at[1])).any()


@pytest.mark.parametrize(
    ("d_in", "d", "w", "dtype", "parts"),
    [(4096, 12288, 256, "bfloat16", 2), (1536, 576, 64, "float32", 1)],
)
def test_the_kernels_lower_for_a_gpu(d_in, d, w, dtype, parts):
    def program(y, x, tables, routing):
        how = {"kinds": KINDS, "widths": (d, d), "max_rank": 512, "phase": "prefill"}
        return add_delta_gated(y, x, tables, routing, layer=1, **how), gate(y)

    with mock.patch("jax.default_backend", lambda: "gpu"):
        text = lowered(program, *shapes(700, d_in, (d, d), w, dtype, dtype, parts))
    assert text.count("__gpu$xla.gpu.triton") == 3
