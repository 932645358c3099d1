"""The engine on a tiny real model: what a row gets does not depend on its company."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.adapters.pool import PoolShape
from serving.build import build_engine
from serving.core import AdapterReference, FinishReason, Request, SamplingParams
from serving.engine import EngineCore
from serving.llm import Completion
from tests.support.adapters import tiny_adapter
from tests.support.tiny_models import tiny_plan
from tests.tolerances import LOGITS_ATOL


GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def with_adapters(plan, count=2):
    adapters = tuple(
        tiny_adapter(f"adapter-{i}", seed=i, rank=2 + 3 * i, modules=plan.modules, size=0.3)
        for i in range(count)
    )
    shape = PoolShape.for_adapters(
        list(adapters), plan.modules, plan.config.tp, 4, memory=None, slots=None, max_rank=None
    )
    return dataclasses.replace(plan, adapters=adapters, pool=shape)


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> EngineCore:
    return build_engine(with_adapters(tiny_plan(tmp_path_factory.mktemp("model"))))


def request(engine, request_id, prompt, adapter=None, sampling=GREEDY):
    reference = AdapterReference(adapter, engine.store.keys[adapter]) if adapter else None
    return Request(request_id, tuple(prompt), sampling, reference)


def completions(engine, requests):
    """The whole answer to each request, all added at once."""
    outputs = {r.request_id: [] for r in requests}
    for r in requests:
        engine.add(r)
    while engine.busy:
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
    return [Completion.of(outputs[r.request_id]) for r in requests]


def run(engine, requests):
    """Tokens and finish reason of each request, all added at once."""
    return [(list(c.token_ids), c.finish_reason) for c in completions(engine, requests)]


def prompts(count, seed=0, longest=60):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, rng.integers(1, longest)).tolist() for _ in range(count)]


NAMES = [None, "adapter-0", "adapter-1", None, "adapter-1", "adapter-0"]


MIXED = list(zip(prompts(6), NAMES, strict=True))


def scores(answer):
    return [*(one for one in answer.prompt_logprobs if one is not None), *answer.logprobs]


@pytest.fixture
def compilations():
    """Whatever XLA compiles while the test runs."""
    compiled: list[str] = []

    def record(event: str, duration: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(record)
    yield compiled
    jax.monitoring.unregister_event_duration_listener(record)


def test_a_mixed_batch_gives_each_request_its_solo_tokens(engine):
    asked = [
        request(engine, f"r{i}", p, n)
        for i, (p, n) in enumerate(zip(prompts(6), NAMES, strict=False))
    ]
    together = run(engine, asked)
    for index, one in enumerate(asked):
        assert run(engine, [one]) == [together[index]]


def test_adapters_change_the_answer(engine):
    prompt = prompts(1)[0]
    answers = [run(engine, [request(engine, "r", prompt, name)])[0][0] for name in NAMES[:3]]
    assert len({tuple(answer) for answer in answers}) == 3


def test_base_rows_get_the_tokens_of_a_server_without_adapters(engine, tmp_path):
    plain = build_engine(tiny_plan(tmp_path))
    asked = [
        request(engine, f"r{i}", p, n)
        for i, (p, n) in enumerate(zip(prompts(6), NAMES, strict=False))
    ]
    mixed = run(engine, asked)
    bases = [r for r in asked if r.adapter is None]
    expected = run(plain, bases)
    assert [mixed[i] for i, r in enumerate(asked) if r.adapter is None] == expected


def test_seeded_requests_repeat_and_seeds_differ(engine):
    prompt = prompts(1)[0]
    answers = []
    for seed in (1, 1, 2):
        sampling = SamplingParams(max_tokens=12, seed=seed, ignore_eos=True)
        answers.append(run(engine, [request(engine, "r", prompt, "adapter-0", sampling)])[0][0])
    assert answers[0] == answers[1] != answers[2]


def test_min_tokens_holds_back_the_end(engine):
    prompt = prompts(1)[0]
    answer = run(engine, [request(engine, "r", prompt)])[0][0]
    early = dataclasses.replace(GREEDY, stop_token_ids=(answer[1],))
    tokens, reason = run(engine, [request(engine, "r", prompt, sampling=early)])[0]
    assert tokens == answer[:2] and reason is FinishReason.STOP
    late = dataclasses.replace(early, min_tokens=5)
    tokens, _ = run(engine, [request(engine, "r", prompt, sampling=late)])[0]
    assert answer[1] not in tokens[1:5] and len(tokens) >= 5


def test_preemption_on_a_device_changes_no_token(engine, tmp_path):
    plan = with_adapters(tiny_plan(tmp_path, max_model_len=64, kv_memory=7 * 16 * 2 * 2 * 32 * 4))
    small = build_engine(plan)
    assert small.scheduler.pool.usable == 6
    asked = [
        request(engine, f"r{i}", p, n, dataclasses.replace(GREEDY, max_tokens=30))
        for i, (p, n) in enumerate(zip(prompts(4, seed=3, longest=20), NAMES, strict=False))
    ]
    expected = [run(engine, [one])[0] for one in asked]
    assert run(small, asked) == expected
    assert small.scheduler.preemptions > 0


def test_one_program_for_all_layers_gives_the_logits_of_one_a_layer(engine, tmp_path):
    plan = with_adapters(tiny_plan(tmp_path))
    whole = dataclasses.replace(plan.shapes, layers_per_program=None, context_chunk=None)
    other = build_engine(dataclasses.replace(plan, shapes=whole))
    asked = [
        request(engine, f"r{i}", p, n)
        for i, (p, n) in enumerate(zip(prompts(3), NAMES, strict=False))
    ]
    assert run(other, asked) == run(engine, asked)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_two_ranks_give_the_tokens_of_one(engine, tmp_path):
    plan = with_adapters(tiny_plan(tmp_path, tp=2))
    assert plan.dtype == jnp.float32
    asked = [
        request(engine, f"r{i}", p, n)
        for i, (p, n) in enumerate(zip(prompts(4), NAMES, strict=False))
    ]
    assert run(build_engine(plan), asked) == run(engine, asked)


SCORED = dataclasses.replace(GREEDY, logprobs=5, prompt_logprobs=3)


def test_the_chosen_token_of_a_greedy_answer_is_the_likeliest_with_the_same_logprob(engine):
    asked = [request(engine, f"r{i}", p, n, SCORED) for i, (p, n) in enumerate(MIXED)]
    for (prompt, _), answer in zip(MIXED, completions(engine, asked), strict=True):
        assert answer.logprobs is not None and answer.prompt_logprobs is not None
        assert [one.token_id for one in answer.logprobs] == list(answer.token_ids)
        for one in answer.logprobs:
            assert one.top[0] == (one.token_id, one.logprob)
            assert [p for _, p in one.top] == sorted((p for _, p in one.top), reverse=True)
            assert len(one.top) == 5 and one.logprob < 0
        assert answer.prompt_logprobs[0] is None
        scored = [one for one in answer.prompt_logprobs if one is not None]
        assert [one.token_id for one in scored] == list(prompt[1:])
        for one in scored:
            assert len(one.top) == 3
            assert dict(one.top).get(one.token_id, one.logprob) == one.logprob <= one.top[0][1]


def test_logprobs_of_a_mixed_batch_are_those_of_each_request_alone(engine):
    asked = [request(engine, f"r{i}", p, n, SCORED) for i, (p, n) in enumerate(MIXED)]
    together = completions(engine, asked)
    for one, expected in zip(asked, together, strict=True):
        (alone,) = completions(engine, [one])
        assert alone.token_ids == expected.token_ids
        for got, want in zip(scores(alone), scores(expected), strict=True):
            assert got.logprob == pytest.approx(want.logprob, abs=LOGITS_ATOL)


def test_a_prompt_scores_as_the_answer_that_it_repeats(engine):
    prompt = prompts(1)[0]
    (answer,) = completions(engine, [request(engine, "r", prompt, "adapter-1", SCORED)])
    again = dataclasses.replace(SCORED, max_tokens=0, logprobs=None)
    longer = request(engine, "r", (*prompt, *answer.token_ids), "adapter-1", again)
    (scored,) = completions(engine, [longer])
    assert scored.token_ids == () and scored.logprobs is None
    assert scored.prompt_logprobs is not None and answer.logprobs is not None
    for got, want in zip(scored.prompt_logprobs[len(prompt) :], answer.logprobs, strict=True):
        assert got is not None and got.token_id == want.token_id
        assert got.logprob == pytest.approx(want.logprob, abs=LOGITS_ATOL)


def test_nothing_is_compiled_after_the_start(tmp_path, compilations):
    engine = build_engine(with_adapters(tiny_plan(tmp_path, max_num_seqs=3)))
    sampled = SamplingParams(max_tokens=5, logit_bias=((1, 2.0),), presence_penalty=1.0)
    compilations.clear()
    for kind in (GREEDY, sampled, SCORED):
        run(
            engine,
            [
                request(engine, f"r{i}", p, n, kind)
                for i, (p, n) in enumerate(zip(prompts(5, 9), NAMES, strict=False))
            ],
        )
    assert compilations == []
