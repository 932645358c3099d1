"""`ModelConfig`: what a Hugging Face config.json says about a model, checked and normalised.

Reads both the old flat keys (rope_theta, rope_scaling, torch_dtype, sliding_window) and those of
transformers 5 (rope_parameters, dtype, layer_types). What is not served is refused by name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

from jaxlora.errors import ConfigError
from jaxlora.json_file import JsonObject, read_json_object


DTYPES = ("float32", "bfloat16", "float16")

# What transformers assumes for a key that a config.json leaves out, and which of the keys that not
# every family has it reads at all. A key a family does not read has no effect there either.
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "attention_bias": False,
    },
}

# Parameters of each RoPE type besides theta, as `RopeConfig` holds them.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "truncate",  # 1 or 0
        "attention_factor",
    ),
}

# Keys that change the output in a way that is not served, with the values that do not.
_REFUSED_UNLESS: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1),
    "use_mrope": (None, False),
}

_MAX_LAYERS = 10_000  # a larger number is a broken file, and would take the memory


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: its base and scaling (`ROPE_TYPES`), every default resolved."""

    theta: float
    kind: str = "default"
    parameters: tuple[tuple[str, float], ...] = ()

    def __getitem__(self, name: str) -> float:
        return dict(self.parameters)[name]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A dense decoder's architecture. Everything is resolved: no field needs another's default."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]  # per layer: the sliding window, or None for full attention
    attention_bias: bool = False  # families with a fixed choice of biases do not read these two
    mlp_bias: bool = False
    max_position_embeddings: int = 2048  # the longest context; with yarn what it stretches to
    dtype: str = "float32"  # the checkpoint's own
    eos_token_ids: tuple[int, ...] = ()
    source: str = "config.json"  # where it was read from, for messages

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read config.json (and generation_config.json, for the end-of-sequence ids).

        Raises ConfigError, naming the file and the key, for what is missing, of a wrong type, or
        not served.
        """
        folder = Path(folder)
        raw = read_json_object(folder / "config.json", ConfigError)
        generation = folder / "generation_config.json"
        config = _parse(raw)
        eos = _eos_token_ids(raw, config.vocab_size)
        if generation.exists():
            generation_raw = read_json_object(generation, ConfigError)
            eos = _eos_token_ids(generation_raw, config.vocab_size) or eos
        return dataclasses.replace(config, eos_token_ids=eos)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what changes the output: not the dtype, limits, eos ids or paths."""
        fields = dataclasses.asdict(self)
        for name in ("dtype", "max_position_embeddings", "eos_token_ids", "source"):
            del fields[name]
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(b"jaxlora config 1\0" + canonical.encode()).hexdigest()


def _parse(raw: JsonObject) -> ModelConfig:
    model_type = raw.string("model_type")
    if model_type not in FAMILY_DEFAULTS:
        known = ", ".join(sorted(FAMILY_DEFAULTS))
        raise raw.error("model_type", f"{model_type!r:.60} is not served (served: {known})")
    for key, accepted in _REFUSED_UNLESS.items():
        if raw.get(key) not in accepted:
            raise raw.error(key, f"{raw.get(key)!r:.60} is not served")
    if raw.string("hidden_act", "silu") != "silu":
        raise raw.error("hidden_act", f"{raw.get('hidden_act')!r:.60} is not served (served: silu)")

    defaults = FAMILY_DEFAULTS[model_type]
    hidden_size = raw.positive("hidden_size")
    num_heads = raw.positive("num_attention_heads")
    num_kv_heads = raw.positive(
        "num_key_value_heads", defaults.get("num_key_value_heads", num_heads), null=num_heads
    )
    if num_heads % num_kv_heads:
        raise raw.error("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} heads")
    head_dim = raw.positive(
        "head_dim",
        defaults.get("head_dim", hidden_size // num_heads),
        null=hidden_size // num_heads,
    )
    if head_dim < 2 or head_dim % 2:
        raise raw.error("head_dim", f"{head_dim}: rotary embeddings need an even number")
    num_layers = raw.positive("num_hidden_layers")
    if num_layers > _MAX_LAYERS:
        raise raw.error("num_hidden_layers", f"{num_layers} is more than {_MAX_LAYERS}")
    longest = raw.positive("max_position_embeddings", defaults["max_position_embeddings"])
    rope = _rope(raw, longest)
    if rope.kind == "yarn":
        longest = int(rope["original_max_position_embeddings"] * rope["factor"])
        if not 1 <= longest < 2**31:
            raise raw.error("max_position_embeddings", f"yarn stretches it to {longest} tokens")
    return ModelConfig(
        model_type=model_type,
        vocab_size=raw.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=raw.positive("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=raw.boolean("tie_word_embeddings", False),
        rope=rope,
        windows=_windows(raw, model_type, num_layers),
        attention_bias="attention_bias" in defaults and raw.boolean("attention_bias", False),
        mlp_bias="mlp_bias" in defaults and raw.boolean("mlp_bias", False),
        max_position_embeddings=longest,
        dtype=_dtype(raw),
        source=str(raw.path),
    )


def _dtype(raw: JsonObject) -> str:
    key = "dtype" if raw.get("dtype") is not None else "torch_dtype"
    name = (raw.string(key, "float32") if raw.get(key) is not None else "float32").removeprefix(
        "torch."
    )
    if name not in DTYPES:
        raise raw.error(key, f"{name!r:.60} is not served (served: {', '.join(DTYPES)})")
    return name


def _rope(raw: JsonObject, longest: int) -> RopeConfig:
    """rope_parameters (transformers 5), else rope_theta with rope_scaling. `longest` is
    max_position_embeddings.
    """
    key = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    scaling = raw.object(key)
    kind = scaling.string("rope_type", None) or scaling.string("type", None) or "default"
    if kind not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        raise raw.error(key, f"RoPE type {kind!r:.60} is not served (served: {known})")
    if scaling.get("partial_rotary_factor") not in (None, 1):
        raise scaling.error("partial_rotary_factor", "is not served")
    known_keys = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_TYPES[kind]}
    known_keys |= {"mscale", "mscale_all_dim"} if kind == "yarn" else set()
    for name in sorted(set(scaling) - known_keys):
        raise scaling.error(name, f"is not known for RoPE type {kind}")
    source = scaling if scaling.get("rope_theta") is not None else raw
    theta = source.number("rope_theta", 10000.0)
    if kind == "yarn":
        values = _yarn(raw, scaling, longest)
    else:
        values = _scaling(raw, scaling, ROPE_TYPES[kind], longest)
    for name, value in (("rope_theta", theta), *values.items()):
        if not 1e-9 <= value <= 1e12 and name != "truncate":
            raise scaling.error(name, f"must be positive, from 1e-9 to 1e12, got {value}")
    if kind == "yarn" and theta <= 1:
        raise scaling.error("rope_theta", f"must be above 1 for yarn, got {theta}")
    return RopeConfig(theta, kind, tuple(values.items()))


def _scaling(
    raw: JsonObject, scaling: JsonObject, names: tuple[str, ...], longest: int
) -> dict[str, float]:
    """The numbers called `names`. The original context's length may stand at the top, which wins,
    or nowhere: then it is `longest`.
    """
    values = {}
    for name in names:
        if name == "original_max_position_embeddings":
            source = scaling if raw.get(name) is None else raw
            values[name] = source.number(name, longest)
        else:
            values[name] = scaling.number(name)
    return values


def _yarn(raw: JsonObject, scaling: JsonObject, longest: int) -> dict[str, float]:
    """YaRN's parameters (Peng et al. 2023), with transformers' defaults."""
    values = _scaling(raw, scaling, ROPE_TYPES["yarn"][:2], longest)
    values["beta_fast"] = scaling.number("beta_fast", 32.0)
    values["beta_slow"] = scaling.number("beta_slow", 1.0)
    if values["beta_fast"] < values["beta_slow"]:
        raise scaling.error("beta_fast", f"is less than beta_slow: {values['beta_fast']}")
    values["truncate"] = float(scaling.boolean("truncate", True))
    stretch = math.log(max(values["factor"], 1.0))
    mscale, over_all = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    for name, value in (("mscale", mscale), ("mscale_all_dim", over_all)):
        if value < 0:
            raise scaling.error(name, f"must not be negative, got {value}")
    default = 0.1 * stretch + 1.0
    if mscale and over_all:
        default = (0.1 * mscale * stretch + 1.0) / (0.1 * over_all * stretch + 1.0)
    values["attention_factor"] = scaling.number("attention_factor", default)
    return values


def _windows(raw: JsonObject, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, by layer_types or each family's older keys."""
    if model_type == "llama":
        window, first = None, num_layers
    elif model_type == "mistral":  # absent means 4096, null means none
        window, first = raw.positive("sliding_window", 4096, null=None), 0
    else:
        window = raw.positive("sliding_window", 4096, null=None)
        window = window if raw.boolean("use_sliding_window", False) else None
        first = raw.integer("max_window_layers", 28)
    derived = tuple(window if layer >= first else None for layer in range(num_layers))
    if raw.get("layer_types") is None:
        return derived

    kinds = raw.strings("layer_types")
    if len(kinds) != num_layers:
        raise raw.error("layer_types", f"has {len(kinds)} entries for {num_layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise raw.error("layer_types", f"{kind!r:.60} is not served")
        if kind == "sliding_attention" and window is None:
            raise raw.error("layer_types", "has sliding_attention, but no sliding window is set")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if model_type in ("llama", "mistral") and windows != derived:
        raise raw.error("layer_types", f"per-layer attention is not served for {model_type}")
    return windows


def _eos_token_ids(raw: JsonObject, vocab_size: int) -> tuple[int, ...]:
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise raw.error("eos_token_id", f"wants token ids, got {token!r:.60}")
        if not 0 <= token < vocab_size:
            raise raw.error("eos_token_id", f"wants ids below {vocab_size}, got {token!r:.60}")
    return tuple(ids)
