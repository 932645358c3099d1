"""`Adapter`: a named, immutable set of factors, and its identity key."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Factors:
    """One module's low-rank update: delta(x) = scale * B (A x)."""

    a: np.ndarray  # [rank, d_in], dtype as in the file
    b: np.ndarray  # [d_out, rank]
    scale: float  # alpha / r, or alpha / sqrt(r) with rsLoRA; strength not included

    @property
    def rank(self) -> int:
        return self.a.shape[0]


# A place an adapter edits: (layer, canonical module name inside the layer).
Site = tuple[int, str]


@dataclasses.dataclass(frozen=True)
class Adapter:
    """What an adapter folder says, checked in full against one base model.

    Arrays must not be written to: the identity key was taken from their bytes.
    """

    name: str
    source: str  # the folder it was read from, for messages and /v1/models
    factors: Mapping[Site, Factors]
    base_fingerprint: str
    strength: float = 1.0
    invocation_tokens: tuple[int, ...] = ()  # aLoRA's; empty: every token runs with the adapter
    key: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", identity_key(self))

    @property
    def max_rank(self) -> int:
        return max(factors.rank for factors in self.factors.values())

    def first_position(self, prompt: Sequence[int]) -> int | None:
        """The first position of a prompt that runs with the adapter, as all after it do.

        0 for plain LoRA. An activated one (aLoRA) begins where its invocation tokens stand for the
        last time; None where they don't: then no token of the request runs with it, nor does one
        that is generated. Source: peft 0.21, `calculate_alora_offsets`.
        """
        wanted = self.invocation_tokens
        if not wanted:
            return 0
        for start in range(len(prompt) - len(wanted), -1, -1):
            if prompt[start] == wanted[0] and tuple(prompt[start : start + len(wanted)]) == wanted:
                return start
        return None


def identity_key(adapter: Adapter) -> str:
    """SHA-256 over all that changes the adapter's output, and nothing else (not its name or path).

    Covers canonical module names, dtype, shape and bytes of every tensor, scales, the strength,
    aLoRA's invocation tokens and the base's config fingerprint, each field with its length, so that
    no two adapters share a preimage.
    """
    digest = hashlib.sha256(b"jaxlora adapter identity 1\0")

    def update(field: str | bytes) -> None:
        data = field.encode() if isinstance(field, str) else field
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)

    update(adapter.base_fingerprint)
    update(float(adapter.strength).hex())
    for layer, module in sorted(adapter.factors):
        factors = adapter.factors[layer, module]
        update(json.dumps([layer, module]))
        update(float(factors.scale).hex())
        for tensor in (factors.a, factors.b):
            update(json.dumps([str(tensor.dtype), list(tensor.shape)]))
            update(np.ascontiguousarray(tensor).tobytes())
    if adapter.invocation_tokens:
        update(json.dumps({"invocation_tokens": adapter.invocation_tokens}))
    return digest.hexdigest()
