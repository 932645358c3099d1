"""The rows of the support table: everything a PEFT folder may say, and what is done about it.

`support.py` looks things up here. What is in none of the rows is refused.

Sources: `LoraConfig` of peft 0.21 (src/peft/tuners/lora/config.py) and what its `save_pretrained`
writes.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Callable
from typing import Any


class Action(enum.StrEnum):
    """What happens to a row's thing."""

    APPLIED = "applied"  # it changes what the adapter does, exactly as in peft
    CHECKED = "checked"  # it must agree with the rest, or the adapter is refused
    IGNORED = "ignored"  # it changes nothing at inference, in peft neither
    REFUSED = "refused"


class Place(enum.StrEnum):
    """Where a row's thing is found."""

    CONFIG = "keys of adapter_config.json"
    TENSOR = "tensors of adapter_model.safetensors"
    FILE = "files of the folder"


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. A key has several rows where its values are treated differently."""

    place: Place
    name: str
    values: str  # in words; empty where the row covers every occurrence
    action: Action
    reason: str  # what it does; where refused, why and what to do
    matches: Callable[[Any], bool]  # a config row is given the value, a tensor row the key

    @property
    def id(self) -> str:
        """Unique and readable, for messages and tests."""
        return f"{self.name} = {self.values}" if self.values else self.name


def _any(value: Any) -> bool:
    return True


def _is_int(value: Any) -> bool:
    return type(value) is int  # not isinstance(): true and false are ints too


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_flag(value: Any) -> bool:
    return value is None or type(value) is bool


def _is_object(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_names(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(item, str) for item in value)
    )


def _is_layers(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, list) and all(_is_int(item) for item in value))


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(_is_int(t) and t >= 0 for t in value)


def _is_token_lists(value: Any) -> bool:
    if not isinstance(value, dict):
        return _is_tokens(value)
    return value != {} and all(_is_tokens(tokens) for tokens in value.values())


def _optional(matches: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or matches(value)


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(item) and value == item for item in values)


def _init(prefix: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value.lower().startswith(prefix)


_APPLIED, _CHECKED, _IGNORED, _REFUSED = Action
_MUTATED = (
    "this initialisation changes the base weights, so the factors are wrong on the plain base: "
    "save the adapter again with path_initial_model_for_weight_conversion to get plain LoRA"
)
_METADATA = "metadata"
_TRAINING = "matters for training only"


def _config(name: str, values: str, matches: Any, action: Action, reason: str) -> Row:
    return Row(Place.CONFIG, name, values, action, reason, matches)


def _unserved(name: str, unused: tuple[Any, ...], values: str, reason: str) -> tuple[Row, Row]:
    """An option that is refused where it is used; `unused` is how it is saved where it isn't."""
    words = ", ".join(json.dumps(value) for value in unused)
    return (
        _config(name, words, _one_of(*unused), _IGNORED, "not used"),
        _config(name, values, _any, _REFUSED, reason),
    )


def _tensor(name: str, pattern: str, action: Action, reason: str) -> Row:
    expression = re.compile(pattern)
    return Row(
        Place.TENSOR, name, "", action, reason, lambda key: expression.search(key) is not None
    )


def _file(name: str, action: Action, reason: str) -> Row:
    return Row(Place.FILE, name, "", action, reason, lambda file: file == name)


# fmt: off
# The first row of a key whose `matches` holds is the one; none: the value is refused as wrong.
CONFIG_ROWS = (
    _config("peft_type", '"LORA"', _one_of("LORA"), _APPLIED, "the kind of adapter"),
    _config("peft_type", "any other", _any, _REFUSED, "only LoRA is served: train with LoraConfig"),
    _config("task_type", 'null, "CAUSAL_LM", "FEATURE_EXTRACTION"',
            _one_of(None, "CAUSAL_LM", "FEATURE_EXTRACTION"), _IGNORED, "peft's wrapper class"),
    _config("task_type", "any other", _any, _REFUSED,
            "trained with a head or an encoder that is not served: train it for CAUSAL_LM"),
    _config("r", "integer", _is_int, _APPLIED, "rank; must equal the rank of the factors"),
    _config("lora_alpha", "number", _is_number, _APPLIED, "scale = alpha / rank of the module"),
    _config("use_rslora", "true, false", _is_flag, _APPLIED, "true: scale = alpha / sqrt(rank)"),
    _config("rank_pattern", "object", _is_object, _APPLIED,
            "rank by module: the first regex in file order that matches the end of the path"),
    _config("alpha_pattern", "object", _is_object, _APPLIED, "alpha by module, the same way"),
    _config("target_modules", 'list, regex, "all-linear"', _is_names, _APPLIED,
            "which modules; must be the modules that have factors"),
    _config("target_modules", "null", _one_of(None), _REFUSED,
            "peft would guess the modules by model type: write the list it was trained with"),
    _config("exclude_modules", "list, regex", _optional(_is_names), _APPLIED, "which modules not"),
    _config("layers_to_transform", "integer, list", _optional(_is_layers), _APPLIED,
            "which layers"),
    _config("layers_pattern", "string, list", _optional(_is_names), _APPLIED,
            "the name that the layer's number follows"),
    _config("alora_invocation_tokens", "null", _one_of(None), _IGNORED, "not used"),
    _config("alora_invocation_tokens", "list of token ids", _is_tokens, _APPLIED,
            "activated LoRA: begins where these tokens stand in the prompt for the last time"),
    _config("base_model_name_or_path", "string", _is_text, _CHECKED,
            "a warning where it is not the served model's name; modules and widths decide"),
    _config("auto_mapping", "object", _is_object, _IGNORED, _METADATA),
    _config("peft_version", "string", _is_text, _IGNORED, _METADATA),
    _config("revision", "string", _is_text, _IGNORED, _METADATA),
    _config("inference_mode", "true, false", _is_flag, _IGNORED, _METADATA),
    _config("runtime_config", "object", _is_object, _IGNORED, "metadata; peft drops it too"),
    _config("lora_dropout", "number", _optional(_is_number), _IGNORED, _TRAINING),
    _config("fan_in_fan_out", "true, false", _is_flag, _IGNORED,
            "layout of the base's weight; A and B are stored the same way"),
    _config("megatron_config", "object", _is_object, _IGNORED, _TRAINING),
    _config("megatron_core", "string", _is_text, _IGNORED, _TRAINING),
    _config("ensure_weight_tying", "true, false", _is_flag, _CHECKED,
            "true, and the base ties its weights: factors of the embedding must be those of lm_head"
            " too, turned round"),
    _config("qalora_group_size", "integer", _optional(_is_int), _IGNORED, "of use_qalora"),
    _config("loftq_config", "object", _is_object, _IGNORED, "of init_lora_weights"),
    _config("eva_config", "object", _is_object, _IGNORED, "of init_lora_weights"),
    _config("corda_config", "object", _is_object, _IGNORED, "of init_lora_weights"),
    _config("lora_ga_config", "object", _is_object, _IGNORED, "of init_lora_weights"),
    _config("velora_config", "object", _is_object, _IGNORED,
            "compresses activations in training; inference is plain LoRA"),
    _config("init_lora_weights", 'null, true, false, "gaussian", "eva", "orthogonal", "mica"',
            _one_of(None, True, False, "gaussian", "eva", "orthogonal", "mica"), _IGNORED,
            "how training began; the base weights stay as they are"),
    _config("init_lora_weights", '"pissa", "pissa_niter_N"', _init("pissa"), _REFUSED, _MUTATED),
    _config("init_lora_weights", '"olora"', _init("olora"), _REFUSED, _MUTATED),
    _config("init_lora_weights", '"corda"', _init("corda"), _REFUSED, _MUTATED),
    _config("init_lora_weights", '"lora_ga"', _init("lora_ga"), _REFUSED, _MUTATED),
    _config("init_lora_weights", '"loftq"', _init("loftq"), _REFUSED,
            "LoftQ replaces the base weights by quantized ones, so the factors are wrong on the "
            "plain base: train it again without"),
    _config("bias", '"none"', _one_of("none"), _IGNORED, "no biases were trained"),
    _config("bias", '"all", "lora_only"', _one_of("all", "lora_only"), _APPLIED,
            "biases of all modules, or of those with factors, stand in place of the base's; must "
            "be in the file"),
    *_unserved("modules_to_save", (None, []), "list",
               "full weights that replace the base's are not served: train without (factors or "
               "trainable_token_indices of embed_tokens and lm_head are served), or merge"),
    _config("use_dora", "true, false", _is_flag, _APPLIED,
            "true: DoRA, each output is scaled to its magnitude; checked and computed when the "
            "base's weights are loaded"),
    _config("lora_bias", "true, false", _is_flag, _APPLIED,
            "true: B has a bias, which is scaled as the delta is"),
    _config("trainable_token_indices", "null", _one_of(None), _IGNORED, "not used"),
    _config("trainable_token_indices", "list of token ids, object of such lists", _is_token_lists,
            _APPLIED, "rows of the embedding, or of lm_head, that replace the base's; with tied "
            "weights those of the embedding are the head's too"),
    *_unserved("target_parameters", (None, []), "list",
               "factors of expert parameters are not served: train with target_modules alone, "
               "or merge"),
    *_unserved("layer_replication", (None, []), "list",
               "the adapter is for a deeper model made of repeated layers: serve that one, merged"),
    *_unserved("use_qalora", (None, False), "true",
               "QALoRA pools the input of A by groups, which is not served: train without"),
    *_unserved("use_bdlora", (None, False), "object",
               "block-diagonal factors are not served: train without, or merge"),
    *_unserved("arrow_config", (None,), "object",
               "Arrow routes between several adapters, which is not served: serve one of them"),
    *_unserved("kasa_config", (None,), "object",
               "KaSA truncates the base weights, so the factors are wrong on the plain base: "
               "merge"),
    *_unserved("monteclora_config", (None,), "object",
               "sampled factors are not served: train without"),
)

# The first row whose pattern is found in the tensor's key is the one; none: refused as unknown.
TENSOR_ROWS = (
    _tensor("MODULE.lora_embedding_A, MODULE.lora_embedding_B",
            r"\.lora_embedding_[AB](\.default)?$", _APPLIED,
            "of embed_tokens: [rank, vocabulary] and [hidden, rank]"),
    _tensor("MODULE.token_adapter.trainable_tokens_delta",
            r"\.token_adapter\.trainable_tokens_delta(\.default)?$", _APPLIED,
            "[tokens, hidden]: rows in the order of trainable_token_indices"),
    _tensor("...trainable_tokens_...", r"trainable_tokens_", _REFUSED,
            "only LoRA's own trainable_token_indices are served: train with LoraConfig"),
    _tensor("embed_tokens.base_layer.weight, lm_head.base_layer.weight",
            r"(^|\.)(lm_head|embed_tokens)\.base_layer\.weight$", _CHECKED,
            "peft's copy of the base's weight: must be the base's; compared when that is loaded"),
    _tensor("MODULE.lora_magnitude_vector", r"\.lora_magnitude_vector(\.default)?(\.weight)?$",
            _APPLIED, "[d_out], of DoRA"),
    _tensor("MODULE.lora_B.bias", r"\.lora_B(\.default)?\.bias$", _APPLIED,
            "[d_out], of lora_bias"),
    _tensor("...lora_diag", r"\.lora_diag\b", _REFUSED,
            "KaSA truncates the base weights, so the factors are wrong on the plain base: merge"),
    _tensor("...lora_velora_embed", r"\.lora_velora_embed(\.default)?$", _IGNORED,
            "of VeLoRA, for training only"),
    _tensor("...experts...lora_A", r"\.experts\..*lora_[AB]\b", _REFUSED,
            "factors of routed experts are not served: train without them, or merge"),
    _tensor("MODULE.lora_A.weight, MODULE.lora_B.weight", r"\.lora_[AB](\.default)?\.weight$",
            _APPLIED, "[rank, d_in] and [d_out, rank] in F32, F16 or BF16; spellings below"),
    _tensor("MODULE.lora_A.NAME.weight",
            r"\.lora_([AB]\.\w+\.(weight|bias)|embedding_[AB]\.\w+"
            r"|magnitude_vector\.\w+(\.weight)?)$", _REFUSED,
            "factors of a named adapter beside the default one: save one adapter a folder"),
    _tensor("MODULE.lora_a, MODULE.lora_b", r"\.lora_[ab]$", _REFUSED,
            "MLX factors: convert them to PEFT (transpose both, alpha = scale * rank)"),
    _tensor("...lora_down.weight, ...lora_up.weight", r"lora_(down|up)\b", _REFUSED,
            "factors in kohya's format: convert them to PEFT"),
    _tensor("MODULE.bias, MODULE.base_layer.bias", r"\.bias$", _APPLIED,
            "[d_out], of bias: in place of the base's"),
    _tensor("...weight", r"\.weight$", _REFUSED,
            "a full weight that replaces the base's is not served: train without "
            "modules_to_save and without resizing the embeddings, or merge"),
)

FILE_ROWS = (
    _file("adapter_config.json", _APPLIED, "required"),
    _file("adapter_model.safetensors", _APPLIED, "required"),
    _file("jaxlora_adapter.json", _CHECKED, "optional manifest"),
    _file("tensorfold_adapter.json", _CHECKED, "optional manifest, read the same way"),
    _file("adapter_model.bin", _REFUSED,
          "a pickle can run code when it is opened: load it with peft where you trust it, and "
          "save_pretrained(..., safe_serialization=True)"),
    _file("adapters.safetensors", _REFUSED,
          "an MLX adapter: convert it to PEFT (transpose A and B, alpha = scale * rank)"),
    Row(Place.FILE, "any other file", "", _IGNORED,
        "not part of an adapter (README, tokenizer, added_tokens.json, optimizer, ...); so are "
        "the refused ones beside adapter_model.safetensors, as in peft", _any),
)
# fmt: on
