"""Adapters saved by peft, on every family: logits of prompts and decode steps are peft's own.

With `--rewrite-golden` some adapters and peft's logits are written to tests/golden/models_adapters,
where the ordinary tests find them.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.oracle.test_models import make_oracle, oracle_logits
from tests.support.families import CASES
from tests.support.peft_cases import ADAPTERS, GOLDEN, GOLDEN_CASES, Row, Served, mixed_rows
from tests.tolerances import LOGITS_ATOL


torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.oracle

ROWS = mixed_rows(ADAPTERS)
# Every token of an adapter's row has a logit that is this far from the base's.
LEAST_EFFECT = 100 * LOGITS_ATOL


@dataclasses.dataclass(frozen=True)
class Case:
    """Folders that transformers and peft saved, and their logits of `families.sequences()`."""

    model: Path
    adapters: Mapping[str, Path]
    logits: Mapping[str | None, list[np.ndarray]]

    def expected(self, row: Row) -> np.ndarray:
        return self.logits[row.adapter][row.sequence]


def save_adapter(name: str, family: str, folder: Path) -> None:
    """Adapt a family's tiny model by peft, with deltas about as large as its products."""
    options = peft.LoraConfig(task_type="CAUSAL_LM", **ADAPTERS[name])
    adapted = peft.get_peft_model(make_oracle(family), options)
    generator = torch.Generator().manual_seed(list(ADAPTERS).index(name))
    for path, parameter in adapted.named_parameters():
        if "lora_" in path:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = noise * parameter.shape[1] ** -0.5
    adapted.save_pretrained(folder)


def loaded_by_peft(family: str, folder: Path) -> Any:
    return peft.PeftModel.from_pretrained(make_oracle(family), folder).eval()


def make_case(
    family: str, names: Iterable[str], save: Callable[[str, str, Path], None], root: Path
) -> Case:
    """A family's tiny model and its adapters as `save` makes them, in `root`."""
    base = make_oracle(family)
    base.save_pretrained(root / "model")
    logits: dict[str | None, list[np.ndarray]] = {None: oracle_logits(base)}
    folders = {name: root / name for name in names}
    for name, folder in folders.items():
        save(name, family, folder)
        logits[name] = oracle_logits(loaded_by_peft(family, folder))
    return Case(root / "model", folders, logits)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family = request.param
    made = make_case(family, ADAPTERS, save_adapter, tmp_path_factory.mktemp(family))
    if request.config.getoption("--rewrite-golden") and family in GOLDEN_CASES:
        write_golden(GOLDEN / family, GOLDEN_CASES[family], made)
    return made


@pytest.fixture(scope="module", params=[1, 2])
def served(request: pytest.FixtureRequest, case: Case) -> Served:
    return Served(case.model, case.adapters, tp=request.param)


def write_golden(target: Path, names: tuple[str, ...], case: Case) -> None:
    """The adapters' folders, and the logits of the rows that the ordinary tests run."""
    shutil.rmtree(target, ignore_errors=True)
    for name in names:
        (target / name).mkdir(parents=True)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(case.adapters[name] / file, target / name)
    rows = {row.golden_key: case.expected(row) for row in mixed_rows(names) if row.adapter}
    np.savez_compressed(target / "logits.npz", **rows)


def test_each_adapter_moves_every_token(case: Case) -> None:
    """So that what follows can tell an adapter from the base and from another."""
    for row in ROWS:
        for name in {None, *ADAPTERS} - {row.adapter}:
            other = case.logits[name][row.sequence]
            moved = np.abs(case.expected(row) - other).max(axis=1)
            assert moved.min() > LEAST_EFFECT, (row, name)


def test_a_mixed_batch_has_pefts_logits_and_the_bare_bases_bits(case: Case, served: Served) -> None:
    mixed, bare = served.run(ROWS), served.run_without_adapters(ROWS)
    for row, got, base in zip(ROWS, mixed, bare, strict=True):
        assert_logits(got, case, row)
        if row.adapter is None:
            np.testing.assert_array_equal(got.view(np.uint32), base.view(np.uint32))


def test_each_adapter_alone_has_pefts_logits(case: Case, served: Served) -> None:
    for row in ROWS:
        if row.adapter:
            (got,) = served.run([row])
            assert_logits(got, case, row)


def assert_logits(got: np.ndarray, case: Case, row: Row) -> None:
    np.testing.assert_allclose(got, case.expected(row), 0, LOGITS_ATOL, err_msg=str(row))
