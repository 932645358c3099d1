"""Every mistake at the start, through the real command line: exit status 2, one line, no weights.

The model's folder has no weights at all, so a test that gets its own message also shows that the
mistake was found before any weight was read.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxlora.adapters.modules import ModuleTable
from jaxlora.config import ModelConfig
from jaxlora.models import build
from serving.server import main
from tests.support.peft_folders import random_factors, safetensors_bytes, write_adapter
from tests.support.tiny_models import TINY_QWEN3, write_byte_tokenizer, write_checkpoint


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> ModuleTable:
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps(TINY_QWEN3))
    return build(ModelConfig.from_folder(folder), 1, np.float32).modules


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "config.json").write_text(json.dumps(TINY_QWEN3))
    write_checkpoint(folder)
    return (folder / "model.safetensors").read_bytes()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """config.json and tokenizer.json, and no weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_QWEN3))
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture
def adapter(tmp_path: Path, modules: ModuleTable) -> Path:
    return write_adapter(tmp_path / "adapter", random_factors(modules))


@pytest.fixture
def refused(model: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Start the server with the model and more arguments; the one line it ends with."""

    def start(*arguments: object) -> str:
        line = ["--model", str(model), "--port", "0", *map(str, arguments)]
        try:
            status = main(line)
        except SystemExit as stopped:  # argparse
            status = stopped.code
        captured = capfd.readouterr()
        assert status == 2
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1 and captured.err.endswith("\n")
        assert captured.err[:-1].isprintable()
        return captured.err[len("error: ") : -1]

    return start


def test_no_model_folder(refused, model):
    shutil.rmtree(model)
    assert refused() == f"{model / 'config.json'}: cannot be read: No such file or directory"


def test_missing_weights(refused, model):
    message = refused()
    assert message == f"{model / 'model.safetensors'}: cannot be read: No such file or directory"


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_truncated_weights(refused, model, checkpoint, share):
    file = model / "model.safetensors"
    file.write_bytes(checkpoint[: int(len(checkpoint) * share)])
    message = refused()
    assert message.startswith(f"{file}: ")
    assert "truncated" in message


def test_weights_of_another_width_name_the_tensor(refused, model, checkpoint):
    (model / "model.safetensors").write_bytes(checkpoint)
    (model / "config.json").write_text(json.dumps(TINY_QWEN3 | {"intermediate_size": 96}))
    message = refused()
    assert "mlp.gate_proj.weight" in message or "mlp.down_proj.weight" in message
    assert str(model / "model.safetensors") in message and "96" in message


def test_an_index_that_names_a_missing_file(refused, model):
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "part-1.safetensors"}}))
    assert refused() == f"{index}: names part-1.safetensors, which is not in the folder"


def test_a_missing_tokenizer(refused, model):
    (model / "tokenizer.json").unlink()
    assert refused().startswith(f"{model / 'tokenizer.json'}: no such file")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}', "\x00"])
def test_a_broken_tokenizer(refused, model, content):
    (model / "tokenizer.json").write_text(content)
    assert refused().startswith(f"{model / 'tokenizer.json'}: not a tokenizer: ")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "\x00", '{"x": ' + "[" * 100_000])
def test_a_broken_file_beside_the_config(refused, model, name, content):
    (model / name).write_text(content)
    assert refused().startswith(f"{model / name}: ")


CONFIG = json.dumps(TINY_QWEN3)
DEEP = "[" * 100_000 + "]" * 100_000
CONFIGS: dict[str, tuple[str | bytes, str]] = {
    "unknown family": (CONFIG.replace("qwen3", "mamba"), "model_type: 'mamba' is not served"),
    "no family": (CONFIG.replace("model_type", "kind"), "model_type: is missing"),
    "empty": ("", "is not JSON"),
    "binary": (b"\xff\xfe\x00", "is not JSON"),
    "a list": ("[1]", "wants a JSON object"),
    "half of it": (CONFIG[: len(CONFIG) // 2], "is not JSON"),
    "a key twice": (CONFIG[:-1] + ', "hidden_size": 64}', "hidden_size is given twice"),
    "an odd key twice": (CONFIG[:-1] + ', "a\\n\\u2028": 1, "a\\n\\u2028": 2}', "given twice"),
    "digits": (CONFIG.replace("48", "4" * 5000), "is not JSON"),
    "fewer digits": (CONFIG.replace("48", "4" * 4000), "hidden_size: wants a positive integer"),
    "end of thousands of digits": (CONFIG.replace("258", "4" * 4000), "eos_token_id: wants"),
    "ends without end": (
        CONFIG.replace("258", str(list(range(99)))),
        "eos_token_id: 99 ids",
    ),
    "deep": (CONFIG[:-1] + f', "x": {DEEP}}}', "nested too deep"),
    "deep in place": (CONFIG.replace('"qwen3"', DEEP), "nested too deep"),
    "not finite": (CONFIG.replace("1e-06", "NaN"), "rms_norm_eps: wants a finite number"),
    "infinite": (CONFIG.replace("1e-06", "1e999"), "rms_norm_eps: wants a finite number"),
    "a line break": (CONFIG.replace("silu", "a\\nb\\u001b[31m"), "hidden_act"),
    "negative": (CONFIG.replace("48", "-48"), "hidden_size: wants a positive integer"),
    "text for a number": (CONFIG.replace("48", '"48"'), "hidden_size: wants a positive integer"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_malformed_config(refused, model, case):
    content, words = CONFIGS[case]
    content = content.encode() if isinstance(content, str) else content
    (model / "config.json").write_bytes(content)
    message = refused()
    assert message.startswith(f"{model / 'config.json'}: ")
    assert words in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--tp 3", "--tp 3 does not divide num_attention_heads 4"),
        ("--tp 4", "--tp 4 does not divide num_key_value_heads 2"),
        ("--max-model-len 1", "--max-model-len 1 is not between 2 and 128"),
        ("--max-model-len 129", "--max-model-len 129 is not between 2 and 128"),
        ("--max-model-len many", "--max-model-len"),
        ("--kv-memory 4095", "raise --kv-memory to at least"),
        ("--kv-memory 1", "the KV pool holds 0 tokens, one sequence may have 128"),
        ("--kernel-backend cuda", "--kernel-backend 'cuda' is none of: xla, triton"),
        ("--kernel-backend triton", "--kernel-backend triton needs a GPU"),
        ("--max-num-seqs 99999999999", "--max-num-seqs must be at most 65536"),
        ("--adapter-slots 99999999999", "--adapter-slots must be at most 65536"),
        ("--max-adapter-rank 99999999999", "--max-adapter-rank must be at most 65536"),
    ],
)
def test_an_option_that_can_not_be(refused, line, words):
    assert words in refused(*line.split())


def test_a_kv_pool_beyond_the_memory(refused, model, checkpoint):
    (model / "model.safetensors").write_bytes(checkpoint)
    message = refused("--kv-memory", "1000T")
    assert message == "the device's memory does not hold the KV pool: lower --kv-memory"


def test_more_ranks_than_devices(refused, model):
    heads = {"num_attention_heads": 64, "num_key_value_heads": 64, "intermediate_size": 128}
    (model / "config.json").write_text(json.dumps(TINY_QWEN3 | heads))
    assert refused("--tp", 64).startswith("--tp 64: ")


def test_more_ranks_than_xla_flags_made(model, tmp_path):
    line = [sys.executable, "-m", "serving.server", "--model", model, "--port", "0", "--tp", "2"]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        line, cwd=ROOT, env=os.environ | flags, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 2
    assert ended.stderr == "error: --tp 2: this machine has 1 cpu device(s)\n"
    assert ended.stdout == ""


def test_names_given_twice(refused, adapter):
    twice = ("--adapter", f"a={adapter}", "--adapter", f"a={adapter}")
    assert "'a'" in refused(*twice)
    assert "'model'" in refused("--adapter", f"model={adapter}")
    assert "'b'" in refused("--adapter", f"b={adapter}", "--alias", "b")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--adapter-memory 4K", "--adapter-memory gives 4096"),
        ("--max-adapter-rank 2", "over --max-adapter-rank 2"),
        ("--adapter-strength a=0", "strength 0.0"),
        ("--adapter-strength a=1e300", "a scale of"),
    ],
)
def test_an_option_that_does_not_hold_the_adapter(refused, adapter, line, words):
    assert words in refused("--adapter", f"a={adapter}", *line.split())


def test_fewer_slots_than_adapters(refused, tmp_path, modules):
    folders = [
        write_adapter(tmp_path / name, random_factors(modules, seed=i))
        for i, name in enumerate("ab")
    ]
    given = [option for f in folders for option in ("--adapter", f"{f.name}={f}")]
    message = refused(*given, "--adapter-slots", 1)
    assert message == "2 adapters were given, --adapter-slots is 1"


def test_an_adapter_pool_beyond_the_memory(refused, model, adapter, checkpoint):
    (model / "model.safetensors").write_bytes(checkpoint)
    message = refused("--adapter", f"a={adapter}", "--adapter-memory", "1000T")
    assert "does not hold the adapters: lower --adapter-memory" in message


def other_widths(modules: ModuleTable) -> tuple[dict, dict]:
    tensors = random_factors(modules)
    key = next(key for key in tensors if "q_proj.lora_A" in key)
    return tensors | {key: np.ones((3, 56), np.float32)}, {}


def other_modules(modules: ModuleTable) -> tuple[dict, dict]:
    tensors = random_factors(modules)
    return {key.replace("q_proj", "query"): t for key, t in tensors.items()}, {
        "target_modules": ["query", "o_proj"]
    }


def another_layer(modules: ModuleTable) -> tuple[dict, dict]:
    tensors = random_factors(modules)
    return tensors | {key.replace("layers.1", "layers.2"): t for key, t in tensors.items()}, {}


def a_tensor_of_nothing(modules: ModuleTable) -> tuple[dict, dict]:
    stray = {"base_model.model.model.layers.0.self_attn.q_proj.magnitude": np.ones(3, np.float32)}
    return random_factors(modules) | stray, {}


def no_b(modules: ModuleTable) -> tuple[dict, dict]:
    tensors = random_factors(modules)
    return {k: t for k, t in tensors.items() if "layers.1.self_attn.o_proj.lora_B" not in k}, {}


def not_finite(modules: ModuleTable) -> tuple[dict, dict]:
    tensors = random_factors(modules)
    key = next(iter(tensors))
    tensors[key][0, 0] = np.inf
    return tensors, {}


WEIGHTS_MISTAKES = {
    other_widths: "takes 56 features to 64; this base's takes 48 to 64",
    other_modules: "query",
    another_layer: "layers.2",
    a_tensor_of_nothing: "magnitude",
    no_b: "layers.1.self_attn.o_proj has lora_A and no lora_B",
    not_finite: "not finite",
}


@pytest.mark.parametrize("wrong", WEIGHTS_MISTAKES, ids=lambda wrong: wrong.__name__)
def test_an_adapter_whose_tensors_do_not_fit(refused, tmp_path, modules, wrong):
    tensors, config = wrong(modules)
    folder = write_adapter(tmp_path / "wrong", tensors, **config)
    message = refused("--adapter", f"a={folder}")
    assert message.startswith(str(folder))
    assert WEIGHTS_MISTAKES[wrong] in message


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_adapter(refused, adapter, modules, share):
    data = safetensors_bytes(random_factors(modules))
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(data[: int(len(data) * share)])
    assert refused("--adapter", f"a={adapter}").startswith(f"{file}: ")


def test_an_adapter_without_a_file(refused, adapter):
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (adapter / name).unlink()
        assert refused("--adapter", f"a={adapter}") == f"{adapter / name}: no such file"
    shutil.rmtree(adapter)
    assert refused("--adapter", f"a={adapter}") == f"{adapter}: no such folder"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"r": 3', '"r": 3, "use_magic": true', "use_magic"),
        ('"lora_alpha": 6', '"lora_alpha": NaN', "lora_alpha"),
        ('"lora_alpha": 6', '"lora_alpha": 1e999', "lora_alpha"),
        ('"r": 3', '"r": 3, "r": 4', "'r' is given twice"),
        ('"r": 3', '"r": ' + "3" * 5000, "not valid JSON"),
        ('"r": 3', f'"r": {DEEP}', "nested too deep"),
        ('"r": 3', '"r": 4', "rank 3 in A"),
        ('"r": 3', '"r": 3, "use_dora": true', "use_dora"),
        ('"LORA"', '"IA3"', "IA3"),
    ],
)
def test_an_adapter_config_that_can_not_be(refused, adapter, old, new, words):
    file = adapter / "adapter_config.json"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    message = refused("--adapter", f"a={adapter}")
    assert message.startswith(str(adapter))
    assert words in message


def test_another_bases_name_alone_only_warns(refused, model, tmp_path, modules, caplog):
    """The start gets as far as the weights, which are missing."""
    tensors = random_factors(modules)
    folder = write_adapter(tmp_path / "a", tensors, base_model_name_or_path="org/other-7b")
    assert refused("--adapter", f"a={folder}").startswith(str(model / "model.safetensors"))
    (warning,) = caplog.messages
    assert "org/other-7b" in warning and str(folder / "adapter_config.json") in warning
