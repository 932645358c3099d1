"""What every LoRA backend must compute: interpreted on a CPU, compiled on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lora import (
    add_delta,
    expand_add,
    pallas_triton,
    resolve,
    shrink,
    supported_backends,
)
from tests.pallas_kernels.lora import world as wd
from tests.tolerances import LORA_KERNEL


pytestmark = pytest.mark.pallas
INTERPRET = jax.default_backend() != "gpu"

MIXED = (2, 0, 4, 1, 4, 0, 5, 3, 6, 8, 2, 0, 0)  # odd, unsorted, repeated, base rows at the end
LONG = (0,) * 3 + (2,) * 30 + (4,) * 33 + (2,) * 2 + (5,) * 3 + (0,) * 2  # runs across tiles
ALL_DIFFERENT = wd.USED + tuple(reversed(wd.USED[:6]))  # as long as MIXED
assert len(ALL_DIFFERENT) == len(MIXED)


@pytest.fixture(params=["decode", "prefill", "decode apart"])
def phase(request):
    """apart: the deltas are made apart from y."""
    return request.param


@pytest.fixture(params=supported_backends())
def run(request, phase):
    """run(slots, x, y, pool dtype) of one backend and phase."""
    wd.skip_unless_it_runs(request.param, INTERPRET)

    def run(slots, x, y, pool="float32"):
        return wd.run(
            y,
            x,
            wd.world(pool).tables,
            wd.routing(slots),
            jnp.int32(wd.LAYER),
            phase=phase,
            backend=request.param,
            interpret=INTERPRET,
        )

    return run


def assert_close(out, w, y, x, slots):
    want, size = wd.expected(w, y, x, slots)
    error = np.abs(np.asarray(out.astype(jnp.float32), np.float64) - want)
    assert (error <= LORA_KERNEL[out.dtype.name] * size).all()


@pytest.mark.parametrize(
    ("pool", "x_dtype", "y_dtype"),
    [
        ("float32", "float32", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "bfloat16", "float32"),
    ],
)
def test_error_against_float64(run, pool, x_dtype, y_dtype):
    x, y = wd.inputs(len(MIXED), x_dtype, y_dtype)
    out = run(MIXED, wd.poison(x, MIXED), y, pool)
    assert out.dtype == y.dtype
    assert_close(out, wd.world(pool), y, x, MIXED)


@pytest.mark.parametrize("slots", [(s,) * len(MIXED) for s in (1, wd.WIDE)] + [ALL_DIFFERENT])
def test_error_with_all_rows_alike_and_all_different(run, slots):
    x, y = wd.inputs(len(slots))
    assert_close(run(slots, x, y), wd.world(), y, x, slots)


def test_error_with_runs_across_tiles(run):
    x, y = wd.inputs(len(LONG))
    assert_close(run(LONG, wd.poison(x, LONG), y), wd.world(), y, x, LONG)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_base_rows_and_kinds_of_rank_0_keep_their_bits(run, dtype):
    x, y = wd.inputs(len(MIXED), dtype, dtype)
    y = y.at[1, :4].set(jnp.asarray([np.inf, -np.inf, -0.0, 1e-40], y.dtype))
    out = run(MIXED, wd.poison(x, MIXED), y, dtype)
    base = [t for t, s in enumerate(MIXED) if s == wd.BASE]
    np.testing.assert_array_equal(wd.bits(out)[base], wd.bits(y)[base])
    middle = slice(wd.WIDTHS[0], wd.WIDTHS[0] + wd.WIDTHS[1])
    partly = MIXED.index(wd.NOT_EVERYWHERE)
    np.testing.assert_array_equal(wd.bits(out)[partly, middle], wd.bits(y)[partly, middle])
    assert (wd.bits(out)[partly] != wd.bits(y)[partly]).any()


def test_a_batch_of_base_rows_keeps_its_bits(run):
    x, y = wd.inputs(len(MIXED))
    out = run((wd.BASE,) * len(MIXED), x * np.nan, y)
    np.testing.assert_array_equal(wd.bits(out), wd.bits(y))


def test_a_row_has_the_same_bits_alone_and_in_any_batch(run):
    x, y = wd.inputs(len(MIXED))
    together = wd.bits(run(MIXED, x, y))
    for t in (0, 2, 6, 8, 9):
        alone = run(MIXED[t : t + 1], x[t : t + 1], y[t : t + 1])
        np.testing.assert_array_equal(wd.bits(alone)[0], together[t])


def test_a_row_has_the_same_bits_at_any_position_and_beside_any_neighbours(run):
    x, y = wd.inputs(len(MIXED))
    together = wd.bits(run(MIXED, x, y))
    order = np.random.default_rng(2).permutation(len(MIXED))
    moved = wd.bits(run(np.asarray(MIXED)[order], x[order], y[order]))
    np.testing.assert_array_equal(moved, together[order])
    others = np.asarray(ALL_DIFFERENT)
    keep = [0, 2, 6]
    others[keep] = np.asarray(MIXED)[keep]
    beside = wd.bits(run(others, x, y))
    np.testing.assert_array_equal(beside[keep], together[keep])


def test_a_row_has_the_same_bits_in_a_longer_run(run):
    x, y = wd.inputs(len(LONG))
    long = wd.bits(run(LONG, x, y))
    slots = np.asarray(LONG)[-len(MIXED) :]
    short = wd.bits(run(slots, x[-len(MIXED) :], y[-len(MIXED) :]))
    np.testing.assert_array_equal(short, long[-len(MIXED) :])


def test_a_row_of_nan_and_infinity_stays_a_matter_of_its_own(run):
    x, y = wd.inputs(len(MIXED))
    clean = wd.bits(run(MIXED, x, y))
    bad = wd.bits(run(MIXED, x.at[2].set(np.nan).at[4].set(np.inf), y))
    others = [t for t in range(len(MIXED)) if t not in (2, 4)]
    np.testing.assert_array_equal(bad[others], clean[others])


def test_few_programs_that_go_through_many_tiles_give_the_same_bits(monkeypatch):
    slots = MIXED[:8]  # five tiles are used, of eight
    x, y = wd.inputs(len(slots))
    how = {
        "layer": wd.LAYER, "kinds": (0, 1, 2), "widths": wd.WIDTHS, "max_rank": wd.MAX_RANK,
        "phase": "decode", "backend": "triton", "interpret": INTERPRET,
    }  # fmt: skip
    args = (y, x, wd.world().tables, wd.routing(slots))
    want = wd.bits(add_delta(*args, **how))
    usual = pallas_triton.choice
    monkeypatch.setattr(pallas_triton, "choice", lambda *of: usual(*of)._replace(programs=4))
    np.testing.assert_array_equal(wd.bits(add_delta(*args, **how)), want)


def test_entries_made_once_give_the_same_bits(run, phase, request):
    backend = request.node.callspec.params["run"]
    x, y = wd.inputs(len(MIXED))
    tables, routing = wd.world().tables, wd.routing(MIXED)
    how = {"phase": phase, "backend": backend, "interpret": INTERPRET}
    ready = resolve(tables, routing, **how) if phase in ("decode", "prefill") else routing
    assert (ready.entries is not None) == (phase == "decode" and backend == "triton")
    out = wd.run(y, x, tables, ready, jnp.int32(wd.LAYER), **how)
    np.testing.assert_array_equal(wd.bits(out), wd.bits(run(MIXED, x, y)))


def test_the_same_call_gives_the_same_bits(run):
    x, y = wd.inputs(len(MIXED))
    first = wd.bits(run(MIXED, x, y))
    for _ in range(3):
        np.testing.assert_array_equal(wd.bits(run(MIXED, x, y)), first)


def test_the_layer_may_be_traced(run, phase, request):
    backend = request.node.callspec.params["run"]
    x, y = wd.inputs(len(MIXED))
    args = (y, x, wd.world().tables, wd.routing(MIXED))
    how = {"phase": phase, "backend": backend, "interpret": INTERPRET}
    at_0 = wd.bits(wd.run(*args, jnp.int32(0), **how))
    at_1 = wd.bits(wd.run(*args, jnp.int32(wd.LAYER), **how))
    np.testing.assert_array_equal(at_1, wd.bits(run(MIXED, x, y)))
    assert (at_0 != at_1).any()


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_add_delta_is_expand_add_of_shrink(phase):
    x, y = wd.inputs(len(MIXED))
    tables, routing = wd.world().tables, wd.routing(MIXED)
    how = {
        "layer": wd.LAYER, "kinds": (0, 1, 2), "max_rank": wd.MAX_RANK,
        "phase": phase, "backend": "xla",
    }  # fmt: skip
    h = shrink(x, tables, routing, **how)
    assert h.shape == (3, 1, len(MIXED), wd.MAX_RANK)
    assert h.dtype == jnp.float32
    outside = (
        jnp.arange(wd.MAX_RANK)[None, None]
        >= tables.rank[:, wd.LAYER].sum(-1)[:, routing.slots, None]
    )
    h = jnp.where(outside[:, None], np.nan, h)
    two = expand_add(y, h, tables, routing, widths=wd.WIDTHS, **how)
    one = add_delta(y, x, tables, routing, widths=wd.WIDTHS, **how)
    np.testing.assert_array_equal(wd.bits(one), wd.bits(two))


def test_a_pool_that_holds_one_factor_pair_and_no_spare_row(run, phase, request):
    backend = request.node.callspec.params["run"]
    a, b = np.full((1, 128), 0.5, np.float32), np.full((1, 128), 2.0, np.float32)
    one = jnp.ones((1, 1, 2, 1))
    tables = wd.FactorTables(
        jnp.asarray(np.concatenate([a, b])),
        jnp.asarray([[0, 0], [0, 1]], jnp.int32).reshape(1, 2, 1, 2, 1),
        jnp.asarray([0, 1], jnp.int32).reshape(1, 1, 2, 1),
        one,
    )
    out = wd.add_delta_of(phase)(
        jnp.zeros((2, 128)), jnp.ones((2, 128)), tables, wd.routing((0, 1)), layer=0, kinds=(0,),
        widths=(128,), max_rank=1, backend=backend, interpret=INTERPRET,
    )  # fmt: skip
    np.testing.assert_array_equal(out, np.stack([np.zeros(128), np.full(128, 128.0)]))


@pytest.mark.skipif(INTERPRET, reason="needs a GPU with 16 GB free")
@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_pool_of_more_than_2_to_the_31_elements(phase, backend):
    wd.skip_unless_it_runs(backend, INTERPRET)
    w, rank, rows = 256, 4, 2**31 // 256 + 64
    first = jnp.asarray([[0, 2**31 // w + 16], [0, 2**31 // w + 32]], jnp.int32)
    pool = jnp.zeros((rows, w), jnp.bfloat16)
    pool = jax.jit(lambda p: p.at[-64:].set(0.5), donate_argnums=0)(pool)
    tables = wd.FactorTables(
        pool,
        first.reshape(1, 2, 1, 2, 1),
        jnp.asarray([0, rank], jnp.int32).reshape(1, 1, 2, 1),
        jnp.ones((1, 1, 2, 1)),
    )
    out = wd.add_delta_of(phase)(
        jnp.zeros((3, w)), jnp.ones((3, w)), tables, wd.routing((1, 0, 1)), layer=0, kinds=(0,),
        widths=(w,), max_rank=16, backend=backend,
    )  # fmt: skip
    want = rank * (w * 0.5) * 0.5
    np.testing.assert_array_equal(out, np.asarray([want, 0.0, want])[:, None] * np.ones(w))
