"""`python -m jaxlora.adapters.check`: the server's checks of adapters, without a server.

Needs the base model's config.json only, no weights and no accelerator: what must be compared with
the weights is named, and left to the server. Exit status 0 where every adapter would be served, 1
where one is refused, 2 for wrong use.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.modules import ModuleTable
from jaxlora.adapters.peft import read_adapter
from jaxlora.adapters.pool_shape import Rows
from jaxlora.errors import AdapterError, JaxloraError


# Bytes of a factor's element where the server runs in this dtype.
SERVED_ITEM_SIZES = {"bfloat16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True)
class Base:
    """What the checks need to know of the base model."""

    name: str
    fingerprint: str
    modules: ModuleTable


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the adapters on the command line; prints a report. Returns the exit status."""
    options = _parse(arguments)
    try:
        base = _read_base(options.model, options.tp)
    except JaxloraError as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    reports = [
        check(folder, base, options.tp, options.max_adapter_rank) for folder in options.adapter
    ]
    if options.json:
        print(json.dumps(reports, indent=2))
    else:
        for report in reports:
            print(_as_text(report))
    return 1 if any(report["refused"] for report in reports) else 0


def check(folder: Path, base: Base, tp: int, max_rank: int | None = None) -> dict[str, Any]:
    """What the server would say of one folder; "refused" is the reason, or None."""
    report: dict[str, Any] = {"adapter": str(folder), "refused": None}
    try:
        adapter = read_adapter(
            folder,
            name=folder.name,
            modules=base.modules,
            base_fingerprint=base.fingerprint,
            base_name=base.name,
            max_rank=max_rank,
        )
    except AdapterError as error:
        return report | {"refused": str(error)}
    return report | {
        "key": adapter.key,
        "max_rank": adapter.max_rank,
        "invocation_tokens": list(adapter.invocation_tokens),
        "bytes_per_rank": bytes_per_rank(adapter, base.modules, tp),
        "modules": [
            {
                "path": base.modules.path(layer, name),
                "rank": factors.rank,
                "scale": factors.scale,
                "dtype": str(factors.a.dtype),
                "lora_bias": factors.b_bias is not None,
                "dora": factors.magnitude is not None,
            }
            for (layer, name), factors in adapter.factors.items()
        ],
        "biases": [base.modules.path(*site) for site in adapter.biases],
        "token_rows": {name: list(rows.ids) for name, rows in adapter.token_rows.items()},
        "compared_at_load": list(adapter.base_copies),
        "may_be_the_base": adapter.may_be_the_base,
    }


def bytes_per_rank(adapter: Adapter, modules: ModuleTable, tp: int) -> dict[str, int]:
    """Served dtype -> bytes of its pools that each of `tp` ranks would give the adapter."""
    rows = Rows.of(adapter, modules, tp)
    return {dtype: rows.bytes(modules, tp, size) for dtype, size in SERVED_ITEM_SIZES.items()}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jaxlora.adapters.check",
        description="Check PEFT adapter folders against a base model, exactly as the server does.",
    )
    parser.add_argument("--model", type=Path, required=True, help="folder with a config.json")
    parser.add_argument("--tp", type=_positive, default=1, help="tensor-parallel ranks (1)")
    parser.add_argument("--max-adapter-rank", type=_positive, help="the server's limit, if any")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("adapter", type=Path, nargs="+", help="PEFT adapter folder")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _read_base(folder: Path, tp: int) -> Base:
    # Here, because this pulls in JAX, and `--help` should not wait for it.
    import jax.numpy as jnp

    from jaxlora.config import ModelConfig
    from jaxlora.models import build

    config = ModelConfig.from_folder(folder)
    modules = build(config, tp, jnp.float32).modules
    return Base(os.path.basename(os.path.realpath(folder)), config.fingerprint, modules)


def _as_text(report: dict[str, Any]) -> str:
    folder = _printable(report["adapter"])
    if report["refused"]:
        return f"{folder}: REFUSED\n  {_printable(report['refused'])}"
    sizes = ", ".join(f"{size:,} in {dtype}" for dtype, size in report["bytes_per_rank"].items())
    lines = [
        f"{folder}: ok",
        f"  identity key  {report['key']}",
        f"  bytes a rank  {sizes}",
        f"  modules       {len(report['modules'])}, rank up to {report['max_rank']}",
    ]
    if report["invocation_tokens"]:
        lines.append(f"  begins at     tokens {report['invocation_tokens']}")
    if report["biases"]:
        lines.append(f"  biases        {len(report['biases'])} in place of the base's")
    for name, ids in report["token_rows"].items():
        lines.append(f"  token rows    {len(ids)} of {name}")
    for name in report["compared_at_load"]:
        lines.append(f"  to compare    {name}.base_layer.weight, with the base's when it is loaded")
    if report["may_be_the_base"]:
        lines.append("  to compare    all else, with the base's: the factors alone change nothing")
    for module in report["modules"]:
        extras = [name for name in ("lora_bias", "dora") if module[name]]
        lines.append(
            f"  {module['path']:<40} rank {module['rank']:<4} scale {module['scale']:<10.6g} "
            f"{' '.join([module['dtype'], *extras])}"
        )
    return "\n".join(lines)


def _printable(text: str) -> str:
    """A folder may be called anything; its name may neither forge a line nor fail to print."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode("ascii")
        for c in text
    )


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # a reader that has seen enough ends it, like any tool
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
