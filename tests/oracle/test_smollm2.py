"""SmolLM2 and the demo adapters against transformers and peft: tokens, texts and chats.

`make oracle` makes the model's folder first; without it these tests are skipped.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.smollm2 import DEFAULT_OUTPUT
from serving import LLM, SamplingParams
from serving.core import MAX_LOGPROBS
from tests.tolerances import LOGITS_ATOL


torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from tests.data.smollm2.make_cases import DIALOGUES, TEXTS  # noqa: E402  (imports transformers)


ROOT = Path(__file__).parents[2]
MODEL = ROOT / DEFAULT_OUTPUT

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(not MODEL.exists(), reason=f"no {DEFAULT_OUTPUT}: `make oracle` makes it"),
]

ADAPTERS = {name: ROOT / "examples" / "adapters" / name for name in ("pirate", "bullets")}
PROMPTS = ("Why is the sky blue?", "What is the capital of Egypt?", "How do I stay healthy?")
CHATS = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
TOKENS = 48

# Characters of several scripts, digits, code, emoji and white space.
ALPHABET = (
    "abcdefgh XYZ 0123456789 \n\t {}()[]<>=+-*/_#'\".,:;!? éüßñ αβγ жщя 漢字かな 한국 عرب हिन्दी"
    " ไทย 🙂👩\u200d👧🇫🇷"
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        MODEL,
        adapters=ADAPTERS,
        dtype="float32",
        max_num_seqs=len(PROMPTS) * (1 + len(ADAPTERS)),
        max_model_len=128,
        prefill_chunk=64,
    )


@pytest.fixture(scope="module")
def oracle_tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(MODEL)


def greedy_choices(
    model: Any, prompt: list[int], answer: Sequence[int]
) -> tuple[tuple[int, ...], float]:
    """The model's choice after the prompt and each beginning of the answer; the closest call.

    Where the choices are the answer, the answer is what the model generates greedily: its first
    token is the model's own, so the second follows what the model said, and so on.
    """
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
    best, second = logits.topk(2).values.T
    return tuple(logits.argmax(dim=1).tolist()), float((best - second).min())


def oracle_model(adapter: str | None) -> Any:
    base = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return (peft.PeftModel.from_pretrained(base, ADAPTERS[adapter]) if adapter else base).eval()


@pytest.mark.timeout(600)  # the engine compiles all its programs first
def test_base_and_adapters_in_one_batch_give_pefts_greedy_tokens(
    llm: LLM, oracle_tokenizer: Any
) -> None:
    models = (None, *ADAPTERS)
    rows = [(name, i) for i in range(len(CHATS)) for name in models]
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    answers = llm.chat([CHATS[i] for _, i in rows], sampling, adapter=[name for name, _ in rows])
    tokens = {row: answer.token_ids for row, answer in zip(rows, answers, strict=True)}
    assert len(set(tokens.values())) == len(rows), "two models answer alike"
    for name in models:
        model = oracle_model(name)
        for i, chat in enumerate(CHATS):
            prompt = oracle_tokenizer.apply_chat_template(chat, add_generation_prompt=True)
            expected, margin = greedy_choices(model, prompt["input_ids"], tokens[name, i])
            assert len(expected) == TOKENS
            assert tokens[name, i] == expected, f"{name}: {PROMPTS[i]} (closest call {margin:.2g})"


def test_texts_have_transformers_tokens(llm: LLM, oracle_tokenizer: Any) -> None:
    letters = random.Random(0)
    mixtures = ["".join(letters.choices(ALPHABET, k=letters.randint(1, 60))) for _ in range(500)]
    prompts = (ROOT / "examples" / "data" / "prompts.txt").read_text(encoding="utf-8").splitlines()
    for text in [*TEXTS, *mixtures, *prompts]:
        expected = oracle_tokenizer(text)["input_ids"]
        assert llm.tokenizer.encode(text) == expected, text
        for skip in (False, True):
            assert llm.tokenizer.decode(expected, skip) == oracle_tokenizer.decode(
                expected, skip_special_tokens=skip
            )


@pytest.mark.parametrize("generate", [True, False])
def test_chats_are_rendered_as_by_transformers(
    llm: LLM, oracle_tokenizer: Any, generate: bool
) -> None:
    for messages in [*DIALOGUES, *CHATS]:
        text = oracle_tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate
        )
        assert llm.tokenizer.apply_chat_template(messages, generate) == text
        tokens = oracle_tokenizer.apply_chat_template(messages, add_generation_prompt=generate)
        assert llm.tokenizer.encode(text, add_special_tokens=False) == tokens["input_ids"]


@pytest.mark.timeout(600)
def test_logprobs_of_prompts_and_answers_are_those_of_transformers_and_peft(llm: LLM) -> None:
    """Also where temperature and penalties choose the tokens: they don't change what is told."""
    models = (None, *ADAPTERS)
    sampling = SamplingParams(
        max_tokens=12,
        temperature=1.3,
        repetition_penalty=1.2,
        seed=0,
        ignore_eos=True,
        logprobs=MAX_LOGPROBS,
        prompt_logprobs=MAX_LOGPROBS,
    )
    prompts = [llm.tokenizer.encode(text) for text in PROMPTS]
    asked = [(name, prompt) for name in models for prompt in prompts]
    answers = llm.generate([p for _, p in asked], sampling, adapter=[name for name, _ in asked])
    oracles = {name: oracle_model(name) for name in models}
    for (name, prompt), answer in zip(asked, answers, strict=True):
        tokens = [*prompt, *answer.token_ids]
        with torch.no_grad():
            logits = oracles[name](torch.tensor([tokens])).logits[0]
        expected = torch.log_softmax(logits.double(), dim=-1).numpy()
        assert answer.prompt_logprobs is not None and answer.logprobs is not None
        told = [*answer.prompt_logprobs[1:], *answer.logprobs]
        for position, (one, token) in enumerate(zip(told, tokens[1:], strict=True)):
            assert one is not None and one.token_id == token and len(one.top) == MAX_LOGPROBS
            wanted = expected[position]
            assert one.logprob == pytest.approx(wanted[token], abs=LOGITS_ATOL)
            best = np.sort(wanted)[::-1][:MAX_LOGPROBS]
            np.testing.assert_allclose([p for _, p in one.top], best, rtol=0, atol=LOGITS_ATOL)
            for other, logprob in one.top:
                assert logprob == pytest.approx(wanted[other], abs=LOGITS_ATOL)
