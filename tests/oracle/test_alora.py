"""Activated LoRA against peft: tokens and logits of prompts and answers, in float32.

With `--rewrite-golden` the adapters that peft saved, and its answers, are written to
tests/golden/alora, where the ordinary tests find them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.activated import (
    GOLDEN,
    INVOCATION,
    PROMPTS,
    ROWS,
    TOKENS,
    VOCAB_STRIDE,
    Answer,
    recording_engine,
    run,
)
from tests.support.tiny_models import tiny_plan
from tests.tolerances import LOGITS_ATOL


torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.oracle

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OPTIONS: dict[str, dict[str, Any]] = {
    "activated": {
        "r": 3,
        "lora_alpha": 5,
        "rank_pattern": {"o_proj": 5},
        "alora_invocation_tokens": list(INVOCATION),
    },
    "plain": {"r": 4, "lora_alpha": 3, "use_rslora": True},
}


def base_model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def save_adapter(folder: Path, model: Any, options: dict[str, Any]) -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=ALL, **options)
    adapted = peft.get_peft_model(model, config)
    adapted.peft_config["default"].base_model_name_or_path = "tiny"
    generator = torch.Generator().manual_seed(options["r"])
    for path, parameter in adapted.named_parameters():
        if "lora_" in path:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = noise * parameter.shape[1] ** -0.5
    adapted.save_pretrained(folder)


def answer(model: Any, prompt: list[int]) -> Answer:
    """Greedy tokens by `generate`, with logits; those of the prompt are from one forward pass."""
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        before = model(input_ids=tokens).logits[0, :-1]
        generated = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    logits = torch.cat([before, *generated.logits])
    return generated.sequences[0, len(prompt) :].tolist(), logits.numpy()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest):
    """(folder of adapters, what peft answers to each of ROWS)."""
    root = tmp_path_factory.mktemp("alora")
    (root / "model").mkdir()
    tiny_plan(root / "model")
    models: dict[str | None, Any] = {None: base_model(root / "model")}
    for name, options in OPTIONS.items():
        save_adapter(root / name, base_model(root / "model"), options)
        models[name] = peft.PeftModel.from_pretrained(base_model(root / "model"), root / name)
    answers = [answer(models[adapter].eval(), PROMPTS[prompt]) for adapter, prompt in ROWS]
    if request.config.getoption("--rewrite-golden"):
        write_golden(root, answers)
    return root, answers


def write_golden(root: Path, answers: list[Answer]) -> None:
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for name in OPTIONS:
        (GOLDEN / name).mkdir(parents=True)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(root / name / file, GOLDEN / name)
    arrays = {f"tokens_{i}": np.asarray(tokens) for i, (tokens, _) in enumerate(answers)}
    arrays |= {f"logits_{i}": logits[:, ::VOCAB_STRIDE] for i, (_, logits) in enumerate(answers)}
    np.savez_compressed(GOLDEN / "answers.npz", **arrays)


def assert_equal(got: Answer, wanted: Answer, row: Any) -> None:
    assert got[0] == wanted[0], row
    np.testing.assert_allclose(got[1], wanted[1], rtol=0, atol=LOGITS_ATOL, err_msg=str(row))


def test_the_cases_can_tell_activated_from_plain_and_from_the_base(made) -> None:
    answers = dict(zip(ROWS, made[1], strict=True))
    for tokens, logits in answers.values():
        second, best = np.sort(logits[-len(tokens) :], axis=1)[:, -2:].T
        assert (best - second).min() > 5 * LOGITS_ATOL, "no answer hangs on a rounding"
    activated, base = answers["activated", "middle"][1], answers[None, "middle"][1]
    moved = np.abs(activated - base).max(axis=1) > 100 * LOGITS_ATOL
    start = len(PROMPTS["middle"]) - 6 - len(INVOCATION)
    assert not moved[:start].any() and moved[start:].all()


@pytest.mark.parametrize("tp", [1, 2])
def test_tokens_and_logits_are_pefts_in_a_mixed_batch_and_alone(made, tmp_path, tp: int) -> None:
    root, expected = made
    engine = recording_engine(tmp_path, root, tp=tp)
    for row, got, wanted in zip(ROWS, run(engine, ROWS), expected, strict=True):
        assert_equal(got, wanted, row)
    for row, wanted in zip(ROWS, expected, strict=True):
        (got,) = run(engine, (row,))
        assert_equal(got, wanted, row)
