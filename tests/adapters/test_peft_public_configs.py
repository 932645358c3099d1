"""Forty public adapter_config.json files: each reads to the right scale and modules, or is refused
for the right reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from jaxlora.adapters.modules import HEAD, ModuleTable
from jaxlora.errors import AdapterError
from tests.support.peft_folders import (
    ATTENTION,
    DENSE,
    MLP,
    random_factors,
    read,
    table,
    write_adapter,
)


CONFIGS = Path(__file__).parents[1] / "data" / "adapter_configs"

# Bases of families that these adapters are for, two layers each.
GPT2 = table("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", prefix="transformer.h")
PHI = table("mixer.Wqkv", "mixer.out_proj", "mlp.fc1", "mlp.fc2", prefix="transformer.h")
GLM = table(
    "self_attention.query_key_value",
    "self_attention.dense",
    "mlp.dense_h_to_4h",
    "mlp.dense_4h_to_h",
    prefix="transformer.encoder.layers",
)
NEOX = table("attention.query_key_value", "attention.dense", prefix="gpt_neox.layers")
BAICHUAN = table("self_attn.W_pack", "self_attn.o_proj")
ENCODER = table("attention.self.query", "attention.self.value", prefix="encoder.layer")


def names_of(base: ModuleTable) -> tuple[str, ...]:
    return tuple(module.name for module in base.modules)


@dataclasses.dataclass(frozen=True)
class Reads:
    rank: int
    scale: float
    names: tuple[str, ...]
    base: ModuleTable = DENSE
    prefix: str | None = None  # of the layers, where it is not the base's own


@dataclasses.dataclass(frozen=True)
class Refused:
    reason: str
    base: ModuleTable = DENSE
    names: tuple[str, ...] = ATTENTION


ALL = (*ATTENTION, *MLP)
QKV, QV = ATTENTION[:3], (ATTENTION[0], ATTENTION[2])
MULTIMODAL = "base_model.model.model.language_model.layers"
OTHER_TASK = "trained with a head or an encoder that is not served"

EXPECTED: dict[int, Reads | Refused] = {
    1: Reads(16, 1.0, ATTENTION),
    2: Reads(32, 0.5, ALL),
    3: Reads(16, 1.0, (*ALL, HEAD)),
    4: Reads(64, 0.25, ALL),
    5: Reads(16, 1.0, names_of(PHI), PHI),
    6: Reads(8, 2.0, names_of(GLM), GLM),
    7: Reads(16, 4.0, ("attn.c_attn", "attn.c_proj", "mlp.c_proj"), GPT2),
    9: Refused(OTHER_TASK, GPT2, ("attn.c_attn", "attn.c_proj")),
    13: Refused("modules_to_save is ['classifier', 'score']", ENCODER, names_of(ENCODER)),
    14: Reads(1, 32.0, ("attention.query_key_value",), NEOX),
    15: Reads(256, 2.0, ALL),
    17: Reads(16, 1.0, ALL),
    20: Reads(32, 1.0, ALL),
    23: Reads(32, 2.0, ALL, prefix=MULTIMODAL),
    25: Reads(16, 2.0, ALL, prefix=MULTIMODAL),
    26: Reads(16, 2.0, ALL),
    27: Reads(4, 4.0, ATTENTION),
    28: Reads(4, 1.0, QV),
    32: Refused(OTHER_TASK),
    33: Reads(8, 4.0, ("self_attn.W_pack",), BAICHUAN),
    34: Reads(8, 2.0, ATTENTION),
    35: Reads(8, 2.0, QKV),
    36: Reads(8, 4.0, ("attention.query_key_value",), NEOX),
    37: Reads(16, 2.0, ALL),
    38: Reads(16, 2.0, ATTENTION),
    39: Reads(64, 0.25, ATTENTION),
    41: Reads(64, 2.0, ALL),
    42: Reads(64, 0.25, ALL),
    43: Refused("no peft_type: not the config of a PEFT adapter"),
    44: Refused("an MLX adapter"),
    45: Refused("an MLX adapter"),
    47: Refused("an MLX adapter"),
    49: Refused("target_modules is None: peft would guess"),
    50: Refused("use_bdlora is {", names=MLP),
    52: Refused("target_modules is None: peft would guess"),
    55: Reads(8, 2.0, QV),
    56: Reads(32, 1.0, ALL, prefix=MULTIMODAL),
    58: Reads(64, 0.25, ALL),
    59: Reads(8, 2.0, ATTENTION),
    60: Refused("modules_to_save is ['classifier', 'score']", ENCODER, names_of(ENCODER)),
}


def config_bytes(number: int) -> bytes:
    return (CONFIGS / f"config_{number:02}.json").read_bytes()


def test_every_file_is_in_the_table():
    assert {file.name for file in CONFIGS.iterdir()} == {f"config_{n:02}.json" for n in EXPECTED}


@pytest.mark.parametrize("number", [n for n, e in EXPECTED.items() if isinstance(e, Reads)])
def test_it_reads_to_the_right_modules_ranks_and_scales(tmp_path, number):
    expected = EXPECTED[number]
    assert isinstance(expected, Reads)
    prefix = expected.prefix or f"base_model.model.{expected.base.layer_prefix}"
    tensors = random_factors(expected.base, expected.names, rank=expected.rank, prefix=prefix)
    adapter = read(write_adapter(tmp_path, tensors, config_bytes(number)), expected.base)
    assert {name for _, name in adapter.factors} == set(expected.names)
    outer = expected.names.count(HEAD)
    inner = len(expected.names) - outer
    assert len(adapter.factors) == inner * expected.base.num_layers + outer
    assert {(f.rank, f.scale) for f in adapter.factors.values()} == {
        (expected.rank, expected.scale)
    }


@pytest.mark.parametrize("number", [n for n, e in EXPECTED.items() if isinstance(e, Refused)])
def test_it_is_refused_for_the_right_reason(tmp_path, number):
    expected = EXPECTED[number]
    assert isinstance(expected, Refused)
    tensors = random_factors(expected.base, expected.names, rank=8)
    folder = write_adapter(tmp_path, tensors, config_bytes(number))
    with pytest.raises(AdapterError) as caught:
        read(folder, expected.base)
    assert expected.reason in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [5, 6, 7, 14, 33, 36])
def test_an_adapter_of_another_family_does_not_read_on_this_base(tmp_path, number):
    expected = EXPECTED[number]
    assert isinstance(expected, Reads)
    prefix = f"base_model.model.{expected.base.layer_prefix}"
    tensors = random_factors(expected.base, expected.names, rank=expected.rank, prefix=prefix)
    with pytest.raises(AdapterError, match="matches no module of this base"):
        read(write_adapter(tmp_path, tensors, config_bytes(number)), DENSE)


def test_the_colpali_head_is_not_passed_over(tmp_path):
    tensors = random_factors(names=ALL, rank=32, prefix=MULTIMODAL)
    key = "base_model.model.custom_text_proj.lora_A.weight"
    tensors[key] = next(iter(tensors.values()))
    with pytest.raises(AdapterError, match="custom_text_proj.* matches no module"):
        read(write_adapter(tmp_path, tensors, config_bytes(56)))
