"""The factor pool on a device: what a slot's tables lead to is the adapter, byte for byte."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.adapters.placement import cut, to_rows
from jaxlora.adapters.pool import FactorPool
from jaxlora.adapters.pool_shape import PoolShape
from jaxlora.errors import CapacityError
from jaxlora.parallel.mesh import make_mesh
from pallas_kernels.lora.tables import SIDE_A, SIDE_B
from tests.support.adapters import TINY_MODULES, tiny_adapter


def make_pool(*adapters, tp=1, slots=None, memory=None, dtype=jnp.float32):
    shape = PoolShape.for_adapters(
        list(adapters),
        TINY_MODULES,
        tp,
        jnp.dtype(dtype).itemsize,
        memory=memory,
        slots=slots,
        max_rank=None,
    )
    return FactorPool(shape, TINY_MODULES, make_mesh(tp), dtype)


def assert_holds(pool, slot, adapter):
    tables = [np.asarray(table) for table in pool.tables.factors]
    rows, first_row, rank, scale = tables
    for (layer, name), factors in adapter.factors.items():
        kind = TINY_MODULES.kinds[name]
        assert rank[kind, layer, slot, 0] == factors.rank
        assert scale[kind, layer, slot, 0] == np.float32(factors.scale * adapter.strength)
        for index, pair in enumerate(cut(factors, TINY_MODULES.modules[kind], pool.tp)):
            for side in (SIDE_A, SIDE_B):
                expected = to_rows(pair[side].astype(pool.dtype), pool.w)
                start = first_row[kind, side, layer, slot, 0]
                np.testing.assert_array_equal(rows[index, start : start + len(expected)], expected)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_loaded_adapters_are_in_the_pool_and_slot_0_is_empty(tp, dtype):
    first, second = tiny_adapter("a", rank=3), tiny_adapter("b", seed=1, rank=700, strength=0.5)
    pool = make_pool(first, second, tp=tp, dtype=dtype)
    slots = [pool.load(first), pool.load(second)]
    assert 0 not in slots and len(set(slots)) == 2
    assert_holds(pool, slots[0], first)
    assert_holds(pool, slots[1], second)
    assert not np.asarray(pool.tables.factors.rank)[:, :, 0].any()
    pool.check_integrity()
    assert pool.allocator.free_rows == 0, "auto memory is what the adapters need"


def test_a_freed_slot_serves_the_next_adapter_and_leaves_others_alone():
    kept, gone, new = (tiny_adapter(name, seed=i) for i, name in enumerate("abc"))
    pool = make_pool(kept, gone)
    slot = pool.load(kept)
    pool.free(pool.load(gone))
    assert_holds(pool, pool.load(new), new)
    assert_holds(pool, slot, kept)
    pool.check_integrity()


def test_no_room_is_said_and_changes_nothing():
    first, second = tiny_adapter("a"), tiny_adapter("b", seed=1)
    pool = make_pool(first, slots=2)
    slot = pool.load(first)
    with pytest.raises(CapacityError, match="'b' needs 48 rows of the factor pool, 0 are free"):
        pool.load(second)
    assert_holds(pool, slot, first)
    pool.check_integrity()
    pool = make_pool(first)
    pool.load(first)
    with pytest.raises(CapacityError, match="no free adapter slot for 'b'"):
        pool.load(second)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 1000}, "--adapter-memory gives 1000"),
        ({"slots": 1}, "2 adapters were given, --adapter-slots is 1"),
        ({"max_rank": 2}, "an adapter has rank 3, --max-adapter-rank is 2"),
    ],
)
def test_adapters_that_do_not_fit_the_options_are_refused_by_option(options, message):
    adapters = [tiny_adapter("a"), tiny_adapter("b", seed=1)]
    options = {"memory": None, "slots": None, "max_rank": None, **options}
    with pytest.raises(CapacityError, match=message):
        PoolShape.for_adapters(adapters, TINY_MODULES, 1, 4, **options)
