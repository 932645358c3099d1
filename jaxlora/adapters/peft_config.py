"""adapter_config.json -> rank, scale and target of every module, or a refusal by name.

Source: peft 0.21, `LoraConfig`, `LoraModel._create_and_replace` (rank and alpha of a module) and
`LoraLayer.update_layer` (scale).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxlora.adapters.patterns import Budget, Pattern
from jaxlora.adapters.peft_targets import Targets, parse_targets
from jaxlora.adapters.strict_json import parse_object, show
from jaxlora.adapters.support import config_refusal
from jaxlora.errors import AdapterError


CONFIG_NAME = "adapter_config.json"
MAX_PATTERNS = 4096  # peft's EVA writes one for every module of a model
_MLX_KEYS = {"fine_tune_type", "lora_parameters", "lora_layers"}


@dataclasses.dataclass(frozen=True)
class PeftConfig:
    """A LoRA config, every key of which was applied, checked, or found not to matter."""

    where: str
    rank: int
    alpha: float
    rank_patterns: tuple[tuple[Pattern, int], ...]  # in file order: the first match holds
    alpha_patterns: tuple[tuple[Pattern, float], ...]
    use_rslora: bool
    targets: Targets
    layers: tuple[int, ...]  # layers_to_transform
    base_name: str | None
    invocation_tokens: tuple[int, ...]  # aLoRA's; empty where it is plain LoRA
    bias: str  # "none", "lora_only" or "all"
    lora_bias: bool
    use_dora: bool
    token_ids: Mapping[str, tuple[int, ...]]  # trainable_token_indices: name, or its end -> ids
    ensure_weight_tying: bool

    def rank_of(self, path: str) -> int:
        """The rank of the module at `path` (as trained, without "base_model.model.")."""
        return next((rank for p, rank in self.rank_patterns if p.matches(path)), self.rank)

    def scale_of(self, path: str, rank: int) -> float:
        """alpha / rank, or alpha / sqrt(rank) with rsLoRA, of the module at `path`."""
        alpha = next((alpha for p, alpha in self.alpha_patterns if p.matches(path)), self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def parse_peft_config(data: bytes, where: str) -> PeftConfig:
    """The config in an adapter_config.json's bytes; `where` names the file. Raises AdapterError."""
    config = parse_object(data, where)
    _refuse_other_formats(config, where)
    _refuse_unserved(config, where)
    for key in ("r", "lora_alpha", "target_modules"):
        if key not in config:
            raise AdapterError(f"{where}: {key} is missing")
    _refuse_never_active(config, where)
    _refuse_combinations(config, where)
    budget = Budget()
    layers = config.get("layers_to_transform")
    return PeftConfig(
        where=where,
        rank=_checked_rank(config["r"], where, "r"),
        alpha=_checked_alpha(config["lora_alpha"], where, "lora_alpha"),
        rank_patterns=_patterns(config, "rank_pattern", _checked_rank, where, budget),
        alpha_patterns=_patterns(config, "alpha_pattern", _checked_alpha, where, budget),
        use_rslora=bool(config.get("use_rslora")),
        targets=parse_targets(config, where, budget),
        layers=() if layers is None else (layers,) if isinstance(layers, int) else tuple(layers),
        base_name=config.get("base_model_name_or_path"),
        invocation_tokens=tuple(config.get("alora_invocation_tokens") or ()),
        bias=config.get("bias", "none"),
        lora_bias=bool(config.get("lora_bias")),
        use_dora=bool(config.get("use_dora")),
        token_ids=_token_ids(config, where),
        ensure_weight_tying=bool(config.get("ensure_weight_tying")),
    )


def _refuse_unserved(config: dict[str, Any], where: str) -> None:
    refusals = [
        f"{_name(key)} is {show(value)}: {reason}"
        for key, value in config.items()
        if (reason := config_refusal(key, value)) is not None
    ]
    if refusals:
        more = f"; and {len(refusals) - 3} more" if len(refusals) > 3 else ""
        raise AdapterError(f"{where}: {'; '.join(refusals[:3])}{more}")


def _name(key: str) -> str:
    return key if key.isidentifier() and key.isascii() and len(key) < 80 else show(key)


def _refuse_other_formats(config: dict[str, Any], where: str) -> None:
    if "peft_type" in config:
        return
    if not _MLX_KEYS.isdisjoint(config):
        raise AdapterError(
            f"{where}: an MLX adapter, not a PEFT one: convert it to PEFT "
            "(transpose A and B, lora_alpha = scale * rank)"
        )
    raise AdapterError(f"{where}: no peft_type: not the config of a PEFT adapter")


def _refuse_never_active(config: dict[str, Any], where: str) -> None:
    # Only peft's PeftModelForCausalLM looks for the tokens; its other classes answer as the base.
    task = config.get("task_type")
    if config.get("alora_invocation_tokens") and task != "CAUSAL_LM":
        raise AdapterError(
            f"{where}: alora_invocation_tokens with task_type {show(task)}: peft activates such an "
            "adapter for CAUSAL_LM only: if it was trained for that, write it there"
        )


def _refuse_combinations(config: dict[str, Any], where: str) -> None:
    """What peft refuses to load together, or what has no meaning for one request's tokens."""
    used = {key for key in ("use_dora", "lora_bias", "trainable_token_indices") if config.get(key)}
    if config.get("bias", "none") != "none":
        used.add("bias")
    if config.get("alora_invocation_tokens"):
        # Biases and token rows would hold before the invocation too, where KV must be the base's.
        for key in ("use_dora", "trainable_token_indices", "bias"):
            if key in used:
                raise AdapterError(
                    f"{where}: alora_invocation_tokens with {key}: an activated adapter is the base"
                    f" model until it begins: train without {key}"
                )
    if {"use_dora", "lora_bias"} <= used:
        raise AdapterError(f"{where}: use_dora with lora_bias: peft has no such adapters")


def _token_ids(config: dict[str, Any], where: str) -> dict[str, tuple[int, ...]]:
    value = config.get("trainable_token_indices")
    lists = value if isinstance(value, dict) else {"embed_tokens": value} if value else {}
    for name, ids in lists.items():
        if len(set(ids)) < len(ids):
            raise AdapterError(f"{where}: trainable_token_indices names a token of {name} twice")
    return {name: tuple(ids) for name, ids in lists.items()}


def _checked_rank(value: Any, where: str, name: str) -> int:
    # No factor is that large, and sqrt() of an integer of hundreds of digits is no float.
    if type(value) is not int or not 1 <= value <= 2**31:
        raise AdapterError(f"{where}: {name} is {show(value)}: a rank is an integer from 1")
    return value


def _checked_alpha(value: Any, where: str, name: str) -> float:
    if type(value) not in (int, float) or not abs(value) <= float(np.finfo(np.float32).max):
        raise AdapterError(
            f"{where}: {name} is {show(value)}: alpha is a number in float32's range"
        )
    return value


def _patterns(
    config: dict[str, Any], key: str, check: Any, where: str, budget: Budget
) -> tuple[tuple[Pattern, Any], ...]:
    patterns = config.get(key) or {}
    if len(patterns) > MAX_PATTERNS:
        raise AdapterError(f"{where}: {key} has {len(patterns)} patterns (at most {MAX_PATTERNS})")
    return tuple(
        (
            Pattern.suffix(expression, f"{where}: {key}", budget),
            check(value, where, f"{key}[{show(expression)}]"),
        )
        for expression, value in patterns.items()
    )
