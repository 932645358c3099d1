"""Where a device's time goes, by kind of kernel, from JAX's own profiler.

    python -m benchmarks.kernel_profile

shows how a decode step's layers are launched: as CUDA graphs, the LoRA kernels inside; and what a
prefill's layer of 8,192 tokens takes kernel by kernel, without adapters, with one and with 32.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import jax

from benchmarks.command import Parser


# The first pattern that a kernel's name holds is its kind.
KINDS = {
    "lora": r"shrink|expand|lora_",
    "gate": r"^gate(_\d+)?$",
    "matrix products": r"gemm|cublas|cutlass|xmma|nvjet|dot|^product",
    "copies": r"memcpy|copy",
}
OTHER = "other fusions"


def device_seconds(work: Callable[[], None]) -> dict[str, dict[str, float]]:
    """Run `work` under the profiler; seconds of device time by kind, and by kernel within it."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            work()
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        kinds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for plane in data.planes:
            if not plane.name.startswith("/device:"):
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    kinds[kind_of(event.name)][event.name] += event.duration_ns * 1e-9
    return {kind: dict(kernels) for kind, kernels in kinds.items()}


def launches(work: Callable[[], None]) -> dict[str, int]:
    """Run `work` under the profiler; how often the host launched what, and LoRA kernels run."""
    counts: dict[str, int] = defaultdict(int)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            work()
        (path,) = Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            on_device = plane.name.startswith("/device:")
            for line in plane.lines:
                for event in line.events:
                    if on_device and line.name.startswith("Stream") and "lora" in event.name:
                        counts["LoRA kernels on the device"] += 1
                    elif not on_device and re.match(r"cu(da)?(Graph)?Launch", event.name):
                        counts[event.name] += 1
    return dict(counts)


def main() -> None:
    parser = Parser(description="Shows where a device's time goes, by kind of kernel.")
    parser.parse_args()
    # Else XLA launches kernel by kernel while it is profiled. Read when the device is first used.
    flag = "--xla_enable_command_buffers_during_profiling=true"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    parser.need_gpu()
    from benchmarks import lora_layers as layers

    weights, tables = layers.make_weights(4), layers.make_tables(4, 16)

    def of_a_step(tokens: int) -> dict[str, int]:
        args = (weights, tables, layers.routing_of("decode", tokens, 1))
        run = layers.program("decode", 16, True, layers.CONCURRENT)
        x = layers.start_state(tokens)
        for _ in range(3):
            x = run(x, *args)
        jax.block_until_ready(x)
        return launches(lambda: jax.block_until_ready(run(x, *args)))

    def of_a_prefill(adapters: int) -> dict[str, dict[str, float]]:
        args = (weights, tables, layers.routing_of("prefill", 8192, max(adapters, 1)))
        run = layers.program("prefill", 16, adapters > 0)
        x = jax.block_until_ready(run(layers.start_state(8192), *args))
        return device_seconds(lambda: jax.block_until_ready(run(x, *args)) and None)

    for tokens in (1, 64, 256):
        print(f"{tokens} tokens, one step of 4 layers: {of_a_step(tokens)}")
    for adapters in (0, 1, 32):
        print(f"8192 tokens, {adapters} adapters, ms a layer:")
        print(summary(of_a_prefill(adapters), 4, top=8))


def kind_of(kernel: str) -> str:
    for kind, pattern in KINDS.items():
        if re.search(pattern, kernel, re.IGNORECASE):
            return kind
    return OTHER


def summary(kinds: dict[str, dict[str, float]], steps: int, top: int = 4) -> str:
    """One line a kind: ms a step, and its largest kernels."""
    lines = []
    for kind, kernels in sorted(kinds.items(), key=lambda item: -sum(item[1].values())):
        largest = sorted(kernels.items(), key=lambda item: -item[1])[:top]
        names = ", ".join(f"{name[:40]} {seconds / steps * 1e3:.2f}" for name, seconds in largest)
        lines.append(f"    {kind:16} {sum(kernels.values()) / steps * 1e3:7.2f} ms  ({names})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
