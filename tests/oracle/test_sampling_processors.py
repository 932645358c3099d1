"""What sampling does to logits, against transformers' own logits processors.

presence_penalty and frequency_penalty, which transformers has not, are checked against their
definition in OpenAI's and vLLM's documentation.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving.core import SamplingParams
from serving.sampler import (
    LaneState,
    TokenHistory,
    _biased,
    _filtered,
    _penalized,
    _without_early_stops,
    admit,
    admit_history,
    empty_lanes,
    lane_row,
    padded,
    sample,
)
from tests.tolerances import PROCESSED_LOGITS_RTOL


torch = pytest.importorskip("torch")
processors = pytest.importorskip("transformers.generation.logits_process")

pytestmark = pytest.mark.oracle

VOCABS = (1, 2, 7, 97, 1000)
LONGEST = 24
EOS = (0, 5)


def lanes_of(cases: list[SamplingParams], prompt: int, vocab: int) -> LaneState:
    eos = tuple(token for token in EOS if token < vocab)
    lanes = jax.tree.map(jnp.asarray, empty_lanes(len(cases) + 1))
    for lane, case in enumerate(cases):
        lanes = admit(lanes, np.int32(lane), lane_row(case, lane, prompt, eos))
    return lanes


def rows_of(cases: list[SamplingParams], prompt: int, vocab: int) -> LaneState:
    return jax.tree.map(lambda table: table[: len(cases)], lanes_of(cases, prompt, vocab))


def random_logits(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    return (rng.normal(size=(rows, vocab)) * rng.choice([0.3, 3.0, 12.0])).astype(np.float32)


def seen(tokens: list[np.ndarray], vocab: int) -> np.ndarray:
    """[rows, vocab]: how often each row has each token."""
    return np.stack([np.bincount(row, minlength=vocab) for row in tokens]).astype(np.int32)


def theirs(logits: np.ndarray, tokens: np.ndarray, *steps: Any) -> np.ndarray:
    """One row through transformers' processors, in order."""
    scores = torch.tensor(logits)[None]
    for step in steps:
        scores = step(torch.tensor(tokens.astype(np.int64))[None], scores)
    return scores[0].numpy()


def assert_equal_logits(got: Any, wanted: np.ndarray) -> None:
    """The same tokens are cut off, and the others agree."""
    got = np.asarray(got)
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(wanted))
    np.testing.assert_allclose(got, wanted, rtol=PROCESSED_LOGITS_RTOL, atol=1e-6)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("penalty", [0.01, 0.5, 0.99, 1.0, 1.3, 100.0])
def test_repetition_penalty(vocab: int, penalty: float) -> None:
    rng = np.random.default_rng(vocab)
    logits = random_logits(rng, 5, vocab)
    prompt = [rng.integers(0, vocab, 9) for _ in range(5)]
    answer = [rng.integers(0, vocab, length) for length in (0, 1, 2, 7, 20)]
    case = SamplingParams(repetition_penalty=penalty)
    rows = rows_of([case] * 5, 9, vocab)
    got = _penalized(jnp.asarray(logits), rows, seen(prompt, vocab) > 0, seen(answer, vocab))
    step = processors.RepetitionPenaltyLogitsProcessor(penalty)
    for row in range(5):
        tokens = np.concatenate([prompt[row], answer[row]])
        assert_equal_logits(got[row], theirs(logits[row], tokens, step))


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize(("presence", "frequency"), [(0.7, 0.0), (0.0, 1.1), (-2.0, 2.0)])
def test_presence_and_frequency_penalty(vocab: int, presence: float, frequency: float) -> None:
    """mu[j] - c[j] * frequency - float(c[j] > 0) * presence; c counts the answer's tokens alone."""
    rng = np.random.default_rng(vocab)
    logits = random_logits(rng, 4, vocab)
    answer = [rng.integers(0, vocab, length) for length in (0, 1, 7, 20)]
    case = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    everything = jnp.ones((4, vocab), bool)  # the prompt holds every token, which must not count
    got = _penalized(
        jnp.asarray(logits), rows_of([case] * 4, 3, vocab), everything, seen(answer, vocab)
    )
    for row in range(4):
        wanted = logits[row].astype(np.float64)
        for token in range(vocab):
            count = int((answer[row] == token).sum())
            wanted[token] -= count * frequency + float(count > 0) * presence
        assert_equal_logits(got[row], wanted)


@pytest.mark.parametrize("vocab", VOCABS)
def test_logit_bias(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = random_logits(rng, 3, vocab)
    biases = []
    for count in (0, 1, min(vocab, 300)):
        ids = rng.choice(vocab, count, replace=False)
        biases.append(tuple((int(token), float(rng.uniform(-100, 100))) for token in ids))
    cases = [SamplingParams(logit_bias=bias) for bias in biases]
    got = _biased(jnp.asarray(logits), rows_of(cases, 3, vocab))
    for row, bias in enumerate(biases):
        wanted = logits[row]
        if bias:
            step = processors.SequenceBiasLogitsProcessor({(t,): value for t, value in bias})
            wanted = theirs(wanted, np.zeros(3), step)
        assert_equal_logits(got[row], wanted)


@pytest.mark.parametrize("vocab", [7, 97])
@pytest.mark.parametrize("generated", range(5))
def test_min_tokens(vocab: int, generated: int) -> None:
    """Stop ids of the request are held back as the model's own end ids are."""
    rng = np.random.default_rng(generated)
    prompt, stop = 6, (3,)
    cases = [SamplingParams(min_tokens=n, stop_token_ids=stop) for n in range(5)]
    logits = random_logits(rng, len(cases), vocab)
    positions = jnp.full(len(cases), prompt + generated, jnp.int32)
    got = _without_early_stops(jnp.asarray(logits), rows_of(cases, prompt, vocab), positions)
    for row, case in enumerate(cases):
        step = processors.MinNewTokensLengthLogitsProcessor(
            prompt, case.min_tokens, [*EOS, *stop], device="cpu"
        )
        wanted = theirs(logits[row], np.zeros(prompt + generated), step)
        assert_equal_logits(got[row], wanted)


def warpers(case: SamplingParams) -> list[Any]:
    """transformers' warpers, in the order in which its `generate` has them."""
    steps: list[Any] = [processors.TemperatureLogitsWarper(case.temperature)]
    if case.top_k:
        steps.append(processors.TopKLogitsWarper(case.top_k))
    if case.top_p < 1:
        steps.append(processors.TopPLogitsWarper(case.top_p))
    if case.min_p:
        steps.append(processors.MinPLogitsWarper(case.min_p))
    return steps


def random_filters(rng: np.random.Generator, vocab: int) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.choice([0.1, 0.7, 1.0, 1.9, 5.0])),
        top_k=int(rng.choice([0, 1, 2, 5, vocab, vocab + 9])),
        top_p=float(rng.choice([1.0, 0.999, 0.9, 0.5, 0.01])),
        min_p=float(rng.choice([0.0, 0.001, 0.05, 0.4, 1.0])),
    )


@pytest.mark.parametrize("vocab", VOCABS)
def test_temperature_top_k_top_p_and_min_p(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    cases = [random_filters(rng, vocab) for _ in range(150)]
    logits = random_logits(rng, len(cases), vocab)
    got = np.asarray(_filtered(jnp.asarray(logits), rows_of(cases, 3, vocab)))
    for row, case in enumerate(cases):
        wanted = theirs(logits[row], np.zeros(3), *warpers(case))
        assert_equal_logits(got[row], wanted - wanted.max())  # ours are relative to the best


def test_an_answer_is_chosen_from_the_same_logits_throughout() -> None:
    """Greedy answers with everything at once: bias, min_tokens and the three penalties."""
    vocab, prompt_length, steps = 31, 5, 16
    rng = np.random.default_rng(3)
    cases = [
        SamplingParams(
            max_tokens=steps,
            temperature=0.0,
            min_tokens=int(rng.integers(0, 6)),
            repetition_penalty=float(rng.choice([0.8, 1.0, 1.7])),
            presence_penalty=float(rng.choice([0.0, 0.9])),
            frequency_penalty=float(rng.choice([0.0, 0.6])),
            logit_bias=((0, 4.0), (7, -3.0), (9, 2.5)),
        )
        for _ in range(12)
    ]
    prompts = rng.integers(0, vocab, (len(cases), prompt_length))
    lanes = lanes_of(cases, prompt_length, vocab)
    history = TokenHistory(
        jnp.zeros((len(cases) + 1, vocab), bool), jnp.zeros((len(cases) + 1, vocab), jnp.int32)
    )
    for lane, prompt in enumerate(prompts):
        empty = padded([], LONGEST)
        history = admit_history(history, np.int32(lane), padded(prompt, LONGEST), empty)
    answers = np.zeros((len(cases), 0), np.int64)
    for step in range(steps):
        logits = random_logits(rng, len(cases), vocab)
        at = jnp.full(len(cases), prompt_length + step, jnp.int32)
        lanes, history, tokens = sample(
            lanes, history, jnp.arange(len(cases)), at, jnp.asarray(logits)
        )
        for row, case in enumerate(cases):
            so_far = np.concatenate([prompts[row], answers[row]])
            scores = theirs(
                logits[row],
                so_far,
                processors.SequenceBiasLogitsProcessor({(t,): v for t, v in case.logit_bias}),
                processors.MinNewTokensLengthLogitsProcessor(
                    prompt_length, case.min_tokens, list(EOS), device="cpu"
                ),
                processors.RepetitionPenaltyLogitsProcessor(case.repetition_penalty),
            )
            counts = np.bincount(answers[row], minlength=vocab)
            scores = scores - counts * case.frequency_penalty - (counts > 0) * case.presence_penalty
            assert int(tokens[row]) == int(scores.argmax())
        answers = np.concatenate([answers, np.asarray(tokens)[:, None]], axis=1)
