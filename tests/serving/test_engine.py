"""The engine over a fake device: batching, preemption, stops, aborts, and that nothing leaks."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jaxlora.adapters.adapter import last_start
from jaxlora.adapters.store import AdapterStore
from serving.core import (
    AdapterReference,
    FinishReason,
    Request,
    RequestOutput,
    RequestStats,
    SamplingParams,
)
from serving.engine import EngineCore
from serving.errors import InvocationTokensError
from serving.kv_cache import BlockPool
from serving.scheduler import Scheduler
from tests.support.adapters import CountingLoader, tiny_adapter
from tests.support.fake_device import FakeDevice, FakeTokenizer, fake_logprobs, solo_answer


BLOCK, VOCAB = 4, 50
INVOCATION = (1, 2)  # of the activated adapter "later"


class Recorder:
    def __init__(self) -> None:
        self.requests: list[RequestStats] = []
        self.preemptions = 0

    def record_step(self, stats) -> None:
        self.preemptions += stats.preemptions

    def record_request(self, stats) -> None:
        self.requests.append(stats)


class Harness:
    """An engine with adapters, one of them activated, and what each request has been sent."""

    def __init__(self, *, blocks=40, lanes=4, budget=8, max_model_len=64, eos=()):
        self.device = FakeDevice(block_size=BLOCK, vocab=VOCAB)
        self.store = AdapterStore(CountingLoader())
        self.slots = {None: 0}
        for index, name in enumerate(("a", "b", "later")):
            tokens = INVOCATION if name == "later" else ()
            self.store.add(tiny_adapter(name, seed=index, invocation_tokens=tokens))
            key = self.store.keys[name]
            self.slots[name] = self.store.pin(key)
            self.store.unpin(key)
        self.recorder = Recorder()
        self.engine = EngineCore(
            self.device,
            Scheduler(BlockPool(blocks, BLOCK), lanes=lanes, prefill_budget=budget),
            self.store,
            FakeTokenizer(eos),
            max_model_len=max_model_len,
            recorder=self.recorder,
        )
        self.tokens: dict[str, list[int]] = {}
        self.text: dict[str, str] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.reasons: dict[str, FinishReason] = {}

    def add(self, request_id, prompt, adapter=None, **sampling):
        reference = AdapterReference(adapter, self.store.keys[adapter]) if adapter else None
        self.engine.add(Request(request_id, tuple(prompt), SamplingParams(**sampling), reference))
        self.tokens[request_id], self.text[request_id] = [], ""
        self.outputs[request_id] = []

    def solo(self, prompt, adapter, length):
        """What a request alone would get."""
        slot, start = self.slots[adapter], 0
        if adapter == "later":
            starts = [i for i in range(len(prompt)) if (*prompt[i : i + 2],) == INVOCATION]
            slot, start = (slot, starts[-1]) if starts else (0, 0)
        return solo_answer(prompt, slot, VOCAB, length, start=start)

    def step(self):
        for output in self.engine.step():
            assert output.request_id not in self.reasons, "news after the end"
            self.tokens[output.request_id] += output.token_ids
            self.text[output.request_id] += output.text
            self.outputs[output.request_id].append(output)
            assert output.completion_tokens == len(self.tokens[output.request_id])
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason
        self.engine.check_integrity()

    def run(self):
        for _ in range(2000):
            if not self.engine.busy:
                break
            self.step()
        assert not self.engine.busy
        assert self.engine.scheduler.pool.free == self.engine.scheduler.pool.usable


def test_a_mixed_batch_gives_each_request_its_solo_answer():
    harness = Harness()
    prompts = {"base": ([1, 2, 3], None), "one": ([1, 2, 3], "a"), "two": ([1, 2, 3], "b")}
    for request_id, (prompt, adapter) in prompts.items():
        harness.add(request_id, prompt, adapter, max_tokens=9)
    harness.run()
    for request_id, (prompt, adapter) in prompts.items():
        expected = solo_answer(prompt, harness.slots[adapter], VOCAB, 9)
        assert harness.tokens[request_id] == expected
        assert harness.reasons[request_id] is FinishReason.LENGTH
    assert any(len(batch.decodes) == 3 for batch in harness.device.batches)
    assert harness.tokens["base"] != harness.tokens["one"] != harness.tokens["two"]


def test_long_prompts_are_prefilled_in_chunks_while_others_decode():
    harness = Harness(budget=8)
    harness.add("short", [1], max_tokens=20)
    harness.add("long", list(range(40)), "a", max_tokens=2)
    harness.run()
    chunks = [c for batch in harness.device.batches for c in batch.prefills if c.start or c.last]
    assert max(chunk.length for chunk in chunks) <= 8
    assert any(batch.prefills and batch.decodes for batch in harness.device.batches)
    assert harness.tokens["long"] == solo_answer(list(range(40)), harness.slots["a"], VOCAB, 2)


def test_preemption_loses_repeats_and_changes_no_token():
    harness = Harness(blocks=12, lanes=4, max_model_len=40)
    for index in range(6):
        harness.add(f"r{index}", [index, 1, 2], "ab"[index % 2], max_tokens=24)
    harness.run()
    assert harness.recorder.preemptions > 0
    for index in range(6):
        slot = harness.slots["ab"[index % 2]]
        assert harness.tokens[f"r{index}"] == solo_answer([index, 1, 2], slot, VOCAB, 24)


def test_every_token_comes_with_its_own_logprobs_and_only_where_asked_for():
    harness = Harness()
    harness.add("asked", [1, 2], max_tokens=5, logprobs=3)
    harness.add("silent", [1, 2], max_tokens=5)
    harness.run()
    for output in harness.outputs["asked"]:
        assert output.logprobs == tuple(fake_logprobs(token, 3) for token in output.token_ids)
    assert {output.logprobs for output in harness.outputs["silent"]} == {None}


@pytest.mark.parametrize("length", [1, 2, 8, 9, 30])
def test_prompt_logprobs_come_once_and_whole_with_the_first_output(length):
    harness = Harness(budget=8)
    prompt = list(range(length))
    harness.add("r", prompt, "a", max_tokens=3, prompt_logprobs=0)
    harness.run()
    first, *rest = harness.outputs["r"]
    assert first.prompt_logprobs == (None, *(fake_logprobs(prompt[i], i - 1) for i in prompt[1:]))
    assert {output.prompt_logprobs for output in rest} == {None}


def test_a_preempted_prompt_is_scored_once():
    harness = Harness(blocks=12, lanes=4, budget=4, max_model_len=40)
    for index in range(6):
        harness.add(f"r{index}", [index, 1, 2, 3, 4, 5], max_tokens=24, prompt_logprobs=1)
    harness.run()
    assert harness.recorder.preemptions > 0
    for index in range(6):
        given = [o.prompt_logprobs for o in harness.outputs[f"r{index}"] if o.prompt_logprobs]
        assert given == [(None, *(fake_logprobs(i, i - 1) for i in range(1, 6)))]


def test_a_request_for_no_tokens_scores_its_prompt_and_ends():
    harness = Harness(budget=2)
    harness.add("r", [3, 1, 2], "a", max_tokens=0, prompt_logprobs=0, logprobs=0)
    harness.run()
    (only,) = harness.outputs["r"]
    assert (only.token_ids, only.text, only.completion_tokens) == ((), "", 0)
    assert only.finish_reason is FinishReason.LENGTH
    assert only.logprobs == () and only.prompt_logprobs is not None
    assert [p.token_id for p in only.prompt_logprobs[1:] if p] == [1, 2]


def test_a_stop_seen_one_step_late_streams_and_counts_no_extra_token():
    answer = solo_answer([5, 6], 0, VOCAB, 8)
    stop = next(t for i, t in enumerate(answer) if i >= 3 and t not in answer[:i])
    harness = Harness()
    harness.add("r", [5, 6], max_tokens=30, stop_token_ids=(stop,))
    harness.run()
    expected = answer[: answer.index(stop) + 1]
    assert harness.tokens["r"] == expected
    assert harness.reasons["r"] is FinishReason.STOP
    assert harness.text["r"] == FakeTokenizer().decode(expected[:-1])
    assert harness.recorder.requests[0].completion_tokens == len(expected)
    dispatched = sum(len(batch.sampling) for batch in harness.device.batches)
    assert dispatched == len(expected) + 1, "one token was already in flight"


def test_eos_ends_unless_ignored_and_prints_nothing():
    answer = solo_answer([5, 6], 0, VOCAB, 8)
    eos = next(t for i, t in enumerate(answer) if i >= 2 and t not in answer[:i])
    harness = Harness(eos=(eos,))
    harness.add("r", [5, 6], max_tokens=8)
    harness.add("on", [5, 6], max_tokens=8, ignore_eos=True)
    harness.run()
    end = answer.index(eos)
    assert harness.tokens["r"] == answer[: end + 1]
    assert harness.text["r"] == FakeTokenizer().decode(answer[:end])
    assert harness.tokens["on"] == answer
    assert harness.reasons == {"r": FinishReason.STOP, "on": FinishReason.LENGTH}


def test_a_stop_string_over_several_tokens_is_cut_out():
    text = FakeTokenizer().decode(solo_answer([7], 0, VOCAB, 10))
    stop = text[4:7]
    harness = Harness()
    harness.add("r", [7], max_tokens=10, stop=(stop,))
    harness.run()
    assert harness.text["r"] == text[: text.index(stop)]
    assert harness.reasons["r"] is FinishReason.STOP


def test_a_stop_string_waits_for_min_tokens():
    text = FakeTokenizer().decode(solo_answer([7], 0, VOCAB, 10))
    harness = Harness()
    harness.add("r", [7], max_tokens=10, min_tokens=4, stop=(text[1],))
    harness.run()
    assert len(harness.tokens["r"]) > 4


def test_requests_that_can_never_run_are_refused_and_hold_nothing():
    harness = Harness(max_model_len=16)
    for prompt, max_tokens in (([], 1), ([1] * 16, 1), ([1] * 10, 7)):
        with pytest.raises(ValueError, match="context"):
            harness.engine.add(Request("r", tuple(prompt), SamplingParams(max_tokens=max_tokens)))
    with pytest.raises(KeyError):
        reference = AdapterReference("gone", "00")
        harness.engine.add(Request("r", (1,), SamplingParams(max_tokens=2), reference))
    harness.engine.check_integrity()
    assert not harness.engine.busy


def test_two_requests_may_not_share_an_id():
    harness = Harness()
    harness.add("r", [1])
    with pytest.raises(ValueError, match="in use"):
        harness.add("r", [2])


def test_an_activated_adapter_begins_where_its_tokens_stand_last():
    prompts = {
        "first": [1, 2, 3],
        "middle": [9, 1, 2, 9, 9, 1, 2, 8, 8],
        "end": [4, 5, 6, 7, 8, 1, 2],
        "twice_one": [1, 1, 2, 1],
    }
    harness = Harness(budget=5)
    for request_id, prompt in prompts.items():
        harness.add(request_id, prompt, "later", max_tokens=6)
    harness.run()
    starts = {"first": 0, "middle": 5, "end": 5, "twice_one": 1}
    for request_id, prompt in prompts.items():
        expected = solo_answer(prompt, harness.slots["later"], VOCAB, 6, start=starts[request_id])
        assert harness.tokens[request_id] == expected


def test_a_prompt_without_an_activated_adapters_tokens_is_refused_and_the_base_never_answers():
    harness = Harness()
    for prompt in ([3, 1, 3, 2], [1], [2, 1]):
        with pytest.raises(InvocationTokensError, match=r"adapter 'later' begins at .* \[1, 2\]"):
            harness.add("r", prompt, "later", max_tokens=40)
        assert not harness.engine.busy
        harness.engine.check_integrity()


def test_preemption_begins_an_activated_adapter_where_it_began_before():
    harness = Harness(blocks=12, lanes=4, max_model_len=40)
    for index in range(6):
        harness.add(
            f"r{index}", [index, 9, 1, 2, 5], ["later", "a", None][index % 3], max_tokens=20
        )
    harness.run()
    assert harness.recorder.preemptions > 0
    for index in range(6):
        expected = harness.solo([index, 9, 1, 2, 5], ["later", "a", None][index % 3], 20)
        assert harness.tokens[f"r{index}"] == expected


def test_blocks_before_an_activated_adapter_begins_are_known_as_the_bases():
    hashes = {}
    for adapter in (None, "later"):
        harness = Harness(budget=32)
        harness.add("r", [5, 6, 7, 8, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7], adapter, max_tokens=5)
        harness.step()
        harness.step()
        hashes[adapter] = harness.engine.scheduler.running[0].table.hashes[:]
    assert len(hashes[None]) == 4
    shared = [one == other for one, other in zip(hashes[None], hashes["later"], strict=True)]
    assert shared == [True, True, False, False]


class EngineMachine(RuleBasedStateMachine):
    """Requests come, end and are aborted at any moment in a small pool: answers stay right."""

    def __init__(self) -> None:
        super().__init__()
        self.harness = Harness(blocks=9, lanes=3, budget=6, max_model_len=30)
        self.asked: dict[str, tuple[list[int], str | None, int]] = {}
        self.aborted: set[str] = set()

    @rule(
        prompt=st.lists(
            st.integers(0, VOCAB - 1) | st.sampled_from(INVOCATION), min_size=1, max_size=14
        ),
        adapter=st.sampled_from([None, "a", "b", "later"]),
        max_tokens=st.integers(1, 16),
    )
    def add(self, prompt, adapter, max_tokens):
        request_id = f"r{len(self.asked)}"
        if adapter == "later" and last_start(INVOCATION, prompt) is None:
            with pytest.raises(InvocationTokensError):
                self.harness.add(request_id, prompt, adapter, max_tokens=max_tokens)
            return
        self.harness.add(request_id, prompt, adapter, max_tokens=max_tokens)
        self.asked[request_id] = (prompt, adapter, max_tokens)

    @rule(index=st.integers(0, 30))
    def abort(self, index):
        if index < len(self.asked):
            self.harness.engine.abort(f"r{index}")
            if f"r{index}" not in self.harness.reasons:
                self.aborted.add(f"r{index}")

    @rule(steps=st.integers(1, 8))
    def run_some(self, steps):
        for _ in range(steps):
            self.harness.step()

    @invariant()
    def answers_are_prefixes_of_solo_answers(self):
        for request_id, (prompt, adapter, max_tokens) in self.asked.items():
            expected = self.harness.solo(prompt, adapter, max_tokens)
            tokens = self.harness.tokens[request_id]
            assert tokens == expected[: len(tokens)]

    def teardown(self):
        self.harness.run()
        for request_id, (_, _, max_tokens) in self.asked.items():
            if request_id not in self.aborted:
                assert len(self.harness.tokens[request_id]) == max_tokens
        assert len(self.harness.recorder.requests) == len(self.asked), "each released once"


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
