"""Folders that peft saved read to what peft made of them (tests/oracle/test_adapters_door.py)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxlora.adapters.modules import AdaptableModule, ModuleTable, ParallelKind
from tests.support.peft_folders import read
from tests.tolerances import PEFT_DELTA_RTOL


GOLDEN = Path(__file__).parents[1] / "golden" / "adapters"
FOLDERS = sorted(path.parent for path in GOLDEN.glob("*/expected.json"))


def test_there_are_golden_folders():
    assert len(FOLDERS) >= 10


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_folder_saved_by_peft_reads_as_in_peft(folder):
    expected = json.loads((folder / "expected.json").read_text())
    modules = ModuleTable(
        expected["layers"],
        tuple(
            AdaptableModule(name, d_in, d_out, ParallelKind.COLUMN)
            for name, (d_in, d_out) in expected["base"].items()
        ),
    )
    adapter = read(folder, modules)
    assert {modules.path(*site) for site in adapter.factors} == set(expected["modules"])
    for site, factors in adapter.factors.items():
        module = expected["modules"][modules.path(*site)]
        assert (factors.rank, factors.scale) == (module["rank"], module["scale"])
        terms = factors.scale * np.abs(factors.b).astype(np.float64) @ np.abs(factors.a)
        sums = factors.scale * (factors.b.astype(np.float64) @ factors.a.astype(np.float64)).sum(1)
        error = np.abs(sums - module["delta_row_sums"]) / terms.sum(1)
        assert error.max() <= PEFT_DELTA_RTOL
