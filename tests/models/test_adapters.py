"""Adapters on whole models against peft's logits (tests/oracle/test_adapters.py writes them)."""

from __future__ import annotations

import pytest

from tests.support import families
from tests.support.peft_cases import GOLDEN, GOLDEN_CASES, Served, assert_golden, mixed_rows


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
    assert_golden(served, rows, family, GOLDEN / family)
