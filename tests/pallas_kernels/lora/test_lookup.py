"""Looking A's columns up is the shrink of one-hot inputs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lora import Routing, decode_tiles, expand_add, look_up
from tests.pallas_kernels.lora.world import D_IN, LAYER, MAX_RANK, RANKS, USED, WIDTHS, world


@pytest.mark.parametrize("kind", range(len(WIDTHS)))
def test_h_is_the_column_of_a_by_each_tokens_slot(kind):
    made, rng = world(), np.random.default_rng(0)
    slots = np.array([0, *USED, *USED, 0], np.int32)
    ids = rng.integers(0, D_IN, len(slots)).astype(np.int32)
    ids[1:3] = 0, D_IN - 1
    routing = Routing(slots, np.zeros((0, 3), np.int32), decode_tiles(slots))
    args = (made.tables, routing)
    h = look_up(jnp.asarray(ids), *args, layer=LAYER, kind=kind, max_rank=MAX_RANK)
    y = np.random.default_rng(1).normal(size=(len(slots), WIDTHS[kind])).astype(np.float32)
    got = expand_add(
        jnp.asarray(y), h, *args, layer=LAYER, kinds=(kind,), widths=(WIDTHS[kind],),
        max_rank=MAX_RANK, phase="decode", backend="xla",
    )  # fmt: skip
    for token, (slot, id_) in enumerate(zip(slots, ids, strict=True)):
        start, wanted = 0, y[token].astype(np.float64)
        for part in range(len(RANKS[0])):
            if (kind, 0, slot, part) not in made.factors:
                continue
            a, b = made.factors[kind, 0, slot, part], made.factors[kind, 1, slot, part]
            column = np.asarray(h)[0, 0, token, start : start + len(a)]
            np.testing.assert_array_equal(column, a[:, id_].astype(np.float32))
            wanted = wanted + made.scale[kind, LAYER, slot, part] * (a[:, id_] @ b)
            start += len(a)
        np.testing.assert_allclose(np.asarray(got)[token], wanted, rtol=1e-5, atol=1e-4)
    assert np.asarray(got)[slots == 0].tobytes() == y[slots == 0].tobytes()
