"""Every public function refuses what its shapes, dtypes and static numbers tell it is wrong."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lora import (
    add_delta,
    add_delta_gated,
    add_delta_to_parts,
    decode_tiles,
    expand_add,
    gate,
    look_up,
    product_parts,
    resolve,
    shrink,
    tilings,
)
from pallas_kernels.lora._triton_product import cut_of
from tests.pallas_kernels.lora import world as wd


KINDS, SLOTS = (0, 1), (0, 1, 2)
TOKENS, D = len(SLOTS), wd.GATED_WIDTH
HOW = {"layer": 0, "kinds": KINDS, "max_rank": wd.MAX_RANK, "phase": "decode", "backend": "xla"}
OUT = {"widths": (D, D)}
X, Y = jnp.ones((TOKENS, wd.D_IN)), jnp.ones((TOKENS, 2 * D))


def tables():
    return wd.world(widths=wd.GATED_WIDTHS).tables


CALLS = {
    "shrink": lambda t, r, **how: shrink(X, t, r, **how),
    "expand_add": lambda t, r, **how: expand_add(Y, h_of(how), t, r, **OUT, **how),
    "add_delta": lambda t, r, **how: add_delta(Y, X, t, r, **OUT, **how),
    "add_delta_gated": lambda t, r, **how: add_delta_gated(Y, X, t, r, **OUT, **how),
    "add_delta_to_parts": lambda t, r, **how: add_delta_to_parts(
        Y[None], X, t, r, dtype=Y.dtype, **OUT, **how
    ),
    "look_up": lambda t, r, *, layer, kinds, max_rank, **_: look_up(
        jnp.zeros(TOKENS, jnp.int32), t, r, layer=layer, kind=kinds[0], max_rank=max_rank
    ),
    "resolve": lambda t, r, *, phase, **_: resolve(t, r, phase=phase),
}


def h_of(how):
    return jnp.ones((len(how["kinds"]), 1, TOKENS, max(how["max_rank"], 1)))


@pytest.mark.parametrize("name", [name for name in CALLS if name != "resolve"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer": wd.LAYERS}, "layer: wanted 0 to 1, got 2"),
        ({"layer": -1}, "layer: wanted 0 to 1, got -1"),
        ({"layer": np.int64(9)}, "layer: wanted 0 to 1, got 9"),
        ({"layer": jnp.zeros(1, jnp.int32)}, r"layer: wanted one integer, got int32\[1\]"),
        ({"kinds": (2, 0)}, r"kinds: wanted some of 0 to 1 in a tuple, got \(2,"),
        ({"kinds": (-1, 0)}, r"kinds: wanted some of 0 to 1 in a tuple, got \(-1,"),
        ({"max_rank": 0}, "max_rank: wanted at least 1"),
    ],
)
def test_numbers_outside_the_tables_are_refused(name, changes, message):
    (changed,) = changes
    if (name == "resolve") != (changed == "phase") and name == "resolve":
        pytest.skip(f"{name} takes no {changed}")
    if name == "look_up" and changed == "phase":
        pytest.skip(f"{name} takes no {changed}")
    with pytest.raises(ValueError, match=message):
        CALLS[name](tables(), wd.routing(SLOTS), **{**HOW, **changes})


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_row": jnp.zeros((2, 2, 2), jnp.int32)}, r"tables.first_row: wanted \[kinds, 2"),
        ({"pool": jnp.zeros(128)}, r"tables.pool: wanted \[rows, w\], got \(128,\)"),
        ({"rank": tables().rank[:1]}, "tables.rank: wanted shape"),
        ({"rank": tables().rank.astype(jnp.float32)}, "tables.rank: wanted int32, got float32"),
        ({"scale": tables().scale.astype(jnp.bfloat16)}, "tables.scale: wanted float32, got bf"),
    ],
)
def test_tables_of_wrong_shape_or_dtype_are_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        CALLS[name](tables()._replace(**changes), wd.routing(SLOTS), **HOW)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "look_up"])
@pytest.mark.parametrize(
    ("phase", "changes", "message"),
    [
        ("decode", {"tiles": np.zeros((0, 17), np.int32)}, "routing.tiles: has no row"),
        ("prefill", {"segments": np.zeros((0, 3), np.int32)}, "routing.segments: has no row"),
        ("prefill", {"segments": np.zeros((1, 2), np.int32)}, r"routing.segments: wanted \[n, 3\]"),
        ("decode", {"slots": np.zeros(TOKENS)}, "routing.slots: wanted integers, got float64"),
        ("decode", {"slots": np.zeros(0, np.int32)}, r"routing.slots: wanted \[tokens\], one or"),
        ("train", {}, "phase: wanted one of"),
    ],
)
def test_the_routing_of_another_phase_or_dtype_is_refused(name, phase, changes, message):
    """Without a tile or segment no row would get its delta, and nothing would say so."""
    routing = wd.routing(SLOTS)._replace(**changes)
    with pytest.raises(ValueError, match=message):
        CALLS[name](tables(), routing, **{**HOW, "phase": phase})


@pytest.mark.parametrize("name", [n for n in CALLS if n not in ("look_up", "resolve")])
def test_entries_of_other_tables_or_tiles_are_refused(name):
    shape = (2, TOKENS, 4 * 2)
    for entries in ([shape], [shape] * 3, [(2, TOKENS + 1, 8)] * 2, [(2, TOKENS, 4)] * 2):
        made = tuple(jnp.zeros(shape, jnp.int32) for shape in entries)
        with pytest.raises(
            ValueError, match=r"routing.entries: of other tables or tiles; wanted 2"
        ):
            CALLS[name](tables(), wd.routing(SLOTS)._replace(entries=made), **HOW)


def test_entries_that_are_there_are_made_anew_by_resolve():
    old = wd.routing(SLOTS)._replace(entries=(jnp.zeros((9, 9, 9), jnp.int32),))
    how = {"phase": "decode", "backend": "triton", "interpret": True}
    new = resolve(tables(), old, **how).entries
    assert new is not None
    assert [entry.shape for entry in new] == [(2, TOKENS, 8)] * wd.LAYERS


@pytest.mark.parametrize(
    ("what", "args", "message"),
    [
        ("x of three axes", (Y, X[None]), r"x: wanted \[tokens, d\], got \(1, 3, 200\)"),
        ("x of other tokens", (Y, X[:1]), "x: wanted 3 tokens as in y, got 1"),
        ("x of integers", (Y, X.astype(jnp.int32)), "x: wanted float32 or bfloat16, got int32"),
        ("y of float16", (Y.astype(jnp.float16), X), "y: wanted float32 or bfloat16, got float16"),
        ("y of one axis", (Y[0], X), r"y: wanted \[tokens, d\], got \(300,\)"),
    ],
)
def test_inputs_of_wrong_shape_or_dtype_are_refused(what, args, message):
    for function in (add_delta, add_delta_gated):
        with pytest.raises(ValueError, match=message):
            function(args[0], args[1], tables(), wd.routing(SLOTS), **OUT, **HOW)


def test_one_rows_delta_is_not_added_to_all_rows_of_the_parts():
    """[1, d] would broadcast."""
    how = {"dtype": Y.dtype, **OUT, **HOW, "backend": "triton", "interpret": True}
    with pytest.raises(ValueError, match=r"routing.slots: wanted shape \(3,\), got \(1,\)"):
        add_delta_to_parts(Y[None], X[1:2], tables(), wd.routing((1,)), **how)
    with pytest.raises(ValueError, match="x: wanted 3 tokens as in y, got 1"):
        add_delta_to_parts(Y[None], X[1:2], tables(), wd.routing(SLOTS), **how)
    with pytest.raises(ValueError, match=r"parts: wanted \[splits, tokens, d_out\]"):
        add_delta_to_parts(Y, X, tables(), wd.routing(SLOTS), **how)


@pytest.mark.parametrize(
    ("widths", "columns"), [((2 * D, 0), 2 * D), ((-1, 2 * D + 1), 2 * D), ([D, D], 2 * D)]
)
def test_widths_that_are_none_are_refused(widths, columns):
    with pytest.raises(ValueError, match=f"widths: wanted one a kind summing to {columns}"):
        add_delta(Y, X, tables(), wd.routing(SLOTS), **HOW, widths=widths)


def test_an_h_of_several_splits_is_not_cut_to_its_first():
    args = (tables(), wd.routing(SLOTS))
    h = jnp.ones((2, 2, TOKENS, wd.MAX_RANK))
    with pytest.raises(ValueError, match="h: wanted 1 splits, got 2: of another backend"):
        expand_add(Y, h, *args, **OUT, **HOW)
    with pytest.raises(ValueError, match="h: wanted float32, got bfloat16"):
        expand_add(Y, h[:, :1].astype(jnp.bfloat16), *args, **OUT, **HOW)
    with pytest.raises(ValueError, match=r"h: wanted shape \(2, 'splits', 3, 512\), got \(2, 3"):
        expand_add(Y, h[:, 0], *args, **OUT, **HOW)


def test_the_empty_name_is_no_backend():
    with pytest.raises(NotImplementedError, match="no LoRA backend ''"):
        CALLS["add_delta"](tables(), wd.routing(SLOTS), **{**HOW, "backend": ""})


def test_ids_that_do_not_fit_are_refused():
    how = {"layer": 0, "kind": 0, "max_rank": wd.MAX_RANK}
    with pytest.raises(ValueError, match=r"routing.slots: wanted shape \(4,\), got \(3,\)"):
        look_up(jnp.zeros(4, jnp.int32), tables(), wd.routing(SLOTS), **how)
    with pytest.raises(ValueError, match=r"ids: wanted \[tokens\] of integers, got float32\[3\]"):
        look_up(jnp.zeros(3), tables(), wd.routing(SLOTS), **how)


def test_a_list_of_slots_has_the_tiles_of_an_array():
    slots: Any = [0, 2, 0, 1]
    np.testing.assert_array_equal(decode_tiles(slots), decode_tiles(np.array(slots)))
    with pytest.raises(ValueError, match=r"slots: wanted \[tokens\] from 0 on, got \[1, -1\]"):
        decode_tiles(np.array([1, -1]))
    with pytest.raises(ValueError, match="slots: wanted"):
        decode_tiles(np.zeros((2, 2), np.int32))


def test_a_gate_of_one_axis_is_refused():
    with pytest.raises(ValueError, match=r"y: wanted \[tokens, d\], got \(300,\)"):
        gate(Y[0])


def test_a_product_that_its_cut_was_not_made_for_is_refused():
    """Rows past the cut's tile would never be written."""
    choice = tilings.ProductChoice(64, 128, 16, 4, 3)
    cut = cut_of(16, 256, 1024, choice)
    assert cut is not None
    x, weight = jnp.ones((16, 1024), jnp.bfloat16), jnp.ones((256, 1024), jnp.bfloat16)
    how = {"dtype": jnp.float32, "cut": cut, "choice": choice, "interpret": True}
    with pytest.raises(ValueError, match=r"x: wanted \[16 rows at most, 1024\], got \(17, 1024\)"):
        product_parts(jnp.ones((17, 1024), jnp.bfloat16), weight, **how)
    with pytest.raises(ValueError, match=r"x: wanted \[16 rows at most, 1024\], got \(16, 512\)"):
        product_parts(x[:, :512], weight, **how)
    with pytest.raises(ValueError, match=r"weight: wanted shape \(256, 1024\) as in the cut"):
        product_parts(x, weight[:128], **how)
    with pytest.raises(NotImplementedError, match="this card has no choice"):
        product_parts(x, weight, dtype=jnp.float32, cut=cut)
