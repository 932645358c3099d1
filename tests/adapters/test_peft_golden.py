"""Folders that peft saved read to what peft made of them (tests/oracle/test_adapters_door.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxlora.adapters.modules import AdaptableModule, ModuleTable, ParallelKind
from jaxlora.errors import AdapterError
from tests.support.peft_folders import read, tiny_table
from tests.tolerances import PEFT_DELTA_RTOL


GOLDEN = Path(__file__).parents[1] / "golden" / "adapters"
EXPECTED = {
    path.parent.relative_to(GOLDEN).as_posix(): json.loads(path.read_text())
    for path in sorted(GOLDEN.glob("*/*/expected.json"))
}
APPLIED = [name for name, expected in EXPECTED.items() if "refused" not in expected]
REFUSED = [name for name, expected in EXPECTED.items() if "refused" in expected]


def base(expected: dict[str, Any]) -> ModuleTable:
    modules = tuple(
        AdaptableModule(name, d_in, d_out, ParallelKind.COLUMN, bias=bias)
        for name, (d_in, d_out, bias) in expected["base"].items()
    )
    vocab, hidden = expected["vocab_size"], expected["hidden_size"]
    return tiny_table(expected["layers"], modules, vocab, hidden)


def assert_vector(got: np.ndarray | None, wanted: list[float] | None) -> None:
    assert (got is None) == (wanted is None)
    if got is not None:
        np.testing.assert_allclose(got, np.asarray(wanted), rtol=1e-6)


@pytest.mark.parametrize("version", ["peft-0.18.1", "peft-0.21.2"])
def test_each_peft_has_golden_folders(version):
    for names, least in ((APPLIED, 20), (REFUSED, 5)):
        assert len([name for name in names if name.startswith(f"{version}/")]) >= least


@pytest.mark.parametrize("name", EXPECTED)
def test_a_folder_is_of_the_peft_that_it_lies_under(name):
    config = json.loads((GOLDEN / name / "adapter_config.json").read_text())
    assert f"peft-{config['peft_version']}" == name.partition("/")[0]


@pytest.mark.parametrize("name", APPLIED)
def test_a_folder_saved_by_peft_reads_as_in_peft(name):
    expected, modules = EXPECTED[name], base(EXPECTED[name])
    adapter = read(GOLDEN / name, modules)
    assert list(adapter.invocation_tokens) == expected["invocation_tokens"]
    assert {modules.path(*site) for site in adapter.factors} == set(expected["modules"])
    for site, factors in adapter.factors.items():
        module = expected["modules"][modules.path(*site)]
        assert (factors.rank, factors.scale) == (module["rank"], module["scale"])
        terms = factors.scale * np.abs(factors.b).astype(np.float64) @ np.abs(factors.a)
        sums = factors.scale * (factors.b.astype(np.float64) @ factors.a.astype(np.float64)).sum(1)
        error = np.abs(sums - module["delta_row_sums"]) / terms.sum(1)
        assert error.max() <= PEFT_DELTA_RTOL
        assert_vector(factors.b_bias, module["b_bias"])
        assert_vector(factors.magnitude, module["magnitude"])
    assert {modules.path(*site) for site in adapter.biases} == set(expected["biases"])
    for site, bias in adapter.biases.items():
        assert_vector(bias, expected["biases"][modules.path(*site)])
    assert set(adapter.token_rows) == set(expected["token_rows"])
    for name, rows in adapter.token_rows.items():
        wanted = expected["token_rows"][name]
        assert list(rows.ids) == wanted["ids"]
        np.testing.assert_allclose(rows.rows, np.asarray(wanted["rows"]), rtol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_is_not_applied_is_refused_by_name(name):
    expected = EXPECTED[name]
    with pytest.raises(AdapterError) as caught:
        read(GOLDEN / name, base(expected))
    assert expected["refused"] in str(caught.value) and "\n" not in str(caught.value)
