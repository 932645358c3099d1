"""`python -m jaxlora.adapters.check` says what the server would, with its own exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxlora.adapters import check
from jaxlora.adapters.modules import EMBEDDING, HEAD, AdaptableModule, ModuleTable, ParallelKind
from jaxlora.adapters.peft import read_adapter
from jaxlora.config import ModelConfig
from jaxlora.models import build
from tests.support.peft_folders import random_factors, random_vectors, read, write_adapter


BASE = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BASE))
    return folder


def modules_of(model: Path) -> ModuleTable:
    return build(ModelConfig.from_folder(model), 1, "float32").modules


@pytest.fixture
def good(tmp_path, model) -> Path:
    return write_adapter(tmp_path / "good", random_factors(modules_of(model)))


def run(*arguments: object) -> int:
    return check.main([str(argument) for argument in arguments])


def test_a_good_adapter_is_reported_and_the_status_is_0(model, good, capsys):
    assert run("--model", model, good) == 0
    text = capsys.readouterr().out
    config = ModelConfig.from_folder(model)
    adapter = read_adapter(
        good, name="x", modules=modules_of(model), base_fingerprint=config.fingerprint
    )
    assert f"{good}: ok" in text and adapter.key in text
    for layer in (0, 1):
        for name in ("q_proj", "o_proj"):
            assert f"model.layers.{layer}.self_attn.{name}" in text
    assert "rank 3" in text and "scale 2 " in text


def test_json_has_key_modules_ranks_scales_and_bytes(model, good, capsys):
    assert run("--model", model, "--json", "--tp", 2, good) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["refused"] is None and report["max_rank"] == 3 and len(report["key"]) == 64
    assert report["modules"][0] == {
        "path": "model.layers.0.self_attn.q_proj",
        "rank": 3,
        "scale": 2.0,
        "dtype": "float32",
        "lora_bias": False,
        "dora": False,
    }
    # tp 2 cuts q's B and o's A in half; rows are 32 wide: 2 layers x 2 modules x rank 3 x (1 + 1).
    assert report["bytes_per_rank"] == {"bfloat16": 2 * 2 * 3 * 2 * 32 * 2, "float32": 3072}


def test_a_refused_adapter_gives_its_reason_and_status_1(tmp_path, model, good, capsys):
    tensors = random_factors(modules_of(model))
    bad = write_adapter(tmp_path / "bad", tensors, modules_to_save=["lm_head"])
    assert run("--model", model, good, bad) == 1
    text = capsys.readouterr().out
    assert f"{good}: ok" in text and f"{bad}: REFUSED" in text and "modules_to_save is" in text
    assert run("--model", model, "--json", good, bad) == 1
    reports = json.loads(capsys.readouterr().out)
    assert [report["refused"] is None for report in reports] == [True, False]


def test_the_tokens_that_activate_an_adapter_are_reported(tmp_path, model, capsys):
    tensors = random_factors(modules_of(model))
    folder = write_adapter(tmp_path / "later", tensors, alora_invocation_tokens=[5, 63])
    assert run("--model", model, folder) == 0
    assert "begins at     tokens [5, 63]" in capsys.readouterr().out
    assert run("--model", model, "--json", folder) == 0
    assert json.loads(capsys.readouterr().out)[0]["invocation_tokens"] == [5, 63]
    write_adapter(folder, tensors, alora_invocation_tokens=[5, 64])
    assert run("--model", model, folder) == 1
    assert "has token 64; this base has tokens 0 to 63" in capsys.readouterr().out


def test_what_is_more_than_factors_is_reported_and_counted(tmp_path, model, capsys):
    modules = modules_of(model)
    tensors = random_factors(modules) | random_vectors("lora_magnitude_vector", modules)
    copy = {f"base_model.model.{HEAD}.base_layer.weight": np.ones((64, 32), np.float32)}
    rows = {
        f"base_model.model.{EMBEDDING}.token_adapter.trainable_tokens_delta": np.ones(
            (2, 32), np.float32
        )
    }
    folder = write_adapter(
        tmp_path / "more", tensors | copy | rows, use_dora=True, trainable_token_indices=[9, 4]
    )
    assert run("--model", model, "--tp", 2, folder) == 0
    text = capsys.readouterr().out
    assert "token rows    2 of model.embed_tokens" in text and "float32 dora" in text
    assert "to compare    lm_head.base_layer.weight" in text
    assert run("--model", model, "--tp", 2, "--json", folder) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["token_rows"] == {EMBEDDING: [4, 9]}
    # Rows are 32 wide; a rank has q's gain in half and o's whole, one row of 32 float32 each.
    vectors, token_rows = 2 * 2 * 32 * 4, 2 * 32
    assert report["bytes_per_rank"] == {
        "bfloat16": 1536 + vectors + 2 * token_rows,
        "float32": 3072 + vectors + 4 * token_rows,
    }


def test_the_servers_rank_limit_is_checked(model, good, capsys):
    assert run("--model", model, "--max-adapter-rank", 2, good) == 1
    assert "over --max-adapter-rank 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [[], ["adapter"], ["--model", "m"], ["--model", "m", "--tp", "0", "a"], ["--nonsense"]],
)
def test_wrong_use_has_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("changes", "tp"),
    [({}, 3), ({"model_type": "unheard_of"}, 1), ({"hidden_size": "wide"}, 1)],
)
def test_a_base_that_is_not_served_has_status_2_and_one_line(model, good, capsys, changes, tp):
    (model / "config.json").write_text(json.dumps(BASE | changes))
    assert run("--model", model, "--tp", tp, good) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and output.err.startswith("check: ")


def test_a_model_folder_that_is_not_there_has_status_2(tmp_path, good, capsys):
    assert run("--model", tmp_path / "absent", good) == 2
    assert "absent" in capsys.readouterr().err


def test_bytes_are_of_the_true_rank_and_modules(tmp_path):
    q = AdaptableModule("self_attn.q_proj", 64, 128, ParallelKind.COLUMN)
    o = AdaptableModule("self_attn.o_proj", 128, 64, ParallelKind.ROW)
    modules = ModuleTable(2, (q, o), vocab_size=1)
    tensors = random_factors(modules, ["self_attn.q_proj"], rank=5)
    folder = write_adapter(tmp_path, tensors, r=5, target_modules=["q_proj"])
    adapter = read(folder, modules)
    for tp, width in ((1, 64 + 128), (2, 64 + 64)):
        sizes = check.bytes_per_rank(adapter, modules, tp)
        assert sizes == {"bfloat16": 2 * 5 * width * 2, "float32": 2 * 5 * width * 4}


def test_a_folders_name_can_neither_forge_a_line_nor_fail_to_print(model, good, tmp_path, capsys):
    for name in ("good\nother: ok", "good\udcff"):
        assert run("--model", model, tmp_path / name) == 1
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 2 and "\n" not in lines[0] and lines[0].endswith("REFUSED")
        "".join(lines).encode()


def test_a_reader_that_stops_early_sees_no_traceback(model, good):
    command = [sys.executable, "-m", "jaxlora.adapters.check", "--model", str(model)]
    reading, writing = os.pipe()
    os.close(reading)  # as `| head` does once it has its lines
    done = subprocess.run(
        [*command, str(good)], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120
    )
    os.close(writing)
    assert done.returncode == -signal.SIGPIPE and done.stderr == ""


def test_what_only_the_bases_weights_can_tell_is_named(model, tmp_path, capsys):
    factors = random_factors(modules_of(model))
    zero = {key: 0 * value if "lora_B" in key else value for key, value in factors.items()}
    dora = zero | random_vectors("lora_magnitude_vector", modules_of(model))
    folder = write_adapter(tmp_path / "dora", dora, use_dora=True)
    assert run("--model", model, folder) == 0
    assert "to compare    all else, with the base's" in capsys.readouterr().out
    biases = random_vectors("lora_B.bias", modules_of(model))
    nothing = zero | {key: 0 * value for key, value in biases.items()}
    assert run("--model", model, write_adapter(tmp_path / "b", nothing, lora_bias=True)) == 1
    assert "would change nothing" in capsys.readouterr().out
