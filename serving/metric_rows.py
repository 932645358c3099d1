"""The server's metrics: the table of docs/metrics.md (`python -m serving.metric_rows` prints it).

Where a metric means what vLLM's means it carries vLLM's name, labels and buckets, so that gateways
and dashboards made for vLLM work unchanged; what is ours alone is called `jaxlora_`.
"""

from __future__ import annotations

import dataclasses


# vLLM's buckets; those of lengths end with the longest context.
LENGTHS = tuple(mantissa * 10**power for power in range(8) for mantissa in (1, 2, 5))
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

NAMED = ("model_name", "engine")


@dataclasses.dataclass(frozen=True)
class MetricRow:
    """A metric. A counter is exposed with `_total` behind its name; buckets make a histogram."""

    name: str
    kind: str  # gauge, counter or histogram
    what: str
    labels: tuple[str, ...] = NAMED
    buckets: tuple[float, ...] = ()


METRICS = (
    MetricRow("vllm:num_requests_running", "gauge", "Requests in the batch"),
    MetricRow("vllm:num_requests_waiting", "gauge", "Requests in the queue"),
    MetricRow("vllm:kv_cache_usage_perc", "gauge", "KV blocks in use, 0 to 1"),
    MetricRow(
        "vllm:cache_config_info",
        "gauge",
        "Always 1: the KV pool's block size in tokens and its number of blocks",
        ("engine", "block_size", "num_gpu_blocks"),
    ),
    MetricRow(
        "vllm:lora_requests_info",
        "gauge",
        "Adapters on the device, and those asked for but not there; the time of the last change",
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    ),
    MetricRow("vllm:num_preemptions", "counter", "Requests put back in the queue for KV blocks"),
    MetricRow("vllm:prompt_tokens", "counter", "Prompt tokens read; a prompt counts at its end"),
    MetricRow("vllm:generation_tokens", "counter", "Answer tokens"),
    MetricRow("vllm:request_success", "counter", "Ended requests", (*NAMED, "finished_reason")),
    MetricRow("vllm:iteration_tokens_total", "histogram", "Tokens of a step", NAMED, _STEP_TOKENS),
    MetricRow("vllm:request_prompt_tokens", "histogram", "Prompt tokens", NAMED, LENGTHS),
    MetricRow("vllm:request_generation_tokens", "histogram", "Answer tokens", NAMED, LENGTHS),
    MetricRow(
        "vllm:request_params_n",
        "histogram",
        "Choices asked for a prompt",
        NAMED,
        (1, 2, 5, 10, 20),
    ),
    MetricRow(
        "vllm:request_params_max_tokens",
        "histogram",
        "Answer tokens allowed: max_tokens, or what is left of the context",
        NAMED,
        LENGTHS,
    ),
    MetricRow(
        "vllm:time_to_first_token_seconds",
        "histogram",
        "Arrival to first token",
        NAMED,
        _FIRST_TOKEN,
    ),
    MetricRow(
        "vllm:inter_token_latency_seconds", "histogram", "One token to the next", NAMED, _TOKEN
    ),
    MetricRow(
        "vllm:request_time_per_output_token_seconds",
        "histogram",
        "Mean time from one token to the next, of requests with two or more",
        NAMED,
        _TOKEN,
    ),
    MetricRow("vllm:e2e_request_latency_seconds", "histogram", "Arrival to end", NAMED, _REQUEST),
    MetricRow(
        "vllm:request_queue_time_seconds",
        "histogram",
        "Arrival to first step, or to the end of a request without one",
        NAMED,
        _REQUEST,
    ),
    MetricRow(
        "vllm:request_prefill_time_seconds",
        "histogram",
        "First step to first token",
        NAMED,
        _REQUEST,
    ),
    MetricRow(
        "vllm:request_decode_time_seconds", "histogram", "First to last token", NAMED, _REQUEST
    ),
    MetricRow(
        "vllm:request_inference_time_seconds",
        "histogram",
        "First step to last token",
        NAMED,
        _REQUEST,
    ),
    MetricRow(
        "jaxlora_decode_steps",
        "counter",
        "Steps with decode rows, by distinct adapters among them and whether any was the base",
        (*NAMED, "adapters", "base"),
    ),
    MetricRow("jaxlora_step_seconds", "histogram", "Time of an engine step", NAMED, _STEP),
)


def markdown() -> str:
    """The table of docs/metrics.md."""
    lines = ["| metric | kind | labels | |", "|---|---|---|---|"]
    for row in METRICS:
        name = f"{row.name}_total" if row.kind == "counter" else row.name
        labels = ", ".join(f"`{label}`" for label in row.labels)
        lines.append(f"| `{name}` | {row.kind} | {labels} | {row.what} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
