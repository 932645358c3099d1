from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.core import FinishReason, RequestStats, StepStats, TokenStats
from serving.metric_rows import METRICS, markdown
from serving.metrics import Metrics


DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


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
    tokens=TokenStats(10, 4, [0.2], [0.01, 0.03]),
)
REQUEST = RequestStats(
    adapter="pirate",
    prompt_tokens=10,
    completion_tokens=5,
    finish_reason=FinishReason.STOP,
    max_tokens=16,
    queue_seconds=0.1,
    prefill_seconds=0.25,
    decode_seconds=1.0,
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


def test_step_adds_its_tokens_and_their_times(metrics):
    metrics.record_step(STEP)
    metrics.record_step(dataclasses.replace(STEP, tokens=TokenStats(0, 1, [], [0.06])))
    assert value(metrics, "vllm:prompt_tokens_total") == 10
    assert value(metrics, "vllm:generation_tokens_total") == 5
    assert value(metrics, "vllm:time_to_first_token_seconds_sum") == 0.2
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 3
    assert value(metrics, "vllm:inter_token_latency_seconds_sum") == pytest.approx(0.1)
    counts = [
        value(metrics, "vllm:inter_token_latency_seconds_bucket", le=le)
        for le in ("0.01", "0.025", "0.05", "0.075", "80.0", "+Inf")
    ]
    assert counts == [1, 1, 2, 3, 3, 3]
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 26


def test_an_idle_step_is_no_iteration(metrics):
    metrics.record_step(dataclasses.replace(STEP, decode_rows=0, prefill_tokens=0))
    assert value(metrics, "vllm:iteration_tokens_total_count") == 0


def test_request_adds_its_times_and_parameters_once(metrics):
    metrics.record_request(REQUEST)
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 0
    for name, wanted in (
        ("vllm:e2e_request_latency_seconds", 1.5),
        ("vllm:request_queue_time_seconds", 0.1),
        ("vllm:request_prefill_time_seconds", 0.25),
        ("vllm:request_decode_time_seconds", 1.0),
        ("vllm:request_inference_time_seconds", 1.25),
        ("vllm:request_time_per_output_token_seconds", 0.25),
        ("vllm:request_prompt_tokens", 10),
        ("vllm:request_generation_tokens", 5),
        ("vllm:request_params_max_tokens", 16),
    ):
        assert value(metrics, f"{name}_sum") == wanted
        assert value(metrics, f"{name}_count") == 1


def test_request_aborted_in_the_queue_has_only_the_times_it_reached(metrics):
    metrics.record_request(
        dataclasses.replace(
            REQUEST,
            finish_reason=FinishReason.ABORT,
            completion_tokens=0,
            prefill_seconds=None,
            decode_seconds=None,
        )
    )
    for name in ("prefill", "decode", "inference"):
        assert value(metrics, f"vllm:request_{name}_time_seconds_count") == 0
    assert value(metrics, "vllm:request_time_per_output_token_seconds_count") == 0
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 1


def test_request_of_one_token_has_no_time_between_tokens(metrics):
    metrics.record_request(dataclasses.replace(REQUEST, completion_tokens=1, decode_seconds=0.0))
    assert value(metrics, "vllm:request_time_per_output_token_seconds_count") == 0
    assert value(metrics, "vllm:request_decode_time_seconds_count") == 1


def test_choices_and_the_kv_pool_are_told(metrics):
    metrics.record_choices(3)
    assert value(metrics, "vllm:request_params_n_bucket", le="2.0") == 0
    assert value(metrics, "vllm:request_params_n_bucket", le="5.0") == 1
    metrics.record_kv_pool(16, 99)
    labels = {"engine": "0", "block_size": "16", "num_gpu_blocks": "99"}
    assert metrics.registry.get_sample_value("vllm:cache_config_info", labels) == 1


def test_buckets_of_lengths_end_with_the_context():
    metrics = Metrics("base", max_model_len=300)
    lines = metrics.exposition().decode().splitlines()
    bounds = [
        line.split('le="')[1].split('"')[0]
        for line in lines
        if line.startswith("vllm:request_prompt_tokens_bucket")
    ]
    assert bounds == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "+Inf"]


def test_exposition_has_every_metric_of_the_table_with_its_kind_and_labels(metrics):
    metrics.record_step(STEP)
    metrics.record_request(REQUEST)
    metrics.record_kv_pool(16, 99)
    families = {f.name: f for f in text_string_to_metric_families(metrics.exposition().decode())}
    assert set(families) == {row.name for row in METRICS}
    for row in METRICS:
        family = families[row.name]
        assert (family.type, family.documentation) == (row.kind, row.what)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(row.labels)
    assert all(row.name.startswith(("vllm:", "jaxlora_")) for row in METRICS)


def test_docs_hold_the_table():
    assert markdown() in DOCS.read_text(encoding="utf-8")


def test_threads_may_record_and_read_at_once(metrics):
    def record():
        for _ in range(300):
            metrics.record_step(STEP)
            metrics.record_request(REQUEST)

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        metrics.exposition()
    assert value(metrics, "vllm:generation_tokens_total") == 4 * 300 * 4
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 1200


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
    one.record_step(STEP)
    assert value(one, "vllm:prompt_tokens_total") == 10
    assert value(two, "vllm:prompt_tokens_total") == 0
