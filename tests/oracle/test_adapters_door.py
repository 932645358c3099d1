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
from jaxlora.adapters.modules import EMBEDDING, AdaptableModule, ModuleTable, ParallelKind
from jaxlora.errors import AdapterError
from tests.support.peft_folders import read, tiny_table
from tests.tolerances import PEFT_DELTA_RTOL


torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.oracle

VERSION = tuple(int(part) for part in peft.__version__.split(".")[:2])
GOLDEN = Path(__file__).parents[1] / "golden" / "adapters" / f"peft-{peft.__version__}"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def base_model(biased: bool = False) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        attention_bias=biased,
        mlp_bias=biased,
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
    """The linear modules of the first layer, as the model itself has them, and the outer ones."""
    modules = tuple(
        AdaptableModule(
            name,
            module.in_features,
            module.out_features,
            ParallelKind.COLUMN,
            bias=module.bias is not None,
        )
        for name, module in model.model.layers[0].named_modules()
        if isinstance(module, torch.nn.Linear)
    )
    return tiny_table(
        len(model.model.layers), modules, model.config.vocab_size, model.config.hidden_size
    )


def saved_by_peft(folder: Path, model: Any, **options: Any) -> None:
    """Adapt `model`, make every factor random, and save."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
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
    "dora": {"r": 2, "target_modules": ["q_proj", "down_proj", "lm_head"], "use_dora": True},
    "lora_bias": {"r": 2, "target_modules": ["q_proj", "up_proj"], "lora_bias": True},
    "bias_lora_only": {"r": 2, "target_modules": ["q_proj", "up_proj"], "bias": "lora_only"},
    "bias_all": {"r": 2, "target_modules": ["q_proj"], "bias": "all"},
    "lm_head": {"r": 2, "target_modules": ["q_proj", "lm_head"], "rank_pattern": {"lm_head": 3}},
    "embedding": {"r": 2, "target_modules": ["q_proj", "embed_tokens"], "use_dora": True},
    "tokens": {"r": 2, "target_modules": ["q_proj"], "trainable_token_indices": [7, 2, 39]},
    "tokens_apart": {
        "r": 2,
        "target_modules": ["q_proj"],
        "trainable_token_indices": {"embed_tokens": [7, 2], "lm_head": [0, 9, 5]},
    },
}

# Options that peft had not yet before the version given.
SINCE = {"mica": (0, 19)}

# Before this version peft leaves the biases of "lora_only" out of the files it saves.
BIASES_SAVED_SINCE = (0, 19)

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
    "replication": ({"layer_replication": [[0, 3], [1, 3]]}, "layer_replication is"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    "olora": ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
}


def loaded_by_peft(folder: Path, model: Any) -> dict[str, Any]:
    """What peft makes of a saved folder: "modules", "biases" and "token_rows" by site or module."""
    base_biases = {k: v for k, v in model.state_dict().items() if k.endswith(".bias")}
    base_biases = {k: v.clone() for k, v in base_biases.items()}
    adapted = peft.PeftModel.from_pretrained(model, folder).get_base_model()
    modules, tokens, biases = {}, {}, {}
    for path, module in adapted.named_modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            modules[site(path)] = of_module(module)
        if path.endswith(".token_adapter"):
            ids, rows = module.token_indices["default"], module.trainable_tokens_delta["default"]
            order = np.argsort(ids)
            name = path.removesuffix(".token_adapter")
            tokens[name] = (np.asarray(ids)[order], rows.detach().numpy()[order])
    for name, value in adapted.state_dict().items():
        old = base_biases.get(name.replace(".base_layer", ""))
        if old is not None and not torch.equal(old, value):
            path = name.removesuffix(".bias").removesuffix(".base_layer")
            biases[site(path)] = value.numpy()
    return {"modules": modules, "biases": biases, "token_rows": tokens}


def site(path: str) -> tuple[int, str]:
    if not path.startswith("model.layers."):
        return 0, path
    _, _, layer, name = path.split(".", 3)
    return int(layer), name


def of_module(module: Any) -> dict[str, Any]:
    is_embedding = isinstance(module, peft.tuners.lora.Embedding)
    a, b = (
        (module.lora_embedding_A["default"], module.lora_embedding_B["default"])
        if is_embedding
        else (module.lora_A["default"].weight, module.lora_B["default"].weight)
    )
    delta = module.get_delta_weight("default").detach().numpy()
    bias = None if is_embedding else module.lora_B["default"].bias
    magnitude = (
        module.lora_magnitude_vector["default"].weight if module.use_dora["default"] else None
    )
    return {
        "rank": module.r["default"],
        "scale": module.scaling["default"],
        "a": a.detach().numpy(),
        "b": b.detach().numpy(),
        "delta": delta.T if is_embedding else delta,
        "b_bias": None if bias is None else bias.detach().numpy(),
        "magnitude": None if magnitude is None else magnitude.detach().numpy(),
    }


def assert_reads_as_peft(adapter: Adapter, expected: dict[str, Any]) -> None:
    assert set(adapter.factors) == set(expected["modules"])
    for place, factors in adapter.factors.items():
        peft_module = expected["modules"][place]
        assert (factors.rank, factors.scale) == (peft_module["rank"], peft_module["scale"])
        np.testing.assert_array_equal(factors.a.astype(np.float32), peft_module["a"])
        np.testing.assert_array_equal(factors.b.astype(np.float32), peft_module["b"])
        np.testing.assert_equal(factors.b_bias, peft_module["b_bias"])
        np.testing.assert_equal(factors.magnitude, peft_module["magnitude"])
        delta = factors.scale * (factors.b.astype(np.float64) @ factors.a.astype(np.float64))
        largest = np.abs(delta).max()
        assert np.abs(delta - peft_module["delta"]).max() <= PEFT_DELTA_RTOL * largest
    np.testing.assert_equal(dict(adapter.biases), expected["biases"])
    assert set(adapter.token_rows) == set(expected["token_rows"])
    for name, rows in adapter.token_rows.items():
        np.testing.assert_array_equal(rows.ids, expected["token_rows"][name][0])
        np.testing.assert_array_equal(rows.rows, expected["token_rows"][name][1])


@pytest.mark.parametrize("case", APPLIED)
def test_what_is_read_is_what_peft_has(tmp_path, case, request):
    if SINCE.get(case, VERSION) > VERSION:
        pytest.skip(f"peft {peft.__version__} has no {case}")
    biased = "bias" in case
    saved_by_peft(tmp_path, base_model(biased), **APPLIED[case])
    modules = module_table(base_model(biased))
    if case == "bias_lora_only" and VERSION < BIASES_SAVED_SINCE:
        lines: dict[str, Any] = {"refused": "peft 0.18 did not save these"}
        assert_refused(tmp_path, modules, lines["refused"])
    else:
        expected = loaded_by_peft(tmp_path, base_model(biased))
        adapter = read(tmp_path, modules)
        assert_reads_as_peft(adapter, expected)
        assert list(adapter.invocation_tokens) == APPLIED[case].get("alora_invocation_tokens", [])
        lines = applied_lines(expected, modules) | {"invocation_tokens": adapter.invocation_tokens}
    if request.config.getoption("--rewrite-golden"):
        write_golden(GOLDEN / case, tmp_path, modules, lines)


def applied_lines(expected: Any, modules: ModuleTable) -> dict[str, Any]:
    """What an ordinary test expects of a folder that is applied."""

    def rounded(values: np.ndarray) -> list[float]:
        return [float(f"{x:.7g}") for x in values]

    def vector(values: np.ndarray | None) -> list[float] | None:
        return None if values is None else rounded(values)

    return {
        "modules": {
            modules.path(*place): {
                "rank": found["rank"],
                "scale": found["scale"],
                "delta_row_sums": rounded(found["delta"].sum(axis=1)),
                "b_bias": vector(found["b_bias"]),
                "magnitude": vector(found["magnitude"]),
            }
            for place, found in sorted(expected["modules"].items())
        },
        "biases": {modules.path(*place): rounded(b) for place, b in expected["biases"].items()},
        "token_rows": {
            name: {"ids": ids.tolist(), "rows": [rounded(row) for row in rows]}
            for name, (ids, rows) in expected["token_rows"].items()
        },
    }


def write_golden(golden: Path, folder: Path, modules: ModuleTable, lines: dict[str, Any]) -> None:
    golden.mkdir(parents=True, exist_ok=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(folder / name, golden / name)
    lines = {
        "base": {m.name: [m.d_in, m.d_out, m.bias] for m in modules.modules},
        "hidden_size": modules.module(EMBEDDING).d_out,
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
