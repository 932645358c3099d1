"""The factor pool on a device: what a slot's tables lead to is the adapter, byte for byte."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import cast

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.adapters.adapter import TokenRows, Vector
from jaxlora.adapters.base_weights import BaseWeights
from jaxlora.adapters.modules import EMBEDDING, HEAD
from jaxlora.adapters.placement import cut, cut_vector, to_rows
from jaxlora.adapters.pool import FactorPool
from jaxlora.adapters.pool_shape import PoolShape, Rows
from jaxlora.adapters.token_tables import Use
from jaxlora.errors import CapacityError
from jaxlora.parallel.mesh import make_mesh
from pallas_kernels.lora.tables import SIDE_A, SIDE_B
from tests.support.adapters import TINY_MODULES, tiny_adapter
from tests.support.peft_folders import tiny_table


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


@pytest.mark.parametrize("tp", [1, 2])
def test_vectors_and_token_rows_are_written_cut_freed_and_used_again(tp):
    modules = tiny_table(2, TINY_MODULES.modules, 50, 48)
    rng = np.random.default_rng(0)

    def adapter(name, seed):
        plain = tiny_adapter(name, seed=seed, modules=modules)
        biases = {(1, m.name): rng.normal(size=m.d_out).astype(np.float32) for m in modules.modules}
        rows = TokenRows((3, 7, 40), rng.normal(size=(3, 48)).astype(np.float32))
        return dataclasses.replace(plain, biases=biases, token_rows={EMBEDDING: rows, HEAD: rows})

    kept, gone, new = (adapter(name, i) for i, name in enumerate("abc"))
    shape = PoolShape.for_adapters(
        [kept, gone], modules, tp, 4, memory=None, slots=None, max_rank=None
    )
    base = cast(BaseWeights, SimpleNamespace())  # nothing is asked of it
    pool = FactorPool(shape, modules, make_mesh(tp), jnp.float32, base)
    slots = {kept.name: pool.load(kept)}
    pool.free(pool.load(gone))
    slots[new.name] = pool.load(new)
    pool.check_integrity()
    corrections, tokens = pool.tables.corrections, pool.tables.tokens
    assert corrections is not None and tokens is not None
    vectors, first_row = np.asarray(corrections.pool), np.asarray(corrections.first_row)
    assert (first_row[..., 0] == -1).all() and (first_row[:, Vector.GAIN] == -1).all()
    for loaded in (kept, new):
        slot = slots[loaded.name]
        for (layer, name), bias in loaded.biases.items():
            module = modules.module(name)
            start = first_row[modules.kinds[name], Vector.BIAS, layer, slot]
            for rank, part in enumerate(cut_vector(bias, module, tp)):
                rows = to_rows(part[None], pool.w)
                np.testing.assert_array_equal(vectors[rank, start : start + len(rows)], rows)
        for use in Use:
            run = slice(
                tokens.starts[use, slot], tokens.starts[use, slot] + tokens.counts[use, slot]
            )
            np.testing.assert_array_equal(tokens.ids[run], [3, 7, 40])
            np.testing.assert_array_equal(tokens.rows[run], loaded.token_rows[HEAD].rows)
    assert pool.shape.token_rows == 6, "a tied head's rows are not stored twice"


def test_memory_pays_for_vectors_and_token_rows_too():
    modules = tiny_table(2, TINY_MODULES.modules, 50, 48)
    plain = tiny_adapter("a", modules=modules)
    bias = {(0, "self_attn.q_proj"): np.ones(64, np.float32)}
    rows = {HEAD: TokenRows((1,), np.ones((1, 48), np.float32))}
    more = dataclasses.replace(plain, biases=bias, token_rows=rows)
    needed = Rows.of(plain, modules, 1).bytes(modules, 1, 2)
    assert Rows.of(more, modules, 1).bytes(modules, 1, 2) == needed + 64 * 4 + 48 * 2
    options = {"slots": None, "max_rank": None}
    PoolShape.for_adapters([more], modules, 1, 2, memory=needed + 352, **options)
    with pytest.raises(CapacityError, match=f"need {needed + 352} bytes a device"):
        PoolShape.for_adapters([more], modules, 1, 2, memory=needed + 351, **options)


def test_what_no_adapter_had_at_start_has_no_arrays_and_is_refused_later():
    plain = tiny_adapter("a")
    pool = make_pool(plain, slots=3)
    assert pool.tables.corrections is None and pool.tables.tokens is None
    assert not pool.shape.embedding and not pool.shape.head
    site, vector = next(iter(plain.factors)), np.ones(64, np.float32)
    more = {
        "rank 9": tiny_adapter("b", rank=9),
        "gains or biases": dataclasses.replace(plain, biases={site: vector}),
        "1 token rows": dataclasses.replace(
            plain, token_rows={HEAD: TokenRows((1,), np.ones((1, 48), np.float32))}
        ),
    }
    for lacking, adapter in more.items():
        with pytest.raises(CapacityError, match=f"needs {lacking}, which no adapter given"):
            pool.load(adapter)
    pool.check_integrity()


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
