"""A mistake on a benchmark's command line is one line and exit status 2, before anything runs."""

from __future__ import annotations

import argparse
import importlib

import jax
import pytest

from benchmarks.command import Parser, count, count_or_none, file_to_write, folder


ON_A_GPU = ("kernel_profile", "lora_kernels", "lora_layers", "tune_lora", "tune_product")


def refused(capsys, run, *args) -> str:
    with pytest.raises(SystemExit) as ended:
        run(*args)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert not said.out
    (line,) = said.err.splitlines()
    return line


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
@pytest.mark.parametrize("name", ON_A_GPU)
def test_without_a_gpu_there_is_one_line_and_no_traceback(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [name])
    monkeypatch.setenv("XLA_FLAGS", "")
    main = importlib.import_module(f"benchmarks.{name}").main
    assert refused(capsys, main) == "error: needs a GPU, JAX runs on: cpu"


@pytest.mark.parametrize(
    ("name", "args", "line"),
    [
        ("lora_layers", "--rank 0", "argument --rank: '0' is not a whole number from 1 on"),
        ("lora_layers", "--json none/x", "argument --json: 'none/x' is no file in a folder that"),
        ("lora_kernels", "--peer none", "argument --peer: 'none' is no folder"),
        ("kernel_profile", "more", "unrecognized arguments: more"),
        ("decode_steps", "--batches 1 0", "argument --batches: '0' is not a whole number from 1"),
        ("decode_steps", "--adapters -1", "argument --adapters: '-1' is not a whole number from 0"),
        ("decode_steps", "--answer 120", "--answer: wanted more than 120, the steps timed"),
        ("decode_steps", "--model none", "none/config.json: cannot be read: No such file"),
        (
            "decode_steps",
            "--kernel-backend cuda",
            "--kernel-backend 'cuda' is none of: xla, triton",
        ),
    ],
)
def test_a_wrong_option_is_one_line(name, args, line, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [name, *args.split()])
    main = importlib.import_module(f"benchmarks.{name}").main
    assert refused(capsys, main).startswith(f"error: {line}")


def test_what_is_right_is_taken(tmp_path):
    parser = Parser()
    for option, kind in (("a", count), ("b", count_or_none), ("c", file_to_write), ("d", folder)):
        parser.add_argument(f"--{option}", type=kind)
    got = parser.parse_args(
        ["--a", "3", "--b", "0", "--c", str(tmp_path / "new.json"), "--d", str(tmp_path)]
    )
    assert (got.a, got.b, got.c, got.d) == (3, 0, tmp_path / "new.json", tmp_path)
    assert file_to_write("new.json").name == "new.json"
    with pytest.raises(argparse.ArgumentTypeError):
        file_to_write(str(tmp_path))
