"""Adapters that are more than factors of the layers' modules: logits are peft's own.

Biases, DoRA, embeddings, the head and token rows, each alone and all in one batch with ordinary
adapters and the base. With `--rewrite-golden` some of them and peft's logits are written to
tests/golden/models_beyond, where the ordinary tests find them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.oracle.test_adapters import Case, assert_logits, loaded_by_peft, make_case, write_golden
from tests.oracle.test_models import make_oracle, oracle_logits
from tests.support.peft_cases import (
    ADAPTERS,
    BEYOND,
    BEYOND_CASES,
    BEYOND_GOLDEN,
    Row,
    Served,
    mixed_rows,
)
from tests.tolerances import LOGITS_ATOL


torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(900)]  # each server compiles its programs

# Tied and not; biases everywhere, in q, k and v, and nowhere; norms between q, k and the rotation.
FAMILIES = ("llama", "llama_biases", "qwen2", "qwen3")
ORDINARY = ("patterns", "rslora")
ROWS = mixed_rows((*BEYOND, *ORDINARY))


def save_adapter(name: str, family: str, folder: Any) -> None:
    """Adapt a family's tiny model by peft; everything that it would train is random."""
    options = {**ADAPTERS, **BEYOND}[name]
    model = make_oracle(family)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(list({**ADAPTERS, **BEYOND}).index(name))
    for path, parameter in adapted.named_parameters():
        if not parameter.requires_grad:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if "lora_magnitude_vector" in path:
            parameter.data *= 1 + 0.3 * noise
        elif "lora_embedding_A" in path:
            parameter.data = noise
        else:
            parameter.data = noise * (parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.5)
    adapted.save_pretrained(folder)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, names = request.param, (*BEYOND, *ORDINARY)
    made = make_case(family, names, save_adapter, tmp_path_factory.mktemp(family))
    if request.config.getoption("--rewrite-golden") and family in BEYOND_CASES:
        write_golden(BEYOND_GOLDEN / family, BEYOND_CASES[family], made)
    return made


@pytest.fixture(scope="module", params=[1, 2])
def served(request: pytest.FixtureRequest, case: Case) -> Served:
    return Served(case.model, case.adapters, tp=request.param)


def test_each_adapter_moves_every_token(case: Case) -> None:
    for row in ROWS:
        for name in {None, *case.adapters} - {row.adapter}:
            moved = np.abs(case.expected(row) - case.logits[name][row.sequence]).max(axis=1)
            assert moved.min() > 10 * LOGITS_ATOL, (row, name)


def test_a_mixed_batch_has_pefts_logits_and_the_bare_bases_bits(case: Case, served: Served) -> None:
    mixed, bare = served.run(ROWS), served.run_without_adapters(ROWS)
    for row, got, base in zip(ROWS, mixed, bare, strict=True):
        assert_logits(got, case, row)
        if row.adapter is None:
            np.testing.assert_array_equal(got.view(np.uint32), base.view(np.uint32))


def test_each_adapter_alone_has_pefts_logits(case: Case, served: Served) -> None:
    for name in BEYOND:
        (got,) = served.run([Row(name, 2)])
        assert_logits(got, case, Row(name, 2))


def test_ordinary_rows_keep_the_bits_of_a_server_without_the_others(
    case: Case, served: Served
) -> None:
    alone = Served(case.model, {name: case.adapters[name] for name in ORDINARY}, served.tp)
    rows = [row for row in ROWS if row.adapter in ORDINARY]
    for row, got, wanted in zip(rows, served.run(rows), alone.run(rows), strict=True):
        np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32), str(row))


def test_strength_scales_the_delta_and_its_norm_as_pefts_scale_does(case: Case) -> None:
    family = case.model.parent.name[:-1]  # pytest's folder, numbered
    names = ("dora", "lora_bias", "vocabulary_dora")
    served = Served(case.model, {name: case.adapters[name] for name in names}, 2, strength=0.4)
    for name in names:
        scaled = loaded_by_peft(family, case.adapters[name])
        for module in scaled.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                module.scaling["default"] *= 0.4  # scale_layer passes embeddings over
        row = Row(name, 0)
        (got,) = served.run([row])
        np.testing.assert_allclose(got, oracle_logits(scaled)[0], 0, LOGITS_ATOL, err_msg=name)
