"""The adapter door against peft itself: what peft saves and loads again is what is read here.

With `--rewrite-golden` the folders that peft saved, and what it made of them, are written to
tests/golden/adapters/peft-VERSION, where the ordinary tests find them. Those of an older peft were
made by these tests too:

    pip install --no-deps --target OLD peft==0.18.1
    PYTHONPATH=OLD pytest -m oracle tests/oracle/test_adapters_door.py --rewrite-golden
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.modules import AdaptableModule, ModuleTable, ParallelKind
from jaxlora.errors import AdapterError
from tests.support.peft_folders import read
from tests.tolerances import PEFT_DELTA_RTOL


torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.oracle

VERSION = tuple(int(part) for part in peft.__version__.split(".")[:2])
GOLDEN = Path(__file__).parents[1] / "golden" / "adapters" / f"peft-{peft.__version__}"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def base_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=20,
        intermediate_size=28,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).float()


def moe_model() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        num_experts=3,
        num_experts_per_tok=2,
    )
    return transformers.Qwen3MoeForCausalLM(config).float()


def module_table(model: Any) -> ModuleTable:
    """The linear modules of the first layer, as the model itself has them."""
    modules = tuple(
        AdaptableModule(name, module.in_features, module.out_features, ParallelKind.COLUMN)
        for name, module in model.model.layers[0].named_modules()
        if isinstance(module, torch.nn.Linear)
    )
    return ModuleTable(len(model.model.layers), modules, vocab_size=model.config.vocab_size)


def saved_by_peft(folder: Path, model: Any, **options: Any) -> None:
    """Adapt `model`, make every factor random, and save."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    adapted.save_pretrained(folder)


APPLIED: dict[str, dict[str, Any]] = {
    "plain": {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj"]},
    "float_alpha": {"r": 3, "lora_alpha": 0.7, "target_modules": ATTENTION},
    "rslora": {"r": 5, "lora_alpha": 8, "use_rslora": True, "target_modules": ATTENTION},
    "patterns": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": [*ATTENTION, "down_proj"],
        "rank_pattern": {"[qk]_proj": 5, "layers.1.self_attn.o_proj": 4, "v_proj": 3},
        # Not in alphabetical order, which is what a saved file has and a loading peft goes by.
        "alpha_pattern": {"self_attn.*": 9.5, "down_proj": 16, "layers.0.*": 2},
    },
    "rslora_patterns": {
        "r": 2,
        "lora_alpha": 4,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 4, "v_proj": 3},
        "alpha_pattern": {"q_proj": 16},
    },
    "regex_targets": {"r": 2, "target_modules": r"^(?!.*layers\.1\.).*\.(q_proj|up_proj)$"},
    "all_linear": {"r": 1, "lora_alpha": 1, "target_modules": "all-linear"},
    "full_paths": {
        "r": 2,
        "target_modules": ["model.layers.0.self_attn.q_proj", "layers.2.mlp.up_proj"],
    },
    "layer_subset": {"r": 2, "target_modules": ATTENTION, "layers_to_transform": [0, 2]},
    "layers_pattern": {
        "r": 2,
        "target_modules": ["o_proj"],
        "layers_to_transform": 1,
        "layers_pattern": "layers",
    },
    "exclude_list": {"r": 2, "target_modules": ATTENTION, "exclude_modules": ["k_proj"]},
    "exclude_regex": {
        "r": 2,
        "target_modules": "all-linear",
        "exclude_modules": r".*(mlp|layers\.0).*",
    },
    "gaussian": {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
    "orthogonal": {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
    "alora": {"r": 2, "target_modules": ["q_proj"], "alora_invocation_tokens": [3, 1, 3]},
    "mica": {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": "mica"},
}

# Options that peft had not yet before the version given.
SINCE = {"mica": (0, 19)}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora is True"),
    "lora_bias": ({"lora_bias": True}, "lora_bias is True"),
    "bias_lora_only": ({"bias": "lora_only"}, "bias is 'lora_only'"),
    "bias_all": ({"bias": "all"}, "bias is 'all'"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
    "lm_head": ({"target_modules": ["q_proj", "lm_head"]}, "lm_head and embeddings can't"),
    "embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, "lm_head and embeddings can't"),
    "tokens": ({"trainable_token_indices": [1, 2]}, "trainable_token_indices is"),
    "replication": ({"layer_replication": [[0, 3], [1, 3]]}, "layer_replication is"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    "olora": ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
}


def loaded_by_peft(folder: Path, model: Any) -> dict[tuple[int, str], dict[str, Any]]:
    """What peft makes of a saved folder: per module its rank, scale, A, B and delta."""
    adapted = peft.PeftModel.from_pretrained(model, folder)
    found = {}
    for path, module in adapted.get_base_model().named_modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            _, _, layer, name = path.split(".", 3)
            found[int(layer), name] = {
                "rank": module.r["default"],
                "scale": module.scaling["default"],
                "a": module.lora_A["default"].weight.detach().numpy(),
                "b": module.lora_B["default"].weight.detach().numpy(),
                "delta": module.get_delta_weight("default").detach().numpy(),
            }
    return found


def assert_reads_as_peft(adapter: Adapter, expected: dict[tuple[int, str], dict[str, Any]]) -> None:
    assert set(adapter.factors) == set(expected)
    for site, factors in adapter.factors.items():
        peft_module = expected[site]
        assert (factors.rank, factors.scale) == (peft_module["rank"], peft_module["scale"])
        np.testing.assert_array_equal(factors.a.astype(np.float32), peft_module["a"])
        np.testing.assert_array_equal(factors.b.astype(np.float32), peft_module["b"])
        delta = factors.scale * (factors.b.astype(np.float64) @ factors.a.astype(np.float64))
        largest = np.abs(delta).max()
        assert np.abs(delta - peft_module["delta"]).max() <= PEFT_DELTA_RTOL * largest


@pytest.mark.parametrize("case", APPLIED)
def test_ranks_scales_and_factors_are_pefts(tmp_path, case, request):
    if SINCE.get(case, VERSION) > VERSION:
        pytest.skip(f"peft {peft.__version__} has no {case}")
    saved_by_peft(tmp_path, base_model(), **APPLIED[case])
    expected = loaded_by_peft(tmp_path, base_model())
    modules = module_table(base_model())
    adapter = read(tmp_path, modules)
    assert_reads_as_peft(adapter, expected)
    assert list(adapter.invocation_tokens) == APPLIED[case].get("alora_invocation_tokens", [])
    if request.config.getoption("--rewrite-golden"):
        lines = applied_lines(expected, modules) | {"invocation_tokens": adapter.invocation_tokens}
        write_golden(GOLDEN / case, tmp_path, modules, lines)


def applied_lines(expected: Any, modules: ModuleTable) -> dict[str, Any]:
    """What an ordinary test expects of a folder that is applied."""
    return {
        "modules": {
            modules.path(*site): {
                "rank": found["rank"],
                "scale": found["scale"],
                "delta_row_sums": [float(f"{x:.7g}") for x in found["delta"].sum(axis=1)],
            }
            for site, found in sorted(expected.items())
        }
    }


def write_golden(golden: Path, folder: Path, modules: ModuleTable, lines: dict[str, Any]) -> None:
    golden.mkdir(parents=True, exist_ok=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(folder / name, golden / name)
    lines = {
        "base": {module.name: [module.d_in, module.d_out] for module in modules.modules},
        "layers": modules.num_layers,
        "vocab_size": modules.vocab_size,
    } | lines
    (golden / "expected.json").write_text(json.dumps(lines, indent=1) + "\n")


def test_ranks_that_saving_reorders_are_refused_where_peft_fails_to_load(tmp_path):
    """A saved file has its patterns in alphabetical order, whatever they were trained with."""
    options = {"rank_pattern": {"layers.1.self_attn.q_proj": 4, "[qk]_proj": 5}}
    saved_by_peft(tmp_path, base_model(), r=2, target_modules=["q_proj"], **options)
    with pytest.raises(RuntimeError, match="size mismatch"):
        loaded_by_peft(tmp_path, base_model())
    with pytest.raises(AdapterError, match="rank 4 in A and 4 in B; adapter_config.json says 5"):
        read(tmp_path, module_table(base_model()))


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_plain_lora_is_refused_as_peft_saves_it(tmp_path, case, request):
    options, reason = REFUSED[case]
    saved_by_peft(tmp_path, base_model(), **({"r": 2, "target_modules": ["q_proj"]} | options))
    modules = module_table(base_model())
    assert_refused(tmp_path, modules, reason)
    if request.config.getoption("--rewrite-golden"):
        write_golden(GOLDEN / case, tmp_path, modules, {"refused": reason})


def assert_refused(folder: Path, modules: ModuleTable, reason: str) -> None:
    with pytest.raises(AdapterError) as caught:
        read(folder, modules)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def config_class(name: str) -> Any:
    found = getattr(peft.tuners.lora.config, name, None)
    if found is None:
        pytest.skip(f"peft {peft.__version__} has no {name}")
    return found


def test_kasa_is_refused(tmp_path):
    config = config_class("KasaConfig")()
    saved_by_peft(tmp_path, base_model(), r=2, target_modules=["q_proj"], kasa_config=config)
    assert_refused(tmp_path, module_table(base_model()), "kasa_config is")


def test_velora_reads_as_plain_lora(tmp_path):
    config = config_class("VeloraConfig")(num_groups=4)
    options = {"r": 2, "target_modules": ["q_proj"], "velora_config": config}
    saved_by_peft(tmp_path, base_model(), **options)
    assert_reads_as_peft(
        read(tmp_path, module_table(base_model())), loaded_by_peft(tmp_path, base_model())
    )


def test_expert_parameters_are_refused(tmp_path, request):
    saved_by_peft(
        tmp_path,
        moe_model(),
        r=2,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.down_proj"],
    )
    modules, reason = module_table(moe_model()), "target_parameters is"
    assert_refused(tmp_path, modules, reason)
    if request.config.getoption("--rewrite-golden"):
        write_golden(GOLDEN / "expert_parameters", tmp_path, modules, {"refused": reason})


def test_a_converted_pissa_adapter_is_plain_lora(tmp_path):
    model = base_model()
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa")
    adapted = peft.get_peft_model(model, config)
    adapted.peft_config["default"].init_lora_weights = True
    adapted.save_pretrained(tmp_path / "initial")
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data += 0.1
    adapted.save_pretrained(
        tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "initial")
    )
    adapter = read(tmp_path / "converted", module_table(base_model()))
    assert adapter.max_rank == 4
    assert_reads_as_peft(adapter, loaded_by_peft(tmp_path / "converted", base_model()))


def test_bfloat16_factors_are_read_as_saved(tmp_path):
    model = base_model().to(torch.bfloat16)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    adapted.save_pretrained(tmp_path)
    adapter = read(tmp_path, module_table(base_model()))
    assert {str(factors.a.dtype) for factors in adapter.factors.values()} == {"bfloat16"}
    assert_reads_as_peft(adapter, loaded_by_peft(tmp_path, base_model()))
