"""Small adapters and loaders for tests."""

from __future__ import annotations

import numpy as np

from jaxlora.adapters.adapter import Adapter, Factors
from jaxlora.adapters.modules import AdaptableModule, ModuleTable, ParallelKind
from jaxlora.errors import CapacityError


TINY_MODULES = ModuleTable(
    num_layers=2,
    modules=(
        AdaptableModule("self_attn.q_proj", 48, 64, ParallelKind.COLUMN),
        AdaptableModule("self_attn.o_proj", 64, 48, ParallelKind.ROW),
    ),
    vocab_size=50,
)


def tiny_adapter(
    name: str,
    *,
    seed: int = 0,
    rank: int = 3,
    strength: float = 1.0,
    modules: ModuleTable = TINY_MODULES,
    dtype: str = "float32",
    size: float = 1.0,
    invocation_tokens: tuple[int, ...] = (),
) -> Adapter:
    """Random factors, of standard deviation `size`, on every module of every layer."""
    rng = np.random.default_rng(seed)
    factors = {
        (layer, module.name): Factors(
            a=rng.normal(size=(rank, module.d_in), scale=size).astype(dtype),
            b=rng.normal(size=(module.d_out, rank), scale=size).astype(dtype),
            scale=0.5 + 0.1 * layer,
        )
        for layer in range(modules.num_layers)
        for module in modules.modules
    }
    return Adapter(name, f"adapters/{name}", factors, "tiny", strength, invocation_tokens)


class CountingLoader:
    """A `Loader` with numbered slots and no device."""

    def __init__(self, slots: int = 8) -> None:
        self.free_slots = list(range(slots, 0, -1))

    def load(self, adapter: Adapter) -> int:
        if not self.free_slots:
            raise CapacityError("no free adapter slot")
        return self.free_slots.pop()

    def check(self, adapter: Adapter) -> None:
        pass

    def free(self, slot: int) -> None:
        self.free_slots.append(slot)
