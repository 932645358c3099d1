"""`Metrics`: Prometheus metrics of one server. `metric_rows.py` names them all."""

from __future__ import annotations

import dataclasses
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from serving.core import FinishReason, RequestStats, StepStats
from serving.metric_rows import LENGTHS, METRICS, NAMED, MetricRow


_MANY_ADAPTERS = 3  # steps with this many or more share a label


class Metrics(Collector):
    """Counts steps and requests in a registry of its own. Methods may be called from any thread."""

    def __init__(self, model_name: str, max_adapters: int = 0, max_model_len: int = 32768) -> None:
        """`max_adapters` fit on the device at once; `max_model_len` bounds buckets of lengths."""
        self._rows = {row.name: _bounded(row, max_model_len) for row in METRICS}
        self._named = (model_name, "0")
        self._max_adapters = str(max_adapters)
        self._lock = threading.Lock()
        # name -> label values -> value
        self._values: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in self._rows}
        self._histograms = {
            row.name: _Histogram(row.buckets) for row in self._rows.values() if row.buckets
        }
        for row in self._rows.values():  # so that rates start from 0
            if row.labels == NAMED and not row.buckets:
                self._values[row.name][self._named] = 0.0
        for reason in FinishReason:
            self._values["vllm:request_success"][(*self._named, reason.value)] = 0.0
        self.record_adapters(())
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def record_step(self, stats: StepStats) -> None:
        """Count one engine step; `stats.preemptions` and `stats.tokens` are those of this step."""
        tokens = stats.tokens
        with self._lock:
            self._set("vllm:num_requests_running", stats.running)
            self._set("vllm:num_requests_waiting", stats.waiting)
            self._set("vllm:kv_cache_usage_perc", stats.kv_usage)
            self._add("vllm:num_preemptions", stats.preemptions)
            self._add("vllm:prompt_tokens", tokens.prompt_tokens)
            self._add("vllm:generation_tokens", tokens.generated_tokens)
            self._observe("vllm:time_to_first_token_seconds", *tokens.first_token_seconds)
            self._observe("vllm:inter_token_latency_seconds", *tokens.intervals)
            self._observe("jaxlora_step_seconds", stats.seconds)
            if stats.decode_rows or stats.prefill_tokens:
                computed = stats.decode_rows + stats.prefill_tokens
                self._observe("vllm:iteration_tokens_total", computed)
            if stats.decode_rows:
                many = stats.distinct_adapters >= _MANY_ADAPTERS
                adapters = f"{_MANY_ADAPTERS}+" if many else str(stats.distinct_adapters)
                base = "true" if stats.base_rows else "false"
                self._add("jaxlora_decode_steps", 1, adapters, base)

    def record_request(self, stats: RequestStats) -> None:
        """Count one ended request, aborted ones included."""
        prefill, decode = stats.prefill_seconds, stats.decode_seconds
        with self._lock:
            self._add("vllm:request_success", 1, stats.finish_reason.value)
            self._observe("vllm:request_prompt_tokens", stats.prompt_tokens)
            self._observe("vllm:request_generation_tokens", stats.completion_tokens)
            self._observe("vllm:request_params_max_tokens", stats.max_tokens)
            self._observe("vllm:request_queue_time_seconds", stats.queue_seconds)
            self._observe("vllm:e2e_request_latency_seconds", stats.total_seconds)
            if prefill is not None:
                self._observe("vllm:request_prefill_time_seconds", prefill)
            if decode is not None:
                self._observe("vllm:request_decode_time_seconds", decode)
            if prefill is not None and decode is not None:
                self._observe("vllm:request_inference_time_seconds", prefill + decode)
            if decode is not None and stats.completion_tokens > 1:
                each = decode / (stats.completion_tokens - 1)
                self._observe("vllm:request_time_per_output_token_seconds", each)

    def record_choices(self, choices: int) -> None:
        """Count one prompt that came over HTTP, for which so many answers are asked."""
        with self._lock:
            self._observe("vllm:request_params_n", choices)

    def record_adapters(self, running: Iterable[str], waiting: Iterable[str] = ()) -> None:
        """Say which adapters are on the device, and which are asked for but not there yet."""
        labels = (self._max_adapters, ",".join(sorted(running)), ",".join(sorted(waiting)))
        with self._lock:  # only the present state may be seen
            self._values["vllm:lora_requests_info"] = {labels: time.time()}

    def record_kv_pool(self, block_size: int, blocks: int) -> None:
        """Say what the KV pool holds: `blocks` blocks of `block_size` tokens."""
        with self._lock:
            labels = (self._named[1], str(block_size), str(blocks))
            self._values["vllm:cache_config_info"] = {labels: 1.0}

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """The registry asks for this."""
        with self._lock:
            return iter([self._family(row) for row in self._rows.values()])

    def _family(self, row: MetricRow) -> Metric:
        if row.buckets:
            histogram = HistogramMetricFamily(row.name, row.what, labels=row.labels)
            counts, total = self._histograms[row.name].cumulative()
            histogram.add_metric(self._named, counts, total)
            return histogram
        family = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
        result = family(row.name, row.what, labels=row.labels)
        for labels, value in self._values[row.name].items():
            result.add_metric(labels, value)
        return result

    def _set(self, name: str, value: float) -> None:
        self._values[name][self._named] = value

    def _add(self, name: str, amount: float, *labels: str) -> None:
        values, key = self._values[name], (*self._named, *labels)
        values[key] = values.get(key, 0.0) + amount

    def _observe(self, name: str, *values: float) -> None:
        self._histograms[name].observe(values)


class _Histogram:
    """Counts by bucket. A step observes a value for each of its rows, so this must cost little."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, values: Iterable[float]) -> None:
        for value in values:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._total += value

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """((upper bound, count of all up to it), ...) and the sum of all values."""
        counts, so_far = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            so_far += count
            counts.append((floatToGoString(bound), float(so_far)))
        return counts, self._total


def _bounded(row: MetricRow, max_model_len: int) -> MetricRow:
    """Lengths have vLLM's buckets: up to the longest context."""
    if row.buckets is not LENGTHS:
        return row
    buckets = tuple(bound for bound in LENGTHS if bound <= max_model_len)
    return dataclasses.replace(row, buckets=buckets)
