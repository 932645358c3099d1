"""The arrays a LoRA kernel reads: the factor pool, the slot tables, and a step's routing.

Layout. All factors of all adapters live in one array, `pool[rows, w]`. A factor of rank r and width
d is ceil(d / w) blocks of r rows, one after the other: block c holds columns c*w to (c+1)*w of its
r rank rows, zero past column d. So column block c of rank row i is pool row

    first_row + c * r + i.

A is stored as [rank, d_in] and B transposed, as [rank, d_out]: both stream along a width.

A slot is what a token is routed by. Slot 0 is the base model: rank 0 everywhere. A slot has one or
more parts; the delta of a token in slot s at module kind k of layer l is

    delta = sum over parts p of scale[k, l, s, p] * B_p (A_p x).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jax import Array
from jaxtyping import Float, Int


SIDE_A, SIDE_B = 0, 1
TILE = 16  # tokens of a decode tile


class FactorTables(NamedTuple):
    """One rank's factor pool and the slot tables that index it."""

    pool: Float[Array, "rows w"]
    first_row: Int[Array, "kinds 2 layers slots parts"]  # side 0 is A, side 1 is B
    rank: Int[Array, "kinds layers slots parts"]
    scale: Float[Array, "kinds layers slots parts"]  # float32, strength included


class Routing(NamedTuple):
    """Which token of a step uses which slot. Made on the host, but for `entries`.

    `segments` rows are (slot, start, length): runs of tokens of one slot, in token order, slot 0
    left out, length 0 where unused. Only the prefill kernels read them.

    `tiles` rows are (slot, TILE token numbers): each token with an adapter is in one tile of its
    slot. A token number past the last token fills a tile up; an unused row has slot 0 and stands
    behind the used ones. Only the decode kernels read them.

    `entries` says for every layer where each tile's factors lie; `api.resolve` makes it of the
    tables, once for all layers, for the kernels that want it. They believe it: after a slot or the
    tiles changed, old entries lead to what lay there before.
    """

    slots: Int[Array | np.ndarray, "tokens"]
    segments: Int[Array | np.ndarray, "segments 3"]
    tiles: Int[Array | np.ndarray, "tiles 1+TILE"]
    entries: tuple[Int[Array, "kinds tiles 4*parts"], ...] | None = None


def decode_tiles(slots: Int[np.ndarray, "tokens"]) -> Int[np.ndarray, "tokens 1+TILE"]:
    """`Routing.tiles` of a decode step, the used ones first.

    Raises ValueError where `slots` are not a row of numbers from 0 on.
    """
    slots = np.asarray(slots)
    if slots.ndim != 1 or (slots < 0).any():
        raise ValueError(f"slots: wanted [tokens] from 0 on, got {slots.tolist()}")
    tokens = len(slots)
    tiles = np.full((tokens, 1 + TILE), tokens, np.int32)
    tiles[:, 0] = 0
    order = np.argsort(slots, kind="stable")[np.count_nonzero(slots == 0) :]
    ordered = slots[order]
    place = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    tile = np.cumsum(place % TILE == 0) - 1
    tiles[tile, 0] = ordered
    tiles[tile, 1 + place % TILE] = order
    return tiles
