"""What every benchmark says about where it ran, and how it writes its results."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Device, processor and versions."""
    import jax

    versions = {}
    for package in ("jax", "jaxlib", "flax", "numpy", "torch", "transformers", "peft"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": jax.devices()[0].device_kind,
        "devices": len(jax.devices()),
        "platform": jax.default_backend(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": versions,
        "command": " ".join(["python -m", *sys.orig_argv[sys.orig_argv.index("-m") + 1 :]])
        if "-m" in sys.orig_argv
        else " ".join(sys.argv),
    }


def write_json(path: Path | None, results: dict[str, Any]) -> None:
    """Write results with the machine beside them; to stdout where no path is given."""
    text = json.dumps({"machine": machine(), **results}, indent=1)
    if path is None:
        print(text)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
