"""How the Pallas kernels cut their work, per card: tilings.json, found by benchmarks.tune_lora.

A choice holds for every batch of a phase, so that a row's bits do not depend on its neighbours.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

import jax


_FILE = Path(__file__).with_name("tilings.json")


class Choice(NamedTuple):
    """One kernel's tiles and launch parameters."""

    tokens: int  # of a tile
    programs: int  # along the tiles of tokens, at most; each goes through several tiles then
    ranks: int  # rank rows of a tile, at most
    columns: int  # of a tile, at most; never more than the pool's w
    span: int  # columns that one program goes through
    warps: int
    stages: int  # of the software pipeline over column tiles; 1: none, loads unrolled


@functools.cache
def choices(device_kind: str) -> dict[str, Choice]:
    """Every kernel's choice on a card; what is good anywhere where the card was never tuned."""
    cards = json.loads(_FILE.read_text())
    return {
        kernel: Choice(**values)
        for kernel, values in {**cards["default"], **cards.get(device_kind, {})}.items()
    }


def choice(kernel: str) -> Choice:
    return choices(jax.devices()[0].device_kind)[kernel]


def keep(card: str, found: dict[str, dict[str, int]]) -> None:
    """Write a card's choices into tilings.json, beside what it has."""
    cards = json.loads(_FILE.read_text())
    cards.setdefault(card, {}).update(found)
    kernels = (
        f' "{card}": {{\n'
        + ",\n".join(f'  "{k}": {json.dumps(values)}' for k, values in sorted(of_card.items()))
        + "\n }"
        for card, of_card in cards.items()
    )
    _FILE.write_text("{\n" + ",\n".join(kernels) + "\n}\n")
    choices.cache_clear()
