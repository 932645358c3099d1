"""`Metrics`: Prometheus metrics of one server.

Where a metric means what vLLM's means it carries vLLM's name, so that gateways and dashboards made
for vLLM work unchanged; what is ours alone is called `jaxlora_`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from serving.core import FinishReason, RequestStats, StepStats


_LABELS = ("model_name", "engine")
_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_MANY_ADAPTERS = 3  # steps with this many or more share a label


class Metrics:
    """Counts steps and requests in a registry of its own. Methods may be called from any thread."""

    def __init__(self, model_name: str, max_adapters: int = 0) -> None:
        self.registry = CollectorRegistry()
        self._names = {"model_name": model_name, "engine": "0"}
        self._adapters = _AdapterInfo(max_adapters)
        self.registry.register(self._adapters)
        self._running = self._gauge("vllm:num_requests_running", "Requests in the batch")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests in the queue")
        self._kv_usage = self._gauge("vllm:kv_cache_usage_perc", "KV pool in use, 0 to 1")
        self._preemptions = self._counter("vllm:num_preemptions", "Sequences put back in the queue")
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of ended requests")
        self._generated = self._counter("vllm:generation_tokens", "Answer tokens of ended requests")
        self._ended = Counter(
            "vllm:request_success",
            "Ended requests by reason",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token", _FIRST_TOKEN_BUCKETS
        )
        self._total = self._histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last token", _REQUEST_BUCKETS
        )
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "Arrival to first step", _REQUEST_BUCKETS
        )
        self._steps = Counter(
            "jaxlora_decode_steps",
            "Steps with decode rows, by distinct adapters among them and whether any was the base",
            (*_LABELS, "adapters", "base"),
            registry=self.registry,
        )
        self._step_time = self._histogram(
            "jaxlora_step_seconds", "Wall time of one engine step", _STEP_BUCKETS
        )
        for reason in FinishReason:  # so that rates start from 0
            self._ended.labels(**self._names, finished_reason=reason.value)

    def record_step(self, stats: StepStats) -> None:
        """Count one engine step; `stats.preemptions` are those of this step."""
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._kv_usage.set(stats.kv_usage)
        self._preemptions.inc(stats.preemptions)
        self._step_time.observe(stats.seconds)
        if stats.decode_rows:
            many = stats.distinct_adapters >= _MANY_ADAPTERS
            adapters = f"{_MANY_ADAPTERS}+" if many else str(stats.distinct_adapters)
            base = "true" if stats.base_rows else "false"
            self._steps.labels(**self._names, adapters=adapters, base=base).inc()

    def record_request(self, stats: RequestStats) -> None:
        """Count one ended request, aborted ones included."""
        self._ended.labels(**self._names, finished_reason=stats.finish_reason.value).inc()
        self._prompt_tokens.inc(stats.prompt_tokens)
        self._generated.inc(stats.completion_tokens)
        self._queue.observe(stats.queue_seconds)
        self._total.observe(stats.total_seconds)
        if stats.first_token_seconds is not None:
            self._first_token.observe(stats.first_token_seconds)

    def record_adapters(self, running: Iterable[str], waiting: Iterable[str] = ()) -> None:
        """Say which adapters are on the device, and which are asked for but not there yet."""
        self._adapters.update(running, waiting)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(name, what, _LABELS, registry=self.registry).labels(**self._names)

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(name, what, _LABELS, registry=self.registry).labels(**self._names)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, what, _LABELS, registry=self.registry, buckets=buckets).labels(
            **self._names
        )


class _AdapterInfo(Collector):
    """The gauge that Kubernetes' inference gateway routes by: names in labels, time as the value.

    A collector, as the label values change: only the present state may be seen.
    """

    def __init__(self, max_adapters: int) -> None:
        self._max_adapters = str(max_adapters)
        self._state = ("", "", time.time())

    def update(self, running: Iterable[str], waiting: Iterable[str]) -> None:
        self._state = (",".join(sorted(running)), ",".join(sorted(waiting)), time.time())

    def collect(self) -> Iterable[GaugeMetricFamily]:
        running, waiting, changed = self._state
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters resident on the device and waited for; the value is the time of the change",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        family.add_metric((self._max_adapters, running, waiting), changed)
        yield family
