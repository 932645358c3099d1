"""Sampling on the device: filters, seeds, min_tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving.core import SamplingParams
from serving.sampler import (
    LaneState,
    TokenHistory,
    _filtered,
    admit,
    admit_history,
    empty_lanes,
    lane_row,
    padded,
    sample,
    sample_greedy,
)


VOCAB, PROMPT = 97, 3

CASES = [
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20),
    SamplingParams(temperature=1.3, top_p=0.5),
    SamplingParams(temperature=0.0),
    SamplingParams(top_k=1),
    SamplingParams(top_k=10_000),
    SamplingParams(min_p=0.3),
    SamplingParams(),
    SamplingParams(top_p=1e-9),
    SamplingParams(temperature=2.0, top_k=5, min_p=0.05, top_p=0.8),
]


def make_lanes(cases, seeds=None, eos_ids=()) -> LaneState:
    lanes = jax.tree.map(jnp.asarray, empty_lanes(len(cases) + 1))
    for lane, case in enumerate(cases):
        seed = lane if seeds is None else seeds[lane]
        lanes = admit(lanes, np.int32(lane), lane_row(case, seed, PROMPT, eos_ids))
    return lanes


def random_logits(rows, seed=0, scale=3.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, VOCAB)) * scale, jnp.float32)


def kept_by_sorting(logits: np.ndarray, case: SamplingParams) -> np.ndarray:
    """Which tokens transformers' processors keep: temperature, top_k, top_p, min_p, by sorting."""
    logits = logits.astype(np.float64) / (case.temperature or 1.0)
    keep = np.ones(len(logits), bool)
    if case.top_k:
        keep &= logits >= np.sort(logits)[-min(case.top_k, len(logits))]
    probabilities = np.where(keep, np.exp(logits - logits.max()), 0.0)
    probabilities /= probabilities.sum()
    if case.top_p < 1:
        order = np.argsort(-probabilities)
        count = np.searchsorted(np.cumsum(probabilities[order]), case.top_p) + 1
        keep &= np.isin(np.arange(len(logits)), order[:count])
    return keep & (probabilities >= case.min_p * probabilities.max())


@pytest.mark.parametrize("seed", range(5))
def test_filters_keep_what_sorting_keeps(seed):
    logits = random_logits(len(CASES), seed)
    rows = jax.tree.map(lambda table: table[: len(CASES)], make_lanes(CASES))
    kept = np.isfinite(np.asarray(_filtered(logits, rows)))
    for row, case in enumerate(CASES):
        np.testing.assert_array_equal(kept[row], kept_by_sorting(np.asarray(logits[row]), case))


@pytest.mark.parametrize("temperature", [1e-37, 2e-38, 1.2e-38, 1e-45, 1e-300])
def test_the_smallest_temperatures_choose_the_best_token(temperature):
    logits = random_logits(1, scale=10.0)
    _, tokens = draw(make_lanes([SamplingParams(temperature=temperature)]), [0], [5], logits)
    assert int(tokens[0]) == int(jnp.argmax(logits[0]))


def test_tokens_that_tie_at_a_limit_are_all_kept():
    logits = jnp.asarray([[5.0, 4.0, 4.0, 1.0]])
    rows = jax.tree.map(lambda t: t[:1], make_lanes([SamplingParams(top_k=2)]))
    assert np.isfinite(np.asarray(_filtered(logits, rows))).tolist() == [[True, True, True, False]]


def empty_history(lanes: int) -> TokenHistory:
    return TokenHistory(jnp.zeros((lanes, VOCAB), bool), jnp.zeros((lanes, VOCAB), jnp.int32))


def draw(lanes, lane_ids, positions, logits, greedy=False):
    rows = np.asarray(lane_ids, np.int32), np.asarray(positions, np.int32), logits
    if greedy:
        return sample_greedy(lanes, *rows)
    lanes, _, tokens = sample(lanes, empty_history(len(lanes.last_token)), *rows)
    return lanes, tokens


def test_drawn_tokens_follow_the_distribution():
    case, draws = SamplingParams(temperature=0.8, top_k=6), 4000
    logits = random_logits(1, scale=1.0)
    lanes = make_lanes([case])
    positions = np.arange(draws) + PROMPT
    _, tokens = draw(lanes, np.zeros(draws), positions, jnp.repeat(logits, draws, 0))
    keep = kept_by_sorting(np.asarray(logits[0]), case)
    expected = np.where(keep, np.exp(np.asarray(logits[0], np.float64) / 0.8), 0)
    expected /= expected.sum()
    counts = np.bincount(np.asarray(tokens), minlength=VOCAB) / draws
    assert not counts[~keep].any()
    np.testing.assert_allclose(counts, expected, atol=5 * np.sqrt(0.25 / draws))


def test_a_seeded_rows_token_depends_on_seed_and_position_alone():
    case = SamplingParams(temperature=1.0)
    logits = random_logits(1, scale=0.1)
    alone = [int(draw(make_lanes([case], seeds=[7]), [0], [p], logits)[1][0]) for p in range(5, 15)]
    beside = make_lanes([case, case, case], seeds=[1, 2, 7])
    for position, expected in zip(range(5, 15), alone, strict=True):
        noisy = random_logits(3, position, scale=0.1).at[1].set(logits[0])
        beside, tokens = draw(beside, [0, 2, 1], [40, position, 41], noisy)
        assert int(tokens[1]) == expected
    assert len(set(alone)) > 3
    other = [int(draw(make_lanes([case], seeds=[8]), [0], [p], logits)[1][0]) for p in range(5, 15)]
    assert other != alone


def test_high_bits_of_a_seed_count():
    logits = random_logits(1, scale=0.1)
    tokens = [
        [
            int(draw(make_lanes([SamplingParams()], seeds=[s]), [0], [p], logits)[1][0])
            for p in (5, 6, 7, 8)
        ]
        for s in (7, 7 + 2**40)
    ]
    assert tokens[0] != tokens[1]


def test_a_greedy_row_gets_the_same_token_beside_sampling_rows():
    logits = random_logits(2)
    lanes = make_lanes([SamplingParams(temperature=0.0), SamplingParams()])
    lanes, tokens = draw(lanes, [0, 1], [5, 5], logits)
    assert int(tokens[0]) == int(jnp.argmax(logits[0]))
    _, again = draw(lanes, [0], [5], logits[:1], greedy=True)
    assert int(again[0]) == int(tokens[0])


def test_stop_ids_cannot_be_chosen_before_min_tokens():
    logits = random_logits(1)
    best, second = (int(token) for token in jnp.argsort(-logits[0])[:2])
    case = SamplingParams(temperature=0.0, min_tokens=2, max_tokens=9, stop_token_ids=(second,))
    lanes = make_lanes([case], eos_ids=(best,))
    for position, allowed in ((PROMPT, False), (PROMPT + 1, False), (PROMPT + 2, True)):
        lanes, tokens = draw(lanes, [0], [position], logits, greedy=True)
        assert (int(tokens[0]) == best) is allowed
        assert allowed or int(tokens[0]) != second


def test_the_sampled_token_is_the_lanes_last_token():
    logits = random_logits(2)
    lanes = make_lanes([SamplingParams(temperature=0.0)] * 3)
    lanes, tokens = draw(lanes, [2, 0], [5, 5], logits, greedy=True)
    np.testing.assert_array_equal(np.asarray(lanes.last_token)[[2, 0, 1]], [*np.asarray(tokens), 0])


PENALIZED = [
    SamplingParams(temperature=0.0, repetition_penalty=1.7),
    SamplingParams(temperature=0.0, presence_penalty=1.5),
    SamplingParams(temperature=0.0, frequency_penalty=0.8),
    SamplingParams(
        temperature=0.0,
        repetition_penalty=0.6,
        presence_penalty=-0.5,
        frequency_penalty=-0.2,
        logit_bias=((3, 4.0), (4, -100.0)),
    ),
    SamplingParams(temperature=0.0),
]


def penalized(logits: np.ndarray, case: SamplingParams, prompt: list, answer: list) -> np.ndarray:
    """Token by token, in float64."""
    logits = logits.astype(np.float64)
    for token, bias in case.logit_bias:
        logits[token] += bias
    for token in {*prompt, *answer}:
        repetition = case.repetition_penalty
        logits[token] *= 1 / repetition if logits[token] > 0 else repetition
    for token in set(answer):
        logits[token] -= case.presence_penalty + case.frequency_penalty * answer.count(token)
    return logits


def test_penalties_and_biases_follow_the_tokens_as_they_are_sampled():
    rng = np.random.default_rng(3)
    lanes, count = make_lanes(PENALIZED), len(PENALIZED)
    prompts = [rng.integers(0, VOCAB, 12).tolist() for _ in PENALIZED]
    answers = [rng.integers(0, VOCAB, 5).tolist() for _ in PENALIZED]  # before a preemption
    history = empty_history(count + 1)
    for lane in range(count):
        stale = padded(rng.integers(0, VOCAB, 20).tolist(), 40)
        for prompt, answer in (
            (stale, stale),
            (padded(prompts[lane], 40), padded(answers[lane], 40)),
        ):
            history = admit_history(history, np.int32(lane), prompt, answer)
    order = np.array([2, 0, 1, 4, 3], np.int32)
    for step in range(12):
        logits = random_logits(count, seed=step, scale=1.0)
        positions = np.full(count, 17 + step, np.int32)
        lanes, history, tokens = sample(lanes, history, order, positions, logits)
        for row, lane in enumerate(order):
            scores = penalized(
                np.asarray(logits[row]), PENALIZED[lane], prompts[lane], answers[lane]
            )
            assert int(tokens[row]) == int(np.argmax(scores))
            answers[lane].append(int(tokens[row]))
