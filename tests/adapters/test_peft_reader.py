"""A PEFT folder reads to the right modules, ranks, scales and bytes, or is refused by name."""

from __future__ import annotations

import logging
import math
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxlora.adapters.modules import EMBEDDING, HEAD, AdaptableModule, ModuleTable, ParallelKind
from jaxlora.errors import AdapterError
from tests.support.peft_folders import (
    ATTENTION,
    DENSE,
    random_factors,
    read,
    table,
    write_adapter,
)


def refusal(folder: Path, **options) -> str:
    """The one-line reason."""
    with pytest.raises(AdapterError) as caught:
        read(folder, **options)
    message = str(caught.value)
    assert "\n" not in message and message.isascii() and message.isprintable()
    return message


def test_factors_are_the_files_bytes_and_scale_is_alpha_over_rank(tmp_path):
    tensors = random_factors()
    adapter = read(write_adapter(tmp_path, tensors))
    assert set(adapter.factors) == {
        (layer, name) for layer in (0, 1) for name in ("self_attn.q_proj", "self_attn.o_proj")
    }
    for (layer, name), factors in adapter.factors.items():
        stem = f"base_model.model.model.layers.{layer}.{name}"
        np.testing.assert_array_equal(factors.a, tensors[f"{stem}.lora_A.weight"])
        np.testing.assert_array_equal(factors.b, tensors[f"{stem}.lora_B.weight"])
        assert (factors.scale, factors.rank) == (2.0, 3)
    assert (adapter.name, adapter.source, adapter.max_rank) == ("tiny", str(tmp_path), 3)


def test_factors_cannot_be_written_to(tmp_path):
    adapter = read(write_adapter(tmp_path))
    for factors in adapter.factors.values():
        for array in (factors.a, factors.b):
            with pytest.raises(ValueError, match="read-only"):
                array[0, 0] = 1
    with pytest.raises(TypeError):
        adapter.factors[0, "self_attn.q_proj"] = None  # type: ignore[index]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dtype_stays_the_files(tmp_path, dtype):
    adapter = read(write_adapter(tmp_path, random_factors(dtype=dtype)))
    assert {factors.a.dtype for factors in adapter.factors.values()} == {np.dtype(dtype)}


@pytest.mark.parametrize("dtype", [np.float64, np.int8])
def test_other_dtypes_are_refused(tmp_path, dtype):
    assert "save factors as one of F32, F16, BF16" in refusal(
        write_adapter(tmp_path, random_factors(dtype=dtype))
    )


def test_rslora_divides_by_the_square_root_of_each_modules_rank(tmp_path):
    """The example of peft's own arithmetic: r=2, alpha=4, patterns for both."""
    tensors = (
        random_factors(names=["self_attn.q_proj"], rank=2, layers=[0])
        | random_factors(names=["self_attn.q_proj"], rank=4, layers=[1])
        | random_factors(names=["self_attn.v_proj"], rank=3)
    )
    folder = write_adapter(
        tmp_path,
        tensors,
        r=2,
        lora_alpha=4,
        use_rslora=True,
        target_modules=["q_proj", "v_proj"],
        rank_pattern={"layers.1.self_attn.q_proj": 4, "v_proj": 3},
        alpha_pattern={"q_proj": 16},
    )
    scales = {site: factors.scale for site, factors in read(folder).factors.items()}
    assert scales == {
        (0, "self_attn.q_proj"): 16 / math.sqrt(2),
        (1, "self_attn.q_proj"): 16 / math.sqrt(4),
        (0, "self_attn.v_proj"): 4 / math.sqrt(3),
        (1, "self_attn.v_proj"): 4 / math.sqrt(3),
    }


def test_a_fractional_alpha_is_exact(tmp_path):
    adapter = read(write_adapter(tmp_path, lora_alpha=0.7))
    assert {factors.scale for factors in adapter.factors.values()} == {0.7 / 3}


SPELLINGS = {
    "causal model": {"prefix": "base_model.model.model.layers"},
    "no peft prefix": {"prefix": "model.layers"},
    "bare backbone": {"prefix": "base_model.model.layers"},
    "bare backbone, no peft prefix": {"prefix": "layers"},
    "multimodal wrapper": {"prefix": "base_model.model.model.language_model.layers"},
    "old multimodal wrapper": {"prefix": "base_model.model.language_model.model.layers"},
    "language model alone": {"prefix": "language_model.layers"},
    "adapter name kept": {"suffix": "default.weight"},
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_the_same_factors_spelled_otherwise_have_the_same_key(tmp_path, spelling):
    plain = read(write_adapter(tmp_path / "plain"))
    other = read(write_adapter(tmp_path / "other", random_factors(**spelling)))
    assert other.key == plain.key


def test_a_wrapped_base_layer_is_the_module_itself(tmp_path):
    tensors = {k.replace(".lora_", ".base_layer.lora_"): v for k, v in random_factors().items()}
    assert (
        read(write_adapter(tmp_path / "a", tensors)).key == read(write_adapter(tmp_path / "b")).key
    )


def test_an_alias_is_the_module_and_is_what_the_config_targets(tmp_path):
    q = AdaptableModule("self_attn.q_proj", 6, 7, ParallelKind.COLUMN, ("attention.query",))
    modules = ModuleTable(2, (q,), vocab_size=1)
    plain = random_factors(modules, ["self_attn.q_proj"])
    renamed = {k.replace("self_attn.q_proj", "attention.query"): v for k, v in plain.items()}
    one = read(write_adapter(tmp_path / "a", plain, target_modules=["q_proj"]), modules)
    two = read(write_adapter(tmp_path / "b", renamed, target_modules=["query"]), modules)
    assert one.key == two.key
    assert "does not target" in refusal(
        write_adapter(tmp_path / "c", renamed, target_modules=["q_proj"]), modules=modules
    )


def test_the_order_of_tensors_in_the_file_does_not_change_the_key(tmp_path):
    tensors = random_factors()
    backwards = dict(reversed(tensors.items()))
    one, two = (read(write_adapter(tmp_path / n, t)) for n, t in (("a", tensors), ("b", backwards)))
    assert one.key == two.key


def test_other_strength_scale_base_or_byte_has_another_key(tmp_path):
    tensors = random_factors()
    changed = {k: v.copy() for k, v in tensors.items()}
    next(iter(changed.values())).view(np.uint8)[0, 0] ^= 1
    keys = [
        read(write_adapter(tmp_path, tensors)).key,
        read(tmp_path, strength=0.5).key,
        read(tmp_path, base_fingerprint="cd" * 32).key,
        read(write_adapter(tmp_path, tensors, lora_alpha=7)).key,
        read(write_adapter(tmp_path, tensors, use_rslora=True)).key,
        read(write_adapter(tmp_path, changed)).key,
        read(write_adapter(tmp_path, {k: v.astype(np.float16) for k, v in tensors.items()})).key,
    ]
    assert len(set(keys)) == len(keys)


def test_the_name_is_not_part_of_the_key(tmp_path):
    folder = write_adapter(tmp_path)
    assert read(folder).key == read(folder, name="other").key


@pytest.mark.parametrize("strength", [0.0, math.nan, math.inf, -math.inf])
def test_a_strength_that_makes_no_sense_is_refused(tmp_path, strength):
    assert "strength" in refusal(write_adapter(tmp_path), strength=strength)


def test_a_scale_beyond_float32_is_refused(tmp_path):
    assert "too large" in refusal(write_adapter(tmp_path, lora_alpha=3e38), strength=1e3)


# What the tensor file must hold.


@pytest.mark.parametrize("side", ["A", "B"])
def test_a_module_without_one_of_its_factors_is_refused(tmp_path, side):
    tensors = random_factors()
    del tensors[f"base_model.model.model.layers.1.self_attn.o_proj.lora_{side}.weight"]
    message = refusal(write_adapter(tmp_path, tensors))
    assert (
        f"model.layers.1.self_attn.o_proj has lora_{'BA'[side == 'B']} and no lora_{side}"
        in message
    )


def test_the_same_factor_twice_is_refused(tmp_path):
    tensors = random_factors() | random_factors(suffix="default.weight")
    assert "are the same tensor" in refusal(write_adapter(tmp_path, tensors))


def test_two_spellings_in_one_file_are_refused(tmp_path):
    tensors = random_factors(layers=[0]) | random_factors(layers=[1], prefix="layers")
    assert "names modules in two ways" in refusal(write_adapter(tmp_path, tensors))


@pytest.mark.parametrize(
    "key",
    [
        "base_model.model.model.layers.0.self_attn.w_proj.lora_A.weight",
        "base_model.model.model.layers.0.q_proj.lora_A.weight",
        "base_model.model.model.layers.00.self_attn.q_proj.lora_A.weight",
        "base_model.model.encoder.layers.0.self_attn.q_proj.lora_A.weight",
        "model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight",
    ],
)
def test_a_tensor_that_matches_no_module_is_refused_by_name(tmp_path, key):
    tensors = random_factors() | {key: np.ones((3, 6), np.float32)}
    message = refusal(write_adapter(tmp_path, tensors))
    assert key in message and "matches no module of this base" in message


def test_a_layer_beyond_the_bases_is_refused(tmp_path):
    tensors = random_factors(layers=[0, 1, 2])
    assert "this base has 2 layers" in refusal(write_adapter(tmp_path, tensors))


def test_widths_of_another_base_are_refused(tmp_path):
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    tensors = random_factors() | {key: np.ones((3, 5), np.float32)}
    assert "takes 5 features to 7; this base's takes 6 to 7" in refusal(
        write_adapter(tmp_path, tensors)
    )


def test_a_rank_other_than_the_configs_is_refused(tmp_path):
    assert "rank 3 in A and 3 in B; adapter_config.json says 4" in refusal(
        write_adapter(tmp_path, r=4)
    )


def test_a_and_b_of_different_rank_are_refused(tmp_path):
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    tensors = random_factors() | {key: np.ones((7, 2), np.float32)}
    assert "rank 3 in A and 2 in B" in refusal(write_adapter(tmp_path, tensors))


@pytest.mark.parametrize("shape", [(0,), (0, 6), (18,), (3, 6, 1), ()])
def test_a_factor_that_is_no_matrix_is_refused(tmp_path, shape):
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    tensors = random_factors() | {key: np.ones(shape, np.float32)}
    assert "not a factor (DeepSpeed ZeRO-3" in refusal(write_adapter(tmp_path, tensors))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_factor_that_is_not_finite_is_refused(tmp_path, value, dtype):
    tensors = random_factors(dtype=dtype)
    key = "base_model.model.model.layers.1.self_attn.o_proj.lora_B.weight"
    tensors[key][2, 1] = value
    message = refusal(write_adapter(tmp_path, tensors))
    assert key in message and "[2, 1]" in message and "not finite" in message


@pytest.mark.parametrize("side", ["A", "B"])
def test_an_untrained_adapter_would_change_nothing_and_is_refused(tmp_path, side):
    tensors = {k: v * (f"lora_{side}" not in k) for k, v in random_factors().items()}
    assert "the delta is zero everywhere" in refusal(write_adapter(tmp_path, tensors))


def test_factors_that_cancel_are_refused(tmp_path):
    tensors = random_factors()
    for key, value in tensors.items():
        if "lora_A" in key:
            value[2:] = 0
        else:
            value[:, :2] = 0
    assert "the delta is zero everywhere" in refusal(write_adapter(tmp_path, tensors))


def test_alpha_zero_is_refused(tmp_path):
    assert "the delta is zero everywhere" in refusal(write_adapter(tmp_path, lora_alpha=0))


def test_one_module_with_an_effect_is_enough(tmp_path):
    tensors = random_factors()
    for key in list(tensors)[:-2]:
        tensors[key] = np.zeros_like(tensors[key])
    assert len(read(write_adapter(tmp_path, tensors)).factors) == 4


def test_a_file_without_factors_is_refused(tmp_path):
    assert "no factors" in refusal(write_adapter(tmp_path, {}))


def test_a_rank_over_the_servers_limit_is_refused(tmp_path):
    folder = write_adapter(tmp_path)
    assert "rank 3, over --max-adapter-rank 2" in refusal(folder, max_rank=2)
    assert read(folder, max_rank=3).max_rank == 3


# Config and tensors must agree.


def test_factors_the_config_does_not_target_are_refused(tmp_path):
    message = refusal(write_adapter(tmp_path, target_modules=["q_proj"]))
    assert "has factors for model.layers.0.self_attn.o_proj, which adapter_config.json" in message


def test_a_targeted_module_without_factors_is_refused(tmp_path):
    message = refusal(write_adapter(tmp_path, target_modules=["q_proj", "o_proj", "v_proj"]))
    assert "targets model.layers.0.self_attn.v_proj, which has no factors" in message


def test_a_missing_layer_is_refused(tmp_path):
    message = refusal(write_adapter(tmp_path, random_factors(layers=[0])))
    assert "targets model.layers.1.self_attn.q_proj, which has no factors" in message


def test_a_target_that_the_base_does_not_have_is_passed_over_as_in_peft(tmp_path):
    assert read(write_adapter(tmp_path, target_modules=["q_proj", "o_proj", "q_lin"]))


@pytest.mark.parametrize("name", [HEAD, EMBEDDING])
@pytest.mark.parametrize("target", [["q_proj", "o_proj", "{}"], r".*(q_proj|o_proj)|(.*\.)?{}"])
def test_the_head_or_embedding_in_the_targets_must_have_factors(tmp_path, name, target):
    leaf = name.rpartition(".")[2]
    target = target.format(leaf) if isinstance(target, str) else [t.format(leaf) for t in target]
    folder = write_adapter(tmp_path, target_modules=target)
    assert f"targets {name}, which has no factors" in refusal(folder)
    tensors = random_factors(names=["self_attn.q_proj", "self_attn.o_proj", name])
    assert (0, name) in read(write_adapter(tmp_path, tensors, target_modules=target)).factors
    assert f"factors for {name}, which adapter_config.json does not target" in refusal(
        write_adapter(tmp_path, tensors)
    )


def test_all_linear_is_every_module_of_the_layers_and_no_more(tmp_path):
    names = [module.name for module in DENSE.modules]
    folder = write_adapter(tmp_path, random_factors(names=names), target_modules="All-Linear")
    assert len(read(folder).factors) == 14
    assert "k_proj, which has no factors" in refusal(
        write_adapter(tmp_path, target_modules="all-linear")
    )


def test_a_layer_subset_reads(tmp_path):
    tensors = random_factors(layers=[1])
    for layers in (1, [1]):
        for pattern in (None, "layers", ["h", "layers"]):
            folder = write_adapter(
                tmp_path, tensors, layers_to_transform=layers, layers_pattern=pattern
            )
            assert {layer for layer, _ in read(folder).factors} == {1}


def test_a_layer_that_the_base_does_not_have_is_refused(tmp_path):
    assert "this base has layers 0 to 1" in refusal(
        write_adapter(tmp_path, layers_to_transform=[0, 1, 2])
    )


def test_exclude_modules_wins_over_the_target(tmp_path):
    tensors = random_factors(names=["self_attn.q_proj"])
    for exclude in (["o_proj"], r".*\.o_proj", ["self_attn.o_proj", "nothing"]):
        folder = write_adapter(tmp_path, tensors, exclude_modules=exclude)
        assert len(read(folder).factors) == 2
    assert "does not target" in refusal(write_adapter(tmp_path, exclude_modules=["o_proj"]))


def test_a_regex_target_reads(tmp_path):
    tensors = random_factors(names=ATTENTION)
    folder = write_adapter(tmp_path, tensors, target_modules=r"^(?!.*mlp).*\.[qkvo]_proj$")
    assert len(read(folder).factors) == 8


def test_another_base_name_only_warns(tmp_path, caplog):
    folder = write_adapter(tmp_path, base_model_name_or_path="someone/Other-7B")
    with caplog.at_level(logging.WARNING):
        assert read(folder, base_name="models/mine")
    assert "'someone/Other-7B', served on models/mine" in caplog.text
    caplog.clear()
    read(write_adapter(tmp_path, base_model_name_or_path="org/Mine"), base_name="models/mine/")
    assert not caplog.records


def test_reading_takes_little_memory_beyond_the_files_size(tmp_path):
    modules = table(*ATTENTION, layers=4, width=3000)
    tensors = random_factors(modules, ATTENTION, rank=32)
    folder = write_adapter(tmp_path, tensors, r=32, target_modules=list(ATTENTION))
    del tensors
    size = (folder / "adapter_model.safetensors").stat().st_size
    tracemalloc.start()
    adapter = read(folder, modules)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(adapter.factors) == 16
    assert kept < 1.05 * size and peak < 1.5 * size


def test_invocation_tokens_are_ids_of_the_bases_vocabulary(tmp_path):
    last = DENSE.vocab_size - 1
    adapter = read(write_adapter(tmp_path, alora_invocation_tokens=[last, 0, last]))
    assert adapter.invocation_tokens == (last, 0, last)
    message = refusal(write_adapter(tmp_path, alora_invocation_tokens=[0, last + 1, 5]))
    assert f"has token {last + 1}; this base has tokens 0 to {last}: an adapter of ano" in message


def test_an_activated_adapter_is_never_taken_for_the_plain_one(tmp_path):
    plain = read(write_adapter(tmp_path / "a"))
    activated = read(write_adapter(tmp_path / "b", alora_invocation_tokens=[5, 6]))
    assert plain.invocation_tokens == () and plain.key != activated.key
