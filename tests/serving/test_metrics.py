from __future__ import annotations

import dataclasses
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.core import FinishReason, RequestStats, StepStats
from serving.metrics import Metrics


STEP = StepStats(
    decode_rows=3,
    prefill_tokens=10,
    distinct_adapters=2,
    base_rows=1,
    running=4,
    waiting=2,
    kv_usage=0.25,
    preemptions=0,
    seconds=0.01,
)
REQUEST = RequestStats(
    adapter="pirate",
    prompt_tokens=10,
    completion_tokens=5,
    finish_reason=FinishReason.STOP,
    queue_seconds=0.1,
    first_token_seconds=0.2,
    total_seconds=1.5,
)
NAMES = {"model_name": "base", "engine": "0"}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("base", max_adapters=4)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, NAMES | labels)


def test_step_sets_gauges_to_the_latest_and_adds_preemptions(metrics):
    metrics.record_step(dataclasses.replace(STEP, preemptions=2))
    metrics.record_step(dataclasses.replace(STEP, running=1, waiting=0, preemptions=1))
    assert value(metrics, "vllm:num_requests_running") == 1
    assert value(metrics, "vllm:num_requests_waiting") == 0
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.25
    assert value(metrics, "vllm:num_preemptions_total") == 3
    assert value(metrics, "jaxlora_step_seconds_count") == 2


@pytest.mark.parametrize(
    ("adapters", "base_rows", "labels"),
    [
        (0, 3, {"adapters": "0", "base": "true"}),
        (1, 0, {"adapters": "1", "base": "false"}),
        (2, 1, {"adapters": "2", "base": "true"}),
        (3, 0, {"adapters": "3+", "base": "false"}),
        (50, 1, {"adapters": "3+", "base": "true"}),
    ],
)
def test_decode_steps_are_counted_by_what_they_mixed(metrics, adapters, base_rows, labels):
    metrics.record_step(dataclasses.replace(STEP, distinct_adapters=adapters, base_rows=base_rows))
    assert value(metrics, "jaxlora_decode_steps_total", **labels) == 1


def test_step_without_decode_rows_is_no_decode_step(metrics):
    metrics.record_step(dataclasses.replace(STEP, decode_rows=0, distinct_adapters=0, base_rows=0))
    assert "jaxlora_decode_steps_total{" not in metrics.exposition().decode()


def test_request_adds_its_tokens_and_times_once(metrics):
    metrics.record_request(REQUEST)
    assert value(metrics, "vllm:prompt_tokens_total") == 10
    assert value(metrics, "vllm:generation_tokens_total") == 5
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 0
    for name, seconds in (
        ("vllm:time_to_first_token_seconds", 0.2),
        ("vllm:e2e_request_latency_seconds", 1.5),
        ("vllm:request_queue_time_seconds", 0.1),
    ):
        assert value(metrics, f"{name}_sum") == seconds
        assert value(metrics, f"{name}_count") == 1


def test_request_aborted_before_its_first_token_has_no_time_to_it(metrics):
    metrics.record_request(
        dataclasses.replace(REQUEST, finish_reason=FinishReason.ABORT, first_token_seconds=None)
    )
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 0
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 1


def test_adapter_info_shows_the_present_state_alone(metrics):
    metrics.record_adapters(["b", "a"], ["c"])
    metrics.record_adapters(["a"])
    families = {f.name: f for f in text_string_to_metric_families(metrics.exposition().decode())}
    (sample,) = families["vllm:lora_requests_info"].samples
    assert sample.labels == {
        "max_lora": "4",
        "running_lora_adapters": "a",
        "waiting_lora_adapters": "",
    }
    assert time.time() - 60 < sample.value <= time.time()


def test_two_servers_in_one_process_share_nothing():
    one, two = Metrics("base"), Metrics("base")
    one.record_request(REQUEST)
    assert value(two, "vllm:prompt_tokens_total") == 0
