"""Every row of the support table has an adapter here that uses it, and the table's docs are it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxlora.adapters import support
from jaxlora.adapters.modules import EMBEDDING, HEAD
from jaxlora.adapters.support_rows import Action, Place, Row
from jaxlora.errors import AdapterError
from tests.support.peft_folders import (
    FINGERPRINT,
    VOCAB_SIZE,
    random_factors,
    random_vectors,
    read,
    write_adapter,
)


DOCS = Path(__file__).parents[2] / "docs" / "adapters.md"

# A row's id -> changes to a good config that use the row. What is refused is refused for the row's
# reason; what is not reads, to the same key where it says "ignored".
CONFIG_CASES: dict[str, dict[str, Any]] = {
    'peft_type = "LORA"': {"peft_type": "LORA"},
    "peft_type = any other": {"peft_type": "LOHA"},
    'task_type = null, "CAUSAL_LM", "FEATURE_EXTRACTION"': {"task_type": "FEATURE_EXTRACTION"},
    "task_type = any other": {"task_type": "SEQ_CLS"},
    "r = integer": {"r": 3},
    "lora_alpha = number": {"lora_alpha": 6.5},
    "use_rslora = true, false": {"use_rslora": True},
    "rank_pattern = object": {"r": 9, "rank_pattern": {"[qo]_proj": 3}},
    "alpha_pattern = object": {"alpha_pattern": {"q_proj": 1}},
    'target_modules = list, regex, "all-linear"': {"target_modules": r".*\.[qo]_proj"},
    "target_modules = null": {"target_modules": None},
    "exclude_modules = list, regex": {
        "target_modules": ["q_proj", "o_proj", "v_proj"],
        "exclude_modules": ["v_proj"],
    },
    "layers_to_transform = integer, list": {"layers_to_transform": [0, 1]},
    "layers_pattern = string, list": {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
    "base_model_name_or_path = string": {"base_model_name_or_path": "other/base"},
    "auto_mapping = object": {"auto_mapping": {"unsloth_fixed": True}},
    "peft_version = string": {"peft_version": "0.21.2"},
    "revision = string": {"revision": "main"},
    "inference_mode = true, false": {"inference_mode": True},
    "runtime_config = object": {"runtime_config": {"ephemeral_gpu_offload": False}},
    "lora_dropout = number": {"lora_dropout": 0.05},
    "fan_in_fan_out = true, false": {"fan_in_fan_out": True},
    "megatron_config = object": {"megatron_config": {"a": 1}},
    "megatron_core = string": {"megatron_core": "megatron.core"},
    "ensure_weight_tying = true, false": {"ensure_weight_tying": True},
    "qalora_group_size = integer": {"qalora_group_size": 16},
    "loftq_config = object": {"loftq_config": {"loftq_bits": 4}},
    "eva_config = object": {"eva_config": {"rho": 2.0}},
    "corda_config = object": {"corda_config": {"corda_method": "kpm"}},
    "lora_ga_config = object": {"lora_ga_config": {"direction": "ArB2r"}},
    "velora_config = object": {"velora_config": {"num_groups": 2}},
    'init_lora_weights = null, true, false, "gaussian", "eva", "orthogonal", "mica"': {
        "init_lora_weights": "gaussian"
    },
    'init_lora_weights = "pissa", "pissa_niter_N"': {"init_lora_weights": "pissa_niter_16"},
    'init_lora_weights = "olora"': {"init_lora_weights": "OLoRA"},
    'init_lora_weights = "corda"': {"init_lora_weights": "corda"},
    'init_lora_weights = "lora_ga"': {"init_lora_weights": "lora_ga"},
    'init_lora_weights = "loftq"': {"init_lora_weights": "loftq"},
    'bias = "none"': {"bias": "none"},
    'bias = "all", "lora_only"': {"bias": "lora_only"},
    "modules_to_save = null, []": {"modules_to_save": []},
    "modules_to_save = list": {"modules_to_save": ["lm_head"]},
    "use_dora = true, false": {"use_dora": True},
    "lora_bias = true, false": {"lora_bias": True},
    "trainable_token_indices = null": {"trainable_token_indices": None},
    "trainable_token_indices = list of token ids, object of such lists": {
        "trainable_token_indices": {"embed_tokens": [2, 1]}
    },
    "target_parameters = null, []": {"target_parameters": []},
    "target_parameters = list": {"target_parameters": ["mlp.experts.gate_up_proj"]},
    "layer_replication = null, []": {"layer_replication": None},
    "layer_replication = list": {"layer_replication": [[0, 2], [1, 2]]},
    "alora_invocation_tokens = null": {"alora_invocation_tokens": None},
    "alora_invocation_tokens = list of token ids": {"alora_invocation_tokens": [5, 6]},
    "use_qalora = null, false": {"use_qalora": False},
    "use_qalora = true": {"use_qalora": True},
    "use_bdlora = null, false": {"use_bdlora": None},
    "use_bdlora = object": {"use_bdlora": {"nblocks": 2}},
    "arrow_config = null": {"arrow_config": None},
    "arrow_config = object": {"arrow_config": {"top_k": 3}},
    "kasa_config = null": {"kasa_config": None},
    "kasa_config = object": {"kasa_config": {"beta": 1e-4}},
    "monteclora_config = null": {"monteclora_config": None},
    "monteclora_config = object": {"monteclora_config": {"num_samples": 8}},
}

_Q = "base_model.model.model.layers.0.self_attn.q_proj"
_BIASED = "self_attn.q_proj"  # o_proj has none
_EMBEDDING = "base_model.model.model.embed_tokens"
_ROWS = {f"{_EMBEDDING}.token_adapter.trainable_tokens_delta": np.ones((2, 6), np.float32)}
# The tensors beside the factors that an option of the config means.
TENSORS_OF: dict[str, dict[str, np.ndarray]] = {
    "bias": random_vectors("base_layer.bias", names=[_BIASED]),
    "use_dora": random_vectors("lora_magnitude_vector"),
    "lora_bias": random_vectors("lora_B.bias"),
    "trainable_token_indices": _ROWS,
}

# A row's id -> keys of tensors that it covers.
TENSOR_CASES: dict[str, list[str]] = {
    "...trainable_tokens_...": [f"{_EMBEDDING}.trainable_tokens_delta"],
    "...lora_diag": [f"{_Q}.lora_diag"],
    "...lora_velora_embed": [f"{_Q}.lora_velora_embed"],
    "...experts...lora_A": [
        "base_model.model.model.layers.0.mlp.experts.lora_A.weight",
        "base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight",
        "base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight",
    ],
    "MODULE.lora_A.NAME.weight": [f"{_Q}.lora_A.other.weight"],
    "MODULE.lora_a, MODULE.lora_b": ["model.layers.0.self_attn.q_proj.lora_a"],
    "...lora_down.weight, ...lora_up.weight": ["lora_unet_mid_q.lora_down.weight"],
    "...weight": [
        "base_model.model.score.weight",
        "base_model.model.lm_head.weight",
        f"{_Q}.modules_to_save.default.weight",
    ],
}

# A row's id -> for each of its spellings (what the config says beside, tensors beside factors of q
# and o). Without these tensors the config alone is refused.
APPLIED_TENSORS: dict[str, list[tuple[dict[str, Any], dict[str, np.ndarray]]]] = {
    "MODULE.lora_A.weight, MODULE.lora_B.weight": [
        ({"target_modules": ["q_proj", "o_proj", name]}, random_factors(names=[module]))
        for name, module in (("up_proj", "mlp.up_proj"), ("lm_head", HEAD))
    ],
    "MODULE.lora_embedding_A, MODULE.lora_embedding_B": [
        (
            {"target_modules": ["q_proj", "o_proj", "embed_tokens"]},
            {f"{k}{end}": v for k, v in random_factors(names=[EMBEDDING]).items()},
        )
        for end in ("", ".default")
    ],
    "MODULE.token_adapter.trainable_tokens_delta": [
        ({"trainable_token_indices": [3, 1]}, {f"{k}{end}": v for k, v in _ROWS.items()})
        for end in ("", ".default")
    ],
    "MODULE.lora_magnitude_vector": [
        ({"use_dora": True}, random_vectors(f"lora_magnitude_vector{end}"))
        for end in ("", ".weight", ".default", ".default.weight")
    ],
    "MODULE.lora_B.bias": [
        ({"lora_bias": True}, random_vectors(f"lora_B{name}.bias")) for name in ("", ".default")
    ],
    "MODULE.bias, MODULE.base_layer.bias": [
        ({"bias": "lora_only"}, random_vectors("base_layer.bias", names=[_BIASED])),
        ({"bias": "lora_only"}, random_vectors("bias", names=[_BIASED])),
    ],
}
# Of a row that is checked: the file's tensors, which don't change the key.
CHECKED_TENSORS: dict[str, dict[str, np.ndarray]] = {
    "embed_tokens.base_layer.weight, lm_head.base_layer.weight": {
        f"base_model.model.{name}.base_layer.weight": np.ones((VOCAB_SIZE, 6), np.float32)
        for name in (EMBEDDING, HEAD)
    },
}


def _only_other_weights(folder: Path, name: str) -> None:
    (write_adapter(folder) / "adapter_model.safetensors").rename(folder / name)


def _manifest(folder: Path, name: str) -> None:
    (write_adapter(folder) / name).write_text('{"base": {"fingerprint": "%s"}}' % ("0" * 64))


def _without(folder: Path, name: str) -> None:
    (write_adapter(folder) / name).unlink()


def _beside(folder: Path, name: str) -> None:
    for other in ("added_tokens.json", "README.md", "adapter_model.bin", "adapters.safetensors"):
        (write_adapter(folder) / other).write_text("not read")


# A row's id -> (makes a folder to be refused, or None where it reads, part of the reason).
FILE_CASES: dict[str, tuple[Callable[[Path, str], None], str | None]] = {
    "adapter_config.json": (_without, "no such file"),
    "adapter_model.safetensors": (_without, "no such file"),
    "jaxlora_adapter.json": (_manifest, "made for a base of fingerprint 000"),
    "tensorfold_adapter.json": (_manifest, "made for a base of fingerprint 000"),
    "adapter_model.bin": (_only_other_weights, "a pickle can run code"),
    "adapters.safetensors": (_only_other_weights, "an MLX adapter"),
    "any other file": (_beside, None),
}


def rows(place: Place) -> list[Row]:
    return [row for row in support.ROWS if row.place is place]


def ids(row: Row) -> str:
    return row.id


def test_the_cases_are_the_rows():
    tensors = {**TENSOR_CASES, **APPLIED_TENSORS, **CHECKED_TENSORS}
    cases = {Place.CONFIG: CONFIG_CASES, Place.TENSOR: tensors, Place.FILE: FILE_CASES}
    for place, expected in cases.items():
        assert {row.id for row in rows(place)} == set(expected)
    assert len({row.id for row in support.ROWS}) == len(support.ROWS)


@pytest.mark.parametrize("row_id", CONFIG_CASES)
def test_a_config_option_is_applied_or_refused_as_its_row_says(tmp_path, row_id):
    row = next(row for row in rows(Place.CONFIG) if row.id == row_id)
    options = CONFIG_CASES[row_id]
    beside = TENSORS_OF.get(row.name, {}) if row.action is Action.APPLIED else {}
    folder = write_adapter(tmp_path, random_factors() | beside, **options)
    if row.action is Action.REFUSED:
        with pytest.raises(AdapterError) as caught:
            read(folder)
        assert f"{folder / 'adapter_config.json'}: {row.name} is " in str(caught.value)
        assert row.reason in str(caught.value)
    else:
        key = read(folder).key
        if row.action is not Action.APPLIED:
            assert key == read(write_adapter(tmp_path)).key


@pytest.mark.parametrize("name", ["lora_alpha", "use_rslora", "alpha_pattern"])
def test_what_scales_the_delta_changes_the_key(tmp_path, name):
    (row_id,) = (row.id for row in rows(Place.CONFIG) if row.name == name)
    plain = read(write_adapter(tmp_path / "a")).key
    assert read(write_adapter(tmp_path / "b", **CONFIG_CASES[row_id])).key != plain


@pytest.mark.parametrize("name", sorted({row.name for row in rows(Place.CONFIG)}))
@pytest.mark.parametrize("wrong", [[[1.5]], 1.5, {"x": [None]}], ids=str)
def test_an_option_of_the_wrong_type_is_refused(tmp_path, name, wrong):
    numbers = {"lora_alpha", "lora_dropout"}
    objects = {"auto_mapping", "runtime_config", "megatron_config", "loftq_config", "eva_config"}
    objects |= {"corda_config", "lora_ga_config", "velora_config"}
    folder = write_adapter(tmp_path, **{name: wrong})
    if name in (numbers if isinstance(wrong, float) else objects if wrong == {"x": [None]} else ()):
        assert read(folder)
    else:
        with pytest.raises(AdapterError, match=name) as caught:
            read(folder)
        assert "\n" not in str(caught.value)


def _is_used(row_id: str, name: str) -> bool:
    return row_id.startswith(f"{name} = ") and CONFIG_CASES[row_id][name] not in (None, "none")


@pytest.mark.parametrize("name", TENSORS_OF)
def test_an_option_without_its_tensors_or_tensors_without_their_option_are_refused(tmp_path, name):
    options = next(options for row, options in CONFIG_CASES.items() if _is_used(row, name))
    with pytest.raises(AdapterError, match=name):
        read(write_adapter(tmp_path, **options))
    with pytest.raises(AdapterError, match=name):
        read(write_adapter(tmp_path, random_factors() | TENSORS_OF[name]))


@pytest.mark.parametrize("row_id", APPLIED_TENSORS)
def test_a_tensor_is_applied_alike_in_every_spelling(tmp_path, row_id):
    (row,) = (row for row in rows(Place.TENSOR) if row.id == row_id)
    assert row.action is Action.APPLIED
    plain, keys = read(write_adapter(tmp_path)).key, []
    for config, tensors in APPLIED_TENSORS[row_id]:
        with pytest.raises(AdapterError):
            read(write_adapter(tmp_path, **config))
        assert all(support.tensor_row(key) is row for key in tensors)
        keys.append(read(write_adapter(tmp_path, random_factors() | tensors, **config)).key)
        changed = {key: value * np.float32(1.5) for key, value in tensors.items()}
        folder = write_adapter(tmp_path, random_factors() | changed, **config)
        assert read(folder).key not in (plain, keys[-1])
    assert plain not in keys
    if row_id != "MODULE.lora_A.weight, MODULE.lora_B.weight":  # there it is two modules
        assert len(set(keys)) == 1


@pytest.mark.parametrize("row_id", CHECKED_TENSORS)
def test_a_copy_of_the_bases_weights_is_kept_for_the_check_and_is_not_in_the_key(tmp_path, row_id):
    (row,) = (row for row in rows(Place.TENSOR) if row.id == row_id)
    assert row.action is Action.CHECKED
    plain = read(write_adapter(tmp_path))
    for key, copy in CHECKED_TENSORS[row_id].items():
        adapter = read(write_adapter(tmp_path, random_factors() | {key: copy}))
        assert adapter.key == plain.key and len(adapter.base_copies) == 1
        folder = write_adapter(tmp_path, random_factors() | {key: copy[:-1]})
        with pytest.raises(AdapterError, match="its vocabulary was resized"):
            read(folder)


@pytest.mark.parametrize("row_id", TENSOR_CASES)
def test_a_tensor_is_applied_or_refused_as_its_row_says(tmp_path, row_id):
    row = next(row for row in rows(Place.TENSOR) if row.id == row_id)
    for key in TENSOR_CASES[row_id]:
        folder = write_adapter(tmp_path, random_factors() | {key: np.ones((3, 6), np.float32)})
        if row.action is Action.REFUSED:
            with pytest.raises(AdapterError) as caught:
                read(folder)
            assert repr(key) in str(caught.value) and row.reason in str(caught.value)
        else:
            assert read(folder).key == read(write_adapter(tmp_path / "plain")).key


@pytest.mark.parametrize("row_id", FILE_CASES)
def test_a_file_is_read_or_refused_as_its_row_says(tmp_path, row_id):
    make, reason = FILE_CASES[row_id]
    make(tmp_path, row_id)
    if reason is None:
        assert read(tmp_path, base_fingerprint=FINGERPRINT)
    else:
        with pytest.raises(AdapterError) as caught:
            read(tmp_path)
        assert str(tmp_path / row_id) in str(caught.value) and reason in str(caught.value)


@pytest.mark.parametrize("value", [True, 0, 1, 0.5, "x", [0], {"a": None}])
def test_an_unknown_option_that_is_set_is_refused_by_name(tmp_path, value):
    with pytest.raises(AdapterError, match="use_newlora is .*: unknown option"):
        read(write_adapter(tmp_path, use_newlora=value))


@pytest.mark.parametrize("value", [None, False, [], {}])
def test_an_unknown_option_that_is_not_set_is_passed_over(tmp_path, value):
    assert read(write_adapter(tmp_path, use_newlora=value))


def test_every_problem_of_a_config_is_named_at_once(tmp_path):
    problems = {"modules_to_save": ["lm_head"], "use_qalora": True, "x": 1}
    with pytest.raises(AdapterError, match="modules_to_save is .*; use_qalora is True.*; x is 1.*"):
        read(write_adapter(tmp_path, **problems))


@pytest.mark.parametrize("key", [f"{_Q}.lora_E", f"{_Q}.hada_w1_a", "x", "", "a\nb", "x" * 10_000])
def test_a_tensor_of_an_unknown_kind_is_refused(tmp_path, key):
    folder = write_adapter(tmp_path, random_factors() | {key: np.ones((3, 6), np.float32)})
    with pytest.raises(AdapterError, match="unknown kind of tensor"):
        read(folder)


def test_the_docs_hold_the_table():
    begin, end = "<!-- support table -->\n", "<!-- end of the support table -->"
    text = DOCS.read_text(encoding="utf-8")
    table = text.partition(begin)[2].partition(end)[0]
    assert table == support.markdown(), "run: python -m jaxlora.adapters.support"
