"""How factors are cut for a mesh and laid out as pool rows."""

from __future__ import annotations

import numpy as np
import pytest

from jaxlora.adapters.adapter import Factors
from jaxlora.adapters.modules import AdaptableModule, ModuleTable, ParallelKind
from jaxlora.adapters.placement import adapter_row_lengths, cut, factor_rows, row_width, to_rows
from tests.support.adapters import TINY_MODULES, tiny_adapter


@pytest.mark.parametrize(
    ("widths", "tp", "expected"),
    [((576, 192), 1, 64), ((4096, 1024), 1, 256), ((4096, 1024), 8, 128), ((40, 24), 1, 32)],
)
def test_row_width_divides_the_cut_widths_where_that_is_not_tiny(widths, tp, expected):
    modules = tuple(
        AdaptableModule(f"m{i}", widths[0], width, ParallelKind.COLUMN)
        for i, width in enumerate(widths)
    )
    assert row_width(ModuleTable(1, modules, vocab_size=1), tp) == expected


@pytest.mark.parametrize("kind", ParallelKind)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_ranks_deltas_make_the_whole_delta(kind, tp):
    rng = np.random.default_rng(0)
    module = AdaptableModule("m", 16, 24, kind)
    factors = Factors(rng.normal(size=(3, 16)), rng.normal(size=(24, 3)), 1.0)
    x = rng.normal(size=(5, 16))
    whole = x @ factors.a.T @ factors.b.T
    cuts = cut(factors, module, tp)
    assert len(cuts) == tp
    for a, b in cuts:
        assert (a.shape[1], b.shape[1]) == module.local_widths(tp)
    match kind:
        case ParallelKind.COLUMN:
            deltas = [x @ a.T @ b for a, b in cuts]
            np.testing.assert_allclose(np.concatenate(deltas, axis=1), whole)
        case ParallelKind.ROW:
            xs = np.split(x, tp, axis=1)
            total = sum(part @ a.T @ b for part, (a, b) in zip(xs, cuts, strict=True))
            np.testing.assert_allclose(total, whole)
        case ParallelKind.REPLICATED:
            for a, b in cuts:
                np.testing.assert_allclose(x @ a.T @ b, whole)


@pytest.mark.parametrize(("rank", "width", "w"), [(1, 32, 32), (3, 100, 32), (17, 64, 64)])
def test_pool_row_of_a_column_block_is_where_the_kernels_look(rank, width, w):
    factor = np.random.default_rng(0).normal(size=(rank, width))
    rows = to_rows(factor, w)
    assert rows.shape == (factor_rows(rank, width, w), w)
    for i in range(rank):
        for column in range(-(-width // w) * w):
            value = rows[column // w * rank + i, column % w]
            assert value == (factor[i, column] if column < width else 0.0)


def test_an_adapter_takes_the_rows_of_its_true_rank_and_modules():
    adapter = tiny_adapter("a", rank=5)
    lengths = adapter_row_lengths(adapter, TINY_MODULES, 1, 16)
    # Each layer: q_proj 48 -> 64, o_proj 64 -> 48, in blocks of 16 columns.
    assert lengths == [5 * 3, 5 * 4, 5 * 4, 5 * 3] * 2
