"""`LLM` on a tiny real model with two adapters read from PEFT folders."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from jaxlora.config import ModelConfig
from jaxlora.errors import JaxloraError
from jaxlora.models import build
from serving import LLM, SamplingParams
from serving.chat_template import ChatTemplateError
from serving.core import FinishReason
from serving.engine_protocol import EngineDeadError
from tests.support.peft_folders import random_factors, write_adapter
from tests.support.tiny_models import TINY_QWEN3, write_byte_tokenizer, write_checkpoint


GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
NAMES = (None, "attention", "all")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, dict[str, Path]]:
    """A model folder with a chat template, and two adapters' folders."""
    root = tmp_path_factory.mktemp("llm")
    model = root / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY_QWEN3))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    write_checkpoint(model)
    write_byte_tokenizer(model)
    modules = build(ModelConfig.from_folder(model), 1, np.float32).modules
    names = [module.name for module in modules.modules]
    adapters = {
        "attention": write_adapter(root / "attention", random_factors(modules, seed=1)),
        "all": write_adapter(
            root / "all",
            random_factors(modules, names, rank=5, seed=2),
            r=5,
            lora_alpha=2,
            target_modules="all-linear",
            use_rslora=True,
        ),
    }
    return model, adapters


@pytest.fixture(scope="module")
def shared(folders) -> LLM:
    model, adapters = folders
    return LLM(model, adapters=adapters, max_num_seqs=2, max_model_len=64, prefill_chunk=16)


@pytest.fixture
def llm(shared):
    yield shared
    assert not shared.engine.busy
    shared.engine.check_integrity()
    shared.engine.store.check_integrity()  # no pins
    assert shared.engine.scheduler.pool.free == shared.engine.scheduler.pool.usable


def test_text_and_ids_are_the_same_prompt(llm):
    text, ids = llm.generate(["hello", list(b"hello")], GREEDY)
    assert text == ids
    assert text.finish_reason is FinishReason.LENGTH
    assert len(text.token_ids) == 8
    assert text.text == llm.tokenizer.decode(text.token_ids)


def test_one_adapter_a_prompt_in_one_call_gives_the_answers_of_one_at_a_time(llm):
    together = llm.generate(["hello"] * 3, GREEDY, adapter=NAMES)
    alone = [llm.generate(["hello"], GREEDY, adapter=name)[0] for name in NAMES]
    assert together == alone
    assert len({answer.token_ids for answer in together}) == 3


def test_one_adapter_for_all_prompts(llm):
    prompts = ["a", "bc", "def", "ghij", "klmno", "p"]
    both = llm.generate(prompts, GREEDY, adapter="all")
    assert both == llm.generate(prompts, GREEDY, adapter=["all"] * 6)
    assert [len(answer.token_ids) for answer in both] == [8] * 6


def test_sampling_defaults_and_seeds(llm):
    assert len(llm.generate(["x"])[0].token_ids) <= SamplingParams().max_tokens
    seeded = dataclasses.replace(GREEDY, temperature=1.0, seed=3)
    first, second = llm.generate(["x", "x"], seeded)
    assert first == second


def test_no_prompts_are_no_answers(llm):
    assert llm.generate([]) == []


def test_a_stop_string_ends_the_text(llm):
    whole = llm.generate(["hello"], GREEDY)[0].text
    stop = whole[2:4]
    answer = llm.generate(["hello"], dataclasses.replace(GREEDY, stop=(stop,)))[0]
    assert answer.text == whole[: whole.index(stop)]
    assert answer.finish_reason is FinishReason.STOP


def test_chat_is_generate_over_the_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    chats = llm.chat([messages] * 3, GREEDY, adapter=NAMES)
    assert chats == llm.generate(["<user>hi<assistant>"] * 3, GREEDY, adapter=NAMES)
    with pytest.raises(ChatTemplateError):
        llm.chat([[]], GREEDY)


@pytest.mark.parametrize("adapter", ["nobody", ["all", "nobody"], ["all", ""]])
def test_an_unknown_adapter_runs_nothing(llm, monkeypatch, adapter):
    monkeypatch.setattr(llm.engine, "step", None)
    with pytest.raises(KeyError, match="no adapter is named"):
        llm.generate(["a", "b"], GREEDY, adapter=adapter)


def test_a_prompt_too_long_runs_nothing_and_the_next_call_works(llm, monkeypatch):
    dispatched = []
    dispatch = llm.engine._runner.dispatch
    monkeypatch.setattr(
        llm.engine._runner, "dispatch", lambda batch: dispatched.append(batch) or dispatch(batch)
    )
    for wrong in ("x" * 60, "", []):
        with pytest.raises(ValueError, match="context"):
            llm.generate(["fine", "fine too", wrong], GREEDY, adapter="all")
    assert dispatched == []
    assert len(llm.generate(["fine"], GREEDY)[0].token_ids) == 8


def test_adapters_that_are_not_one_a_prompt_are_an_error(llm):
    with pytest.raises(ValueError, match="zip"):
        llm.generate(["a", "b"], GREEDY, adapter=["all"])


def test_one_text_for_a_list_of_prompts_is_an_error(llm):
    with pytest.raises(TypeError, match="list of prompts"):
        llm.generate("hello", GREEDY)


def test_an_interrupt_ends_all_requests_and_leaves_the_engine_clean(llm, monkeypatch):
    expected = llm.generate(["hello"], GREEDY, adapter="all")
    dispatch, steps = llm.engine._runner.dispatch, []

    def interrupted(batch):
        steps.append(batch)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)  # arrives within the step
        return dispatch(batch)

    monkeypatch.setattr(llm.engine._runner, "dispatch", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["hello"] * 6, GREEDY, adapter="all")
    assert len(steps) == 3
    assert signal.getsignal(signal.SIGINT) is before
    llm.engine.check_integrity()
    assert not llm.engine.busy
    assert llm.generate(["hello"], GREEDY, adapter="all") == expected


def test_another_thread_may_run_it(llm):
    answers = []
    thread = threading.Thread(target=lambda: answers.extend(llm.generate(["hello"], GREEDY)))
    thread.start()
    thread.join()
    assert answers == llm.generate(["hello"], GREEDY)


def test_a_wrong_start_is_the_servers_error(folders, tmp_path):
    model, _ = folders
    with pytest.raises(JaxloraError, match="no such folder"):
        LLM(model, adapters={"gone": tmp_path / "gone"})
    with pytest.raises(JaxloraError, match="--tp 3 does not divide"):
        LLM(model, tp=3)


def test_a_step_that_fails_is_raised_and_nothing_runs_afterwards(shared, monkeypatch):
    """The last test: the engine does not live on."""

    def fails(batch):
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(shared.engine._runner, "dispatch", fails)
        with pytest.raises(RuntimeError, match="device lost"):
            shared.generate(["hello"], GREEDY)
    with pytest.raises(EngineDeadError, match="device lost"):
        shared.generate(["hello"], GREEDY)
