"""A real server process, its clients, and how busy it says it is."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai

from jaxlora.config import ModelConfig
from jaxlora.models import build
from tests.serving.http.fakes import wait_until
from tests.support.peft_folders import random_factors, write_adapter
from tests.support.tiny_models import TINY_QWEN3, write_byte_tokenizer, write_checkpoint


ROOT = Path(__file__).parents[2]
IDS = {"return_token_ids": True, "ignore_eos": True}
LONG = 1000  # tokens
CONTEXT = LONG + 24
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
MODELS = ("tiny", "attention", "all")
PATIENCE = 60.0


def write_model(root: Path) -> list[str]:
    """A model and two adapters; the command line that serves them."""
    model = root / "tiny"
    model.mkdir()
    changes = {"max_position_embeddings": CONTEXT}
    (model / "config.json").write_text(json.dumps(TINY_QWEN3 | changes))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    write_checkpoint(model)
    write_byte_tokenizer(model)
    modules = build(ModelConfig.from_folder(model), 1, np.float32).modules
    names = [module.name for module in modules.modules]
    attention = write_adapter(
        root / "attention", random_factors(modules), base_model_name_or_path="org/another"
    )
    everything = write_adapter(
        root / "all",
        random_factors(modules, names, rank=5, seed=1),
        r=5,
        lora_alpha=2,
        target_modules="all-linear",
    )
    line = f"-m serving.server --model {model} --alias default --port 0 --max-num-seqs 4"
    line += f" --prefill-chunk 16 --adapter attention={attention} --adapter all={everything}"
    return [sys.executable, *line.split()]


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


class Server:
    """The process, and how busy it says it is."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.errors: list[str] = []
        assert self.process.stdout and self.process.stderr
        stderr = self.process.stderr
        self._reader = threading.Thread(target=lambda: self.errors.extend(stderr), daemon=True)
        self._reader.start()
        self.greeting = self.process.stdout.readline()
        assert self.greeting, "".join(self.errors)
        self.base_url = self.greeting.split()[-1]
        self.root = self.base_url.removesuffix("/v1")
        self.http = httpx.Client(base_url=self.root, timeout=PATIENCE)
        self.client = openai.OpenAI(
            base_url=self.base_url, api_key="none", max_retries=0, timeout=PATIENCE
        )

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            if match := re.fullmatch(rf"{re.escape(name)}\{{(.*)\}} (\S+)", line):
                found = dict(re.findall(r'(\w+)="([^"]*)"', match[1]))
                if labels.items() <= found.items():
                    total += float(match[2])
        return total

    @property
    def running(self) -> int:
        return int(self.metric("vllm:num_requests_running"))

    @property
    def idle(self) -> bool:
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return all(self.metric(f"vllm:{name}") == 0 for name in gauges)

    def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        return self.http.post(path, json=fields)

    def tokens(self, model: str, prompt: Any, max_tokens: int = 12, **fields: Any) -> list[int]:
        """The answer's token ids, greedy unless told otherwise."""
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        response = self.post(**(body | IDS | fields))
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["token_ids"]

    @contextlib.contextmanager
    def endless(self, model: str, **fields: Any) -> Iterator[socket.socket]:
        """A raw connection whose request runs for LONG tokens."""
        body = {"model": model, "prompt": "go on", "max_tokens": LONG, "stream": True}
        data = json.dumps(body | IDS | fields).encode()
        before = self.running
        with socket.create_connection(("127.0.0.1", httpx.URL(self.root).port or 0)) as connection:
            head = (
                f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
            )
            connection.sendall(head.encode() + data)
            wait_until(lambda: self.running > before, PATIENCE)
            yield connection

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.http.close()
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return status
