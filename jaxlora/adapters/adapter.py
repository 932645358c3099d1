"""`Adapter`: a named, immutable set of factors, and its identity key."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping

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
    key: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", identity_key(self))

    @property
    def max_rank(self) -> int:
        return max(factors.rank for factors in self.factors.values())


def identity_key(adapter: Adapter) -> str:
    """SHA-256 over all that changes the adapter's output, and nothing else (not its name or path).

    Covers canonical module names, dtype, shape and bytes of every tensor, scales, the strength and
    the base's config fingerprint, each field with its length, so that no two adapters share a
    preimage.
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
    return digest.hexdigest()
