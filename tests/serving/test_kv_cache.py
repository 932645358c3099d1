"""KV blocks: ownership, growth, and hashes that tell adapters apart."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from serving.kv_cache import SCRAP_BLOCK, BlockPool, BlockTable


KEY_A, KEY_B = "aa" * 32, "bb" * 32


def hashes(tokens: list[int], key: str | None, *, start: int = 0, steps: int = 1) -> list[bytes]:
    table = BlockTable(4, key, start)
    for end in range(0, len(tokens) + 1, steps):
        table.record_full(tokens[:end])
    table.record_full(tokens)
    return table.hashes


def test_hashes_depend_on_the_adapter_and_on_all_tokens_before():
    tokens = list(range(12))
    assert len(hashes(tokens, None)) == 3
    assert len({*hashes(tokens, None), *hashes(tokens, KEY_A), *hashes(tokens, KEY_B)}) == 9
    changed = [99, *tokens[1:]]
    assert not set(hashes(changed, KEY_A)) & set(hashes(tokens, KEY_A))
    same_start = [*tokens[:8], 7, 7, 7, 7]
    assert hashes(same_start, KEY_A)[:2] == hashes(tokens, KEY_A)[:2]


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 5))
def test_hashes_do_not_depend_on_how_the_tokens_came(tokens, steps):
    assert hashes(tokens, KEY_A, steps=steps) == hashes(tokens, KEY_A)


_RUNS = st.tuples(
    st.lists(st.integers(0, 1), max_size=9),
    st.sampled_from([None, KEY_A, KEY_B]),
    st.integers(0, 8),
)


@given(_RUNS, _RUNS)
def test_a_block_is_known_by_its_tokens_and_by_which_ran_with_which_adapter(one, other):
    made = []
    for tokens, key, start in (one, other):
        rows = [(token, key if i >= start else None) for i, token in enumerate(tokens)]
        made.append((rows, hashes(tokens, key, start=start)))
    (rows, one_hashes), (other_rows, other_hashes) = made
    for block, (left, right) in enumerate(zip(one_hashes, other_hashes, strict=False)):
        end = 4 * (block + 1)
        assert (left == right) == (rows[:end] == other_rows[:end])


def test_a_pool_needs_a_block_beside_the_scrap_block():
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(1, 4)


class BlockPoolMachine(RuleBasedStateMachine):
    """Tables grow and are released in any order; no block is lost, shared, or the scrap block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 4)
        self.tables = [BlockTable(4, None) for _ in range(4)]

    @rule(index=st.integers(0, 3), tokens=st.integers(0, 30))
    def grow(self, index, tokens):
        table = self.tables[index]
        if self.pool.can_grow(table, tokens):
            self.pool.grow(table, tokens)
            assert table.capacity >= tokens
        else:
            assert table.blocks_for(tokens) > self.pool.free

    @rule(index=st.integers(0, 3))
    def release(self, index):
        self.pool.release(self.tables[index])
        assert not self.tables[index].blocks

    @invariant()
    def holds(self):
        self.pool.check_integrity(self.tables)
        assert all(SCRAP_BLOCK not in table.blocks for table in self.tables)
        used = sum(len(table.blocks) for table in self.tables)
        assert self.pool.usage == pytest.approx(used / self.pool.usable)


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
