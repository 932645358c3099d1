"""Every id that a model's files name ends an answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxlora.errors import ConfigError
from serving.core import FinishReason, Request, SamplingParams
from serving.kv_cache import BlockTable
from serving.output import OutputStream
from serving.sequence import Sequence
from tests.support.tiny_models import tiny_plan


def plan_of(folder: Path, changes: dict, **files: dict):
    """A plan of a folder that has these files beside config.json."""
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return tiny_plan(folder, changes)


@pytest.mark.parametrize("token", [256, 257])
def test_each_of_several_ids_ends_an_answer(tmp_path, token):
    plan = plan_of(tmp_path, {}, generation_config={"eos_token_id": [256, 257]})
    assert plan.model.eos_token_ids == plan.tokenizer.eos_token_ids == (256, 257)
    request = Request("r", (1, 2), SamplingParams(max_tokens=8))
    stream = OutputStream(Sequence(request, BlockTable(16, None), 0, 0, 0), plan.tokenizer)
    assert stream.add(65)[1] is None
    assert stream.add(258)[1] is None  # config.json's own, which the generation config overrides
    output, reason = stream.add(token)
    assert (reason, output.stop_reason) == (FinishReason.STOP, None)


def test_without_ids_in_a_config_the_named_end_token_is_the_one_everywhere(tmp_path):
    plan = plan_of(tmp_path, {"eos_token_id": None}, tokenizer_config={"eos_token": "a"})
    assert plan.model.eos_token_ids == plan.tokenizer.eos_token_ids == (ord("a"),)


def test_an_id_outside_the_vocabulary_is_refused_by_file(tmp_path):
    with pytest.raises(ConfigError, match="generation_config.json: eos_token_id: wants ids below"):
        plan_of(tmp_path, {}, generation_config={"eos_token_id": [256, 259]})
