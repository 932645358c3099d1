"""Where a device's time goes, by kind of kernel, from JAX's own profiler."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import jax


# The first pattern that a kernel's name holds is its kind.
KINDS = {
    "lora": r"shrink|expand",
    "matrix products": r"gemm|cublas|cutlass|xmma|nvjet|dot",
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
