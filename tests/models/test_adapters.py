"""Adapters on whole models against peft's logits (tests/oracle/test_adapters.py writes them)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import families
from tests.support.peft_cases import GOLDEN, GOLDEN_CASES, Served, mixed_rows
from tests.tolerances import LOGITS_ATOL


@pytest.mark.parametrize(
    ("family", "tp", "layers_per_program"),
    [("llama", 1, 2), ("llama", 2, 1), ("qwen3_biases", 1, 1), ("qwen3_biases", 2, 2)],
)
def test_a_mixed_batch_has_pefts_logits_and_the_bare_bases_bits(
    family: str, tp: int, layers_per_program: int
) -> None:
    folders = {name: GOLDEN / family / name for name in GOLDEN_CASES[family]}
    served = Served(families.GOLDEN / family, folders, tp, layers_per_program)
    rows = mixed_rows(GOLDEN_CASES[family])
    with np.load(GOLDEN / family / "logits.npz") as expected:
        for row, got, bare in zip(
            rows, served.run(rows), served.run_without_adapters(rows), strict=True
        ):
            if row.adapter is None:
                np.testing.assert_array_equal(got.view(np.uint32), bare.view(np.uint32))
                wanted = families.golden_logits(family)[row.sequence]
            else:
                wanted = expected[row.golden_key]
            np.testing.assert_allclose(got, wanted, 0, LOGITS_ATOL, err_msg=str(row))
