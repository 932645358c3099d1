"""Biases, DoRA, embeddings, head and token rows on whole models against peft's logits.

tests/oracle/test_adapters_beyond.py writes them.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import families
from tests.support.peft_cases import BEYOND_CASES, BEYOND_GOLDEN, Row, Served
from tests.tolerances import LOGITS_ATOL


@pytest.mark.parametrize(("family", "tp"), [("llama", 2), ("llama_biases", 1)])
def test_a_mixed_batch_has_pefts_logits_and_the_bare_bases_bits(family: str, tp: int) -> None:
    names = BEYOND_CASES[family]
    served = Served(
        families.GOLDEN / family, {name: BEYOND_GOLDEN / family / name for name in names}, tp
    )
    rows = [Row(None, 2), *(Row(name, 2) for name in names), Row(None, 0)]
    with np.load(BEYOND_GOLDEN / family / "logits.npz") as expected:
        for row, got, bare in zip(
            rows, served.run(rows), served.run_without_adapters(rows), strict=True
        ):
            if row.adapter is None:
                np.testing.assert_array_equal(got.view(np.uint32), bare.view(np.uint32))
                wanted = families.golden_logits(family)[row.sequence]
            else:
                wanted = expected[row.golden_key]
            np.testing.assert_allclose(got, wanted, 0, LOGITS_ATOL, err_msg=str(row))
