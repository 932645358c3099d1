"""`Adapter`: a named, immutable set of factors, and its identity key."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Factors:
    """One module's low-rank update: delta(x) = scale * (B (A x) + b_bias).

    With DoRA the module's output, but for the base's bias, is then multiplied by magnitude /
    ||W + scale B A||, the norm being that of each output's row.
    """

    a: np.ndarray  # [rank, d_in], dtype as in the file
    b: np.ndarray  # [d_out, rank]
    scale: float  # alpha / r, or alpha / sqrt(r) with rsLoRA; strength not included
    b_bias: np.ndarray | None = None  # lora_bias: [d_out]
    magnitude: np.ndarray | None = None  # DoRA's: [d_out]

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def has_effect(self) -> bool:
        """Whether the delta is other than zero for some input."""
        if not self.scale:
            return False
        if self.b_bias is not None and self.b_bias.any():
            return True
        # One random input: B (A x) is exactly zero in float64 for a zero delta (also where rows of
        # A meet zero columns of B) and never for another.
        x = np.random.default_rng(0).uniform(0.5, 1.0, self.a.shape[1])
        return bool(np.any(self.b.astype(np.float64) @ (self.a.astype(np.float64) @ x)))


# A place an adapter edits: (layer, canonical module name); an outer module's layer is 0.
Site = tuple[int, str]


class Vector(enum.IntEnum):
    """What an adapter may have over a module's outputs, beside factors."""

    GAIN = 0  # multiplies the output without its bias: DoRA
    BIAS = 1  # is there in place of the base's


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """Rows of the embedding's or the head's weight that replace the base's."""

    ids: tuple[int, ...]  # ascending
    rows: np.ndarray  # [ids, hidden], dtype as in the file


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
    # [d_out] each, in place of the base's.
    biases: Mapping[Site, np.ndarray] = dataclasses.field(default_factory=dict)
    # By canonical module. The head of a tied base has the embedding's own object.
    token_rows: Mapping[str, TokenRows] = dataclasses.field(default_factory=dict)
    # Copies of the base's weights that lay in the file, by canonical module: must be the base's.
    base_copies: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    key: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", identity_key(self))

    @property
    def max_rank(self) -> int:
        return max(factors.rank for factors in self.factors.values())

    @property
    def factors_change(self) -> bool:
        """Whether some factors' delta, as served in float32, is other than zero for some input."""
        return any(
            np.float32(factors.scale * self.strength) != 0 and factors.has_effect
            for factors in self.factors.values()
        )

    @property
    def may_be_the_base(self) -> bool:
        """Whether only the base's weights can tell if the adapter changes anything."""
        dora = any(factors.magnitude is not None for factors in self.factors.values())
        return bool(dora or self.biases or self.token_rows) and not self.factors_change

    @property
    def vectors(self) -> list[tuple[Site, Vector]]:
        """Where the adapter has a gain or a bias of its own, in a fixed order."""
        gains = [site for site, factors in self.factors.items() if factors.magnitude is not None]
        added = [site for site, factors in self.factors.items() if factors.b_bias is not None]
        biases = sorted({*self.biases, *added})
        return [(site, Vector.GAIN) for site in gains] + [(site, Vector.BIAS) for site in biases]

    @property
    def stored_token_rows(self) -> list[TokenRows]:
        """The distinct sets of rows."""
        return list({id(rows): rows for rows in self.token_rows.values()}.values())

    def first_position(self, prompt: Sequence[int]) -> int | None:
        """The first position of a prompt that runs with the adapter, as all after it do.

        0 for plain LoRA. An activated one (aLoRA) begins where its invocation tokens stand for the
        last time; None where they don't: peft then answers with the base model, a server should
        not. Source: peft 0.21, `calculate_alora_offsets`.
        """
        return last_start(self.invocation_tokens, prompt)


def last_start(wanted: Sequence[int], tokens: Sequence[int]) -> int | None:
    """Where `wanted` stands in `tokens` for the last time; 0 where nothing is wanted."""
    if not wanted:
        return 0
    for start in range(len(tokens) - len(wanted), -1, -1):
        found = tokens[start : start + len(wanted)]
        if found[0] == wanted[0] and tuple(found) == tuple(wanted):
            return start
    return None


def identity_key(adapter: Adapter) -> str:
    """SHA-256 over all that changes the adapter's output, and nothing else (not its name or path).

    Covers canonical module names, dtype, shape and bytes of every tensor, scales, the strength, the
    ids of token rows, aLoRA's invocation tokens and the base's config fingerprint, each field with
    its length, so that no two adapters share a preimage. Copies of the base's weights are left out:
    they change nothing.
    """
    digest = hashlib.sha256(b"jaxlora adapter identity 1\0")

    def update(field: str | bytes) -> None:
        data = field.encode() if isinstance(field, str) else field
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)

    def update_tensor(tensor: np.ndarray) -> None:
        update(json.dumps([str(tensor.dtype), list(tensor.shape)]))
        update(np.ascontiguousarray(tensor).tobytes())

    update(adapter.base_fingerprint)
    update(float(adapter.strength).hex())
    for layer, module in sorted(adapter.factors):
        factors = adapter.factors[layer, module]
        update(json.dumps([layer, module]))
        update(float(factors.scale).hex())
        update_tensor(factors.a)
        update_tensor(factors.b)
        for name in ("b_bias", "magnitude"):
            if (tensor := getattr(factors, name)) is not None:
                update(json.dumps([name]))
                update_tensor(tensor)
    for site in sorted(adapter.biases):
        update(json.dumps(["bias", *site]))
        update_tensor(adapter.biases[site])
    for module in sorted(adapter.token_rows):
        update(json.dumps(["token_rows", module, adapter.token_rows[module].ids]))
        update_tensor(adapter.token_rows[module].rows)
    if adapter.invocation_tokens:
        update(json.dumps({"invocation_tokens": adapter.invocation_tokens}))
    return digest.hexdigest()
