"""What went wrong at the door of other servers cannot go wrong here. Each test is named after the
symptom; the report is in its docstring."""

from __future__ import annotations

import dataclasses
import json
import math
import os

import numpy as np
import pytest

from jaxlora.adapters.modules import EMBEDDING, HEAD, AdaptableModule, ModuleTable, ParallelKind
from jaxlora.adapters.placement import cut
from jaxlora.errors import AdapterError
from tests.support.peft_folders import CONFIG, DENSE, random_factors, read, write_adapter


def refused(folder, match: str, **options) -> None:
    with pytest.raises(AdapterError, match=match) as caught:
        read(folder, **options)
    assert "\n" not in str(caught.value)


def test_use_rslora_ignored_so_the_delta_is_too_weak(tmp_path):
    """sgl-project/sglang#40835, vllm-project/vllm#10798"""
    adapter = read(write_adapter(tmp_path, use_rslora=True))
    assert {f.scale for f in adapter.factors.values()} == {6 / math.sqrt(3)}


def test_adapter_of_modules_that_are_not_served_silently_answers_as_the_base(tmp_path):
    """vllm-project/vllm#55193"""
    key = "base_model.model.model.layers.0.mlp.gate.lora_{}.weight"
    tensors = {key.format(side): np.ones((3, 3), np.float32) for side in "AB"}
    refused(write_adapter(tmp_path, tensors, target_modules=["gate"]), "matches no module")


@pytest.mark.parametrize("prefix", ["model.language_model.layers", "language_model.model.layers"])
def test_module_prefix_mismatch_applies_no_module(tmp_path, prefix):
    """vllm-project/vllm#34186, #48019 (text adapter on a multimodal wrapper), #34591"""
    tensors = random_factors(prefix=f"base_model.model.{prefix}")
    assert len(read(write_adapter(tmp_path, tensors)).factors) == 4


def test_unknown_prefix_applies_no_module(tmp_path):
    """vllm-project/vllm#34186"""
    tensors = random_factors(prefix="base_model.model.thinker.model.layers")
    refused(write_adapter(tmp_path, tensors), "matches no module of this base")


def test_adapter_loads_and_output_is_byte_identical_to_the_base(tmp_path):
    """vllm-project/vllm#41754"""
    tensors = {k: v * ("lora_A" in k) for k, v in random_factors().items()}
    refused(write_adapter(tmp_path, tensors), "the delta is zero everywhere")


@pytest.mark.parametrize(
    "name",
    [
        "mlp.experts.lora_A.weight",
        "mlp.experts.base_layer.lora_A.weight",
        "mlp.experts.0.gate_proj.lora_A.weight",
    ],
)
def test_routed_expert_deltas_are_dropped_silently(tmp_path, name):
    """vllm-project/vllm#41384, #52194, sgl-project/sglang#25528, #27381"""
    extra = {f"base_model.model.model.layers.0.{name}": np.ones((8, 6), np.float32)}
    refused(write_adapter(tmp_path, random_factors() | extra), "factors of routed experts")
    refused(
        write_adapter(tmp_path, target_parameters=["mlp.experts.down_proj"]), "target_parameters is"
    )


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.o_proj"])
def test_wrong_output_with_tp_and_right_on_one_gpu(tmp_path, name):
    """vllm-project/vllm#21471, #4676: what the ranks add, together, is the whole delta."""
    kind = {"self_attn.q_proj": ParallelKind.COLUMN, "self_attn.o_proj": ParallelKind.ROW}[name]
    module = AdaptableModule(name, 8, 12, kind)
    modules = ModuleTable(1, (module,), vocab_size=1)
    tensors = {k: np.rint(4 * v) for k, v in random_factors(modules, [name]).items()}  # exact sums
    adapter = read(write_adapter(tmp_path, tensors, target_modules=[name], lora_alpha=3), modules)
    factors = adapter.factors[0, name]
    (whole,), halves = (
        [(b.T @ a) * factors.scale for a, b in cut(factors, module, tp)] for tp in (1, 2)
    )
    axis = 0 if kind is ParallelKind.COLUMN else 1
    np.testing.assert_array_equal(np.concatenate(halves, axis), whole)
    expected = (
        tensors[f"base_model.model.model.layers.0.{name}.lora_B.weight"]
        @ (tensors[f"base_model.model.model.layers.0.{name}.lora_A.weight"])
    )
    np.testing.assert_array_equal(whole, expected)


def test_an_activated_adapter_is_taken_for_plain_lora(tmp_path):
    """Its tensors are plain LoRA's: who does not read the config's key adapts every token."""
    adapter = read(write_adapter(tmp_path, alora_invocation_tokens=[5, 6]))
    assert adapter.first_position([1, 5, 6, 2, 5, 6, 3]) == 4
    assert adapter.first_position([1, 5, 2, 6]) is None


def test_same_name_and_path_with_new_bytes_reuses_the_old_adapters_cache(tmp_path):
    """vllm-project/vllm#30931, #42125"""
    old = read(write_adapter(tmp_path, random_factors(seed=0)))
    new = read(write_adapter(tmp_path, random_factors(seed=1)))
    assert (old.name, old.source) == (new.name, new.source) and old.key != new.key


def test_adapter_changes_under_the_server_when_its_file_does(tmp_path):
    """NovaSky-AI/SkyRL PR#1606: what was read stays what it was."""
    adapter = read(write_adapter(tmp_path, random_factors(seed=0)))
    before = {site: f.a.copy() for site, f in adapter.factors.items()}
    write_adapter(tmp_path, random_factors(seed=1))
    for site, factors in adapter.factors.items():
        np.testing.assert_array_equal(factors.a, before[site])


def test_invalid_adapter_kills_the_engine(tmp_path):
    """vllm-project/vllm#11702, predibase/lorax#14: one typed error, nothing else."""
    (write_adapter(tmp_path) / "adapter_model.safetensors").write_bytes(os.urandom(100))
    refused(tmp_path, "truncated, or not a safetensors file")


def test_bad_path_fails_far_from_its_cause(tmp_path):
    """vllm-project/vllm#30690"""
    refused(tmp_path / "absent", "absent: no such folder")


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_modules_to_save_are_half_applied(tmp_path, name):
    """vllm-project/vllm#9280, #4186, #2816"""
    refused(write_adapter(tmp_path, modules_to_save=[name]), "modules_to_save is")
    extra = {f"base_model.model.model.{name}.weight": np.ones((4, 6), np.float32)}
    refused(write_adapter(tmp_path, random_factors() | extra), name)


def test_trainable_tokens_are_dropped(tmp_path):
    """vllm-project/vllm#36501"""
    key = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    extra = {key: np.array([[2.0] * 6, [1.0] * 6], np.float32)}
    folder = write_adapter(tmp_path, random_factors() | extra, trainable_token_indices=[9, 4])
    rows = read(folder).token_rows[EMBEDDING]
    assert rows.ids == (4, 9)
    np.testing.assert_array_equal(rows.rows, extra[key][::-1])
    refused(write_adapter(tmp_path, random_factors() | extra), "token rows of .*does not name it")
    refused(write_adapter(tmp_path, trainable_token_indices=[1, 2]), "which has no token rows")


def test_copied_added_tokens_json_is_mistaken_for_added_tokens(tmp_path):
    """sgl-project/sglang#17905"""
    plain = read(write_adapter(tmp_path)).key
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<new>": 99999}))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert read(tmp_path).key == plain


def test_rank_over_64_is_not_accepted(tmp_path):
    """vllm-project/vllm#2847"""
    adapter = read(write_adapter(tmp_path, random_factors(rank=512), r=512))
    assert adapter.max_rank == 512


def test_pickled_weights_run_code(tmp_path):
    """NVIDIA/TensorRT-LLM#13391: the file is not even opened, or this would wait for ever."""
    (write_adapter(tmp_path) / "adapter_model.safetensors").unlink()
    os.mkfifo(tmp_path / "adapter_model.bin")
    refused(tmp_path, "a pickle can run code")


def test_an_adapters_files_lead_anywhere_on_the_disk(tmp_path):
    folder = write_adapter(tmp_path)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").symlink_to("/etc/hostname")
    refused(folder, "leads out of the adapter's folder|no such file")


def test_tokens_of_a_tied_embedding_and_head_have_one_set_of_rows(tmp_path):
    """peft saves none of lm_head where the tokens are the same, and drops what the file has."""
    tied = dataclasses.replace(DENSE, tied=True)
    at = "base_model.model.{}.token_adapter.trainable_tokens_delta".format
    rows = {at("model.embed_tokens"): np.ones((2, 6), np.float32)}
    same = {"embed_tokens": [9, 4], "lm_head": [9, 4]}
    adapter = read(
        write_adapter(tmp_path / "a", random_factors() | rows, trainable_token_indices=same), tied
    )
    assert adapter.token_rows[HEAD] is adapter.token_rows[EMBEDDING]
    refused(tmp_path / "a", "names 'lm_head', which has no token rows")
    other = random_factors() | rows | {at("lm_head"): np.zeros((2, 6), np.float32)}
    folder = write_adapter(tmp_path / "b", other, trainable_token_indices=same)
    refused(folder, "lm_head has other token rows", modules=tied)
    apart = {"embed_tokens": [9, 4], "lm_head": [9, 5]}
    folder = write_adapter(tmp_path / "c", other, trainable_token_indices=apart)
    assert read(folder, tied).token_rows[HEAD].ids == (5, 9)
    write_adapter(tmp_path / "c", other, trainable_token_indices=apart, ensure_weight_tying=True)
    refused(folder, "ensure_weight_tying is true and", modules=tied)


def test_the_head_of_a_text_model_inside_another_is_targeted_and_left_out(tmp_path):
    factors = random_factors(prefix="base_model.model.language_model.model.layers")
    target = r"language_model\..*(q_proj|o_proj|lm_head)"
    folder = write_adapter(tmp_path, factors, target_modules=target)
    refused(folder, "targets language_model.lm_head, which has no factors")


@pytest.mark.parametrize(
    "name", ["lora_B.bob.bias", "lora_embedding_A.bob", "lora_magnitude_vector.bob.weight"]
)
def test_a_tensor_of_a_second_adapter_is_called_something_else(tmp_path, name):
    extra = {f"base_model.model.model.layers.0.self_attn.q_proj.{name}": np.ones(7, np.float32)}
    refused(write_adapter(tmp_path, random_factors() | extra), "of a named adapter")


@pytest.mark.parametrize("option", ["trainable_token_indices", "alora_invocation_tokens"])
def test_a_token_id_of_thousands_of_digits_fills_the_log(tmp_path, option):
    key = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    rows = {key: np.ones((1, 6), np.float32)} if option.startswith("trainable") else {}
    folder = write_adapter(tmp_path, random_factors() | rows, CONFIG | {option: [10**4000]})
    refused(folder, r"has token 10+\.\.\.; this base has tokens 0 to 99")
