"""How the Pallas kernels cut their work, per card: tilings.json, found by benchmarks.tune_lora.

A LoRA kernel's choice holds for every batch of a phase, so that a delta's bits do not depend on a
row's neighbours. A base product has one for up to 16 rows and one for up to 64.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

import jax


NARROW_RANK = 32
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


class ProductChoice(NamedTuple):
    """The tiles and launch parameters of a product of few rows."""

    columns: int  # of the output a program makes
    depth: int  # of d_in a step
    programs: int  # wanted at least: d_in is split until there are as many
    warps: int
    stages: int


@functools.cache
def choices(device_kind: str) -> dict[str, Choice]:
    """Every kernel's choice on a card; what is good anywhere where the card was never tuned.

    "beside" is one for a kernel that runs beside a product; it says what differs from the kernel's
    own, which is never how a sum is cut.
    """
    cards = json.loads(_FILE.read_text())
    of_card = {**cards["default"], **cards.get(device_kind, {})}
    return {
        kernel: Choice(**{**of_card[kernel.removesuffix(" beside")], **values})
        for kernel, values in of_card.items()
        if not kernel.startswith("product")
    }


def choice(kernel: str, max_rank: int) -> Choice:
    """This card's choice for tables of slots up to `max_rank`; "wide" is one for high ranks."""
    of_card = choices(jax.devices()[0].device_kind)
    wide = of_card.get(f"{kernel} wide")
    return wide if wide is not None and max_rank > NARROW_RANK else of_card[kernel]


@functools.cache
def product_choice(rows: int, d_out: int, d_in: int) -> ProductChoice | None:
    """This card's choice for a product with a tile of `rows` rows; None for a card never tuned.

    A shape that was tuned has a choice of its own.
    """
    cards = json.loads(_FILE.read_text())
    of_card = cards.get(jax.devices()[0].device_kind, {})
    of_rows = of_card.get(f"product_{rows}")
    found = of_card.get(f"product_{rows} {d_out}x{d_in}", of_rows)
    return None if found is None else ProductChoice(**found)


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
    product_choice.cache_clear()
