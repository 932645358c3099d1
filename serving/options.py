"""The server's command line: arguments to configurations. Defaults are the configurations' own."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jaxlora.errors import ConfigError
from serving.catalog import check_name
from serving.config import AdapterSource, EngineConfig


_BYTE_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("B", 1000), ("iB", 1024))
}


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """What the HTTP server is called and where it listens."""

    name: str
    aliases: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_queue: int | None = None  # requests that may wait; None: any number


def parse_options(arguments: Sequence[str] | None) -> tuple[EngineConfig, ServerConfig]:
    """Read the command line. A mistake ends the process: one line on stderr, exit status 2."""
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    try:
        adapters = _adapters(given.pop("adapter"), given.pop("adapter_strength"))
        fields = {field.name for field in dataclasses.fields(ServerConfig)}
        server = {name: given.pop(name) for name in fields & given.keys()}
        model: Path = given["model"]
        if server["name"] is None:
            server["name"] = os.path.basename(os.path.realpath(model))
        server["aliases"] = tuple(given.pop("alias"))
        return EngineConfig(adapters=adapters, **given), ServerConfig(**server)
    except ConfigError as error:
        parser.error(str(error))


def parse_bytes(text: str) -> int:
    """A number of bytes: 1048576, 512MiB, 2GB, 1.5G (K, M, G, T alone are powers of 1024)."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)", text)
    if match is None or match[2] not in _BYTE_UNITS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of bytes such as 1048576, 512MiB or 2GB"
        )
    count = float(match[1]) * _BYTE_UNITS[match[2]]
    if count >= 2**63:
        raise argparse.ArgumentTypeError("is more bytes than any machine has")
    return int(count)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m serving.server",
        description="Serve one model and its LoRA adapters over OpenAI's HTTP API.",
        allow_abbrev=False,
    )
    _add_server_options(parser.add_argument_group("server"))
    _add_engine_options(parser.add_argument_group("model and engine"))
    return parser


def _add_server_options(group: argparse._ArgumentGroup) -> None:
    config = ServerConfig
    group.add_argument("--name", help="the base model's name for clients; default: its folder's")
    group.add_argument(
        "--alias", action="append", default=[], metavar="NAME", help="one more name of the base"
    )
    group.add_argument("--host", default=config.host, help="address to listen on (%(default)s)")
    group.add_argument("--port", default=config.port, type=_port, help="0: any free (%(default)s)")
    group.add_argument(
        "--api-key", default=config.api_key, type=_api_key, help="clients must send it as a bearer"
    )
    group.add_argument(
        "--max-queue",
        default=config.max_queue,
        type=_count_from_0,
        metavar="N",
        help="requests that may wait, counted by choice, others get a 429; default: any number",
    )


def _add_engine_options(group: argparse._ArgumentGroup) -> None:
    config = EngineConfig
    group.add_argument(
        "--model", required=True, type=Path, metavar="DIR", help="a Hugging Face model folder"
    )
    group.add_argument(
        "--adapter",
        action="append",
        default=[],
        type=_pair,
        metavar="NAME=DIR",
        help="a PEFT LoRA folder, and the name that requests pick it by",
    )
    group.add_argument(
        "--adapter-strength",
        action="append",
        default=[],
        type=_pair,
        metavar="NAME=NUMBER",
        help="a multiplier on an adapter's scale",
    )
    group.add_argument(
        "--dtype", default=config.dtype, choices=("auto", "float32", "bfloat16"), help="%(default)s"
    )
    group.add_argument(
        "--load-format",
        default=config.load_format,
        choices=("auto", "dummy"),
        help="dummy: random weights from config.json alone",
    )
    group.add_argument(
        "--tp",
        default=config.tp,
        type=_count,
        metavar="N",
        help="devices to share the model (%(default)s)",
    )
    for flag, default, what in (
        (
            "--max-num-seqs",
            config.max_num_seqs,
            "sequences decoded together; default 8 on a CPU, 256 on a GPU",
        ),
        (
            "--max-model-len",
            config.max_model_len,
            "most tokens of prompt and answer; default: the model's limit",
        ),
        (
            "--prefill-chunk",
            config.prefill_chunk,
            "most prompt tokens in one step; default 256 on a CPU, 2048 on a GPU",
        ),
        ("--adapter-slots", config.adapter_slots, "most adapters at once; default: those given"),
        (
            "--max-adapter-rank",
            config.max_adapter_rank,
            "largest rank served; default: the largest given",
        ),
    ):
        group.add_argument(flag, default=default, type=_count, metavar="N", help=what)
    for flag, default, what in (
        (
            "--kv-memory",
            config.kv_memory,
            "a device, for keys and values: 512MiB, 2GB or auto, at most 1 GiB of a CPU's"
            " memory, what is left on a GPU",
        ),
        (
            "--adapter-memory",
            config.adapter_memory,
            "a device, for adapters; auto: what those given need",
        ),
    ):
        group.add_argument(flag, default=default, type=_memory, metavar="BYTES", help=what)
    group.add_argument(
        "--kernel-backend",
        default=config.kernel_backend,
        help="of the LoRA kernels: xla, or triton or mosaic on a GPU",
    )
    group.add_argument(
        "--seed", default=config.seed, type=int, help="of requests without one, and dummy weights"
    )


def _adapters(
    folders: list[tuple[str, str]], strengths: list[tuple[str, str]]
) -> tuple[AdapterSource, ...]:
    numbers: dict[str, float] = {}
    names = {name for name, _ in folders}
    for name, text in strengths:
        if name not in names:
            raise ConfigError(f"--adapter-strength {name}: no --adapter has this name")
        if name in numbers:
            raise ConfigError(f"--adapter-strength {name}: given twice")
        numbers[name] = _number(name, text)
    for name, _ in folders:
        check_name(name, "adapter name")
    return tuple(
        AdapterSource(name, Path(folder), numbers.get(name, AdapterSource.strength))
        for name, folder in folders
    )


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"--adapter-strength {name}: {text!r} is not a finite number")
    return number


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _count(text: str) -> int:
    return _count_from(1, text)


def _count_from_0(text: str) -> int:
    return _count_from(0, text)


def _count_from(least: int, text: str) -> int:
    if not re.fullmatch("0|[1-9][0-9]{0,11}", text) or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} up")
    return int(text)


def _port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to 65535")
    return int(text)


def _memory(text: str) -> int | None:
    return None if text == "auto" else parse_bytes(text)


def _api_key(text: str) -> str:
    if not text or not text.isascii() or not text.isprintable() or text != text.strip():
        raise argparse.ArgumentTypeError("must be printable ASCII, without spaces around it")
    return text
