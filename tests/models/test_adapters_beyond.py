"""Biases, DoRA, embeddings, head and token rows on whole models against peft's logits.

tests/oracle/test_adapters_beyond.py writes them.
"""

from __future__ import annotations

import pytest

from tests.support import families
from tests.support.peft_cases import BEYOND_CASES, BEYOND_GOLDEN, Row, Served, assert_golden


@pytest.mark.parametrize(("family", "tp"), [("llama", 2), ("llama_biases", 1)])
def test_a_mixed_batch_has_pefts_logits_and_the_bare_bases_bits(family: str, tp: int) -> None:
    names = BEYOND_CASES[family]
    served = Served(
        families.GOLDEN / family, {name: BEYOND_GOLDEN / family / name for name in names}, tp
    )
    rows = [Row(None, 2), *(Row(name, 2) for name in names), Row(None, 0)]
    assert_golden(served, rows, family, BEYOND_GOLDEN / family)
