from __future__ import annotations

import dataclasses
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from jaxlora.errors import AdapterError
from serving.config import AdapterSource, EngineConfig
from serving.options import ServerConfig, parse_bytes, parse_options
from serving.server import bind, main, url


ROOT = Path(__file__).parents[2]


def test_only_the_model_is_required_and_defaults_are_the_configurations():
    engine, server = parse_options(["--model", "models/tiny"])
    assert engine == EngineConfig(model=Path("models/tiny"))
    assert server == ServerConfig(name="tiny")


def test_name_of_a_model_in_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert parse_options(["--model", "."])[1].name == tmp_path.name


def test_every_option_reaches_its_configuration():
    line = (
        "--model m --adapter a=dir/a --adapter b=dir=b --adapter-strength b=0.5 --name n"
        " --alias x --alias y --host 0.0.0.0 --port 0 --api-key k --tp 2 --max-num-seqs 3"
        " --max-model-len 4 --dtype bfloat16 --load-format dummy --kv-memory 512MiB"
        " --adapter-memory 2GB --adapter-slots 5 --max-adapter-rank 6 --prefill-chunk 7"
        " --kernel-backend xla --seed 8 --max-queue 9"
    )
    engine, server = parse_options(line.split())
    assert engine == EngineConfig(
        model=Path("m"),
        adapters=(AdapterSource("a", Path("dir/a")), AdapterSource("b", Path("dir=b"), 0.5)),
        dtype="bfloat16",
        load_format="dummy",
        tp=2,
        max_num_seqs=3,
        max_model_len=4,
        prefill_chunk=7,
        kv_memory=512 * 2**20,
        adapter_memory=2 * 10**9,
        adapter_slots=5,
        max_adapter_rank=6,
        kernel_backend="xla",
        seed=8,
    )
    assert server == ServerConfig("n", ("x", "y"), "0.0.0.0", 0, "k", 9)
    defaults = EngineConfig(model=Path("m"))
    for field in dataclasses.fields(EngineConfig):  # so none can be forgotten here
        if field.name != "model":
            assert getattr(engine, field.name) != getattr(defaults, field.name)


@pytest.mark.parametrize(
    ("text", "number"),
    [("5", 5), ("1K", 1024), ("1KB", 1000), ("1.5GiB", 3 * 2**29), ("2 MB", 2 * 10**6), ("7B", 7)],
)
def test_bytes(text, number):
    assert parse_bytes(text) == number


def test_a_queue_of_none_is_not_a_queue_without_a_bound():
    assert parse_options(["--model", "m", "--max-queue", "0"])[1].max_queue == 0
    assert parse_options(["--model", "m"])[1].max_queue is None


def test_a_wrong_queue_is_told_that_none_is_one_too(capsys):
    with pytest.raises(SystemExit):
        parse_options(["--model", "m", "--max-queue", "-1"])
    assert "'-1' is not a number from 0 up" in capsys.readouterr().err


def test_an_empty_name_is_no_name_left_out(capsys):
    assert main(["--model", "m", "--name", ""], build=refuse_to_build) == 2
    assert capsys.readouterr().err.startswith("error: model name '' must be")


def test_memory_auto_is_left_to_the_engine():
    assert parse_options(["--model", "m", "--kv-memory", "auto"])[0].kv_memory is None


def refuse_to_build(*_):
    raise AdapterError("dir/a: rank 5000 is over --max-adapter-rank 512")


MISTAKES = [
    ("", "--model"),
    ("--model m --unknown", "--unknown"),
    ("--model m --adap a=b", "--adap"),
    ("--model m --port 70000", "70000"),
    ("--model m --port -1", "-1"),
    ("--model m --host no.such.host.invalid --port 0", "no.such.host.invalid"),
    ("--model m --tp 0", "--tp"),
    ("--model m --tp two", "--tp"),
    ("--model m --max-queue -1", "--max-queue"),
    ("--model m --max-queue 00", "--max-queue"),
    ("--model m --max-queue many", "--max-queue"),
    ("--model m --dtype float64", "float64"),
    ("--model m --load-format pickle", "pickle"),
    ("--model m --kv-memory 5XB", "5XB"),
    ("--model m --kv-memory -5", "--kv-memory"),
    (f"--model m --kv-memory {'9' * 400}", "--kv-memory"),
    ("--model m --adapter a", "NAME=VALUE"),
    ("--model m --adapter =dir", "NAME=VALUE"),
    ("--model m --adapter a=", "NAME=VALUE"),
    ("--model m --adapter a:b=dir", "a:b"),
    ("--model m --adapter a=x --adapter a=y", "'a'"),
    ("--model m --adapter m=x", "'m'"),
    ("--model m --name n --alias n", "'n'"),
    ("--model m --alias a --adapter a=x", "'a'"),
    ("--model m --name a:b", "a:b"),
    ("--model m --adapter-strength a=2", "no --adapter"),
    ("--model m --adapter a=x --adapter-strength a=nan", "'nan'"),
    ("--model m --adapter a=x --adapter-strength a=inf", "'inf'"),
    ("--model m --adapter a=x --adapter-strength a=big", "'big'"),
    ("--model m --adapter a=x --adapter-strength a=1 --adapter-strength a=2", "twice"),
    ("--model m --port 0", "rank 5000"),
]


@pytest.mark.parametrize(("arguments", "named"), MISTAKES)
def test_a_mistake_is_one_line_and_status_2(arguments, named, capsys):
    try:
        status = main(arguments.split(), build=refuse_to_build)
    except SystemExit as stopped:
        status = stopped.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert named in captured.err


def test_a_port_in_use_is_found_before_anything_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["--model", "m", "--port", port], build=refuse_to_build) == 2
    assert f"127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


def test_address_shown_is_one_a_client_can_use():
    with bind("0.0.0.0", 0) as listener:
        assert url(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_in_order_with_status_0_even_with_an_open_stream(number):
    command = "-m tests.serving.echo_server --model m --name base --adapter a=dir --port 0"
    with subprocess.Popen(
        [sys.executable, *command.split()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        body = {"model": "a", "prompt": [104, 105], "stream": True}
        with httpx.stream("POST", f"{address}/completions", json=body) as response:
            lines = response.iter_lines()
            assert '"text":"h"' in next(lines)
            process.send_signal(number)
            before = time.monotonic()
            rest = list(lines)
        out, err = process.communicate(timeout=10)
    assert time.monotonic() - before < 5
    assert process.returncode == 0
    assert "the server is stopping" in rest[-2]
    assert "closed with 0 running" in out
    assert "Traceback" not in err


def test_nothing_of_jax_is_imported_by_the_http_layer():
    code = "import sys, serving.server; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
