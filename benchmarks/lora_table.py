"""The cases of the LoRA kernels' table: what ours, XLA's einsum and the peer are timed on."""

from __future__ import annotations

from typing import NamedTuple


W, SLOTS, LAYERS, LINKS = 256, 64, 32, 32
RANKS, TOKENS, ADAPTERS = (16, 64), (1, 16, 64, 256), (1, 8, 64)
PREFILL_TOKENS, PREFILL_ADAPTERS, PREFILL_LINKS = 8192, (1, 32), 8


class Shape(NamedTuple):
    name: str
    d_in: int
    widths: tuple[int, ...]

    @property
    def kinds(self) -> tuple[int, ...]:
        return tuple(range(len(self.widths)))

    def blocks(self) -> list[int]:
        """Column blocks of A and B of each kind, in the pool's order."""
        return [d // W for width in self.widths for d in (self.d_in, width)]


SHAPES = (
    Shape("4096->4096", 4096, (4096,)),
    Shape("4096->(4096,1024,1024)", 4096, (4096, 1024, 1024)),
    Shape("4096->(12288,12288)", 4096, (12288, 12288)),
    Shape("12288->4096", 12288, (4096,)),
)

Case = tuple[str, int, int]  # phase, tokens, adapters


def cases() -> list[Case]:
    out: list[Case] = [("decode", t, a) for t in TOKENS for a in ADAPTERS if a <= t]
    return out + [("prefill", PREFILL_TOKENS, a) for a in PREFILL_ADAPTERS]


def case_name(shape: Shape, rank: int, case: Case) -> str:
    return f"{shape.name} r{rank} {case[0]} {case[1]}/{case[2]}"
