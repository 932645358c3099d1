"""Blocks of the paged KV pool: who has which, and what each full block holds.

Plain Python. Block 0 is scrap: padding writes go there, no sequence ever owns it. A full block is
known by a hash of all tokens up to its end and of which of them ran with which adapter, so that
blocks of different KV rows can never be taken for each other. The base model's hashes are what they
would be without adapters, and so are those of the blocks before an activated LoRA begins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Tokens

import numpy as np


SCRAP_BLOCK = 0


ROOT_HASH = b""  # the hash before a sequence's first block


def adapter_hash(parent: bytes, adapter_key: str, start: int) -> bytes:
    """What `parent` becomes for the block in which an adapter begins, at position `start`."""
    where = start.to_bytes(8, "little")
    return hashlib.sha256(b"adapter\0" + parent + bytes.fromhex(adapter_key) + where).digest()


def block_hash(parent: bytes, token_ids: Tokens[int]) -> bytes:
    """The hash of a full block of tokens behind `parent`."""
    return hashlib.sha256(parent + np.asarray(token_ids, "<i4").tobytes()).digest()


class BlockTable:
    """One sequence's blocks, in order, and the hashes of those that are full.

    Tokens from position `adapter_start` on run with the adapter of `adapter_key` (None: none do).
    """

    def __init__(self, block_size: int, adapter_key: str | None, adapter_start: int = 0) -> None:
        self.block_size = block_size
        self.blocks: list[int] = []
        self.hashes: list[bytes] = []
        self._adapter_key, self._adapter_start = adapter_key, adapter_start

    @property
    def capacity(self) -> int:
        """Tokens that fit in the blocks held."""
        return len(self.blocks) * self.block_size

    def blocks_for(self, tokens: int) -> int:
        """Further blocks needed to hold `tokens` tokens."""
        return max(0, -(-tokens // self.block_size) - len(self.blocks))

    def record_full(self, token_ids: Tokens[int]) -> None:
        """Hash the blocks that `token_ids`, the sequence's tokens with KV so far, now fill."""
        size = self.block_size
        while (done := len(self.hashes)) < len(token_ids) // size:
            parent = self.hashes[-1] if self.hashes else ROOT_HASH
            if self._adapter_key is not None and done == self._adapter_start // size:
                parent = adapter_hash(parent, self._adapter_key, self._adapter_start)
            self.hashes.append(block_hash(parent, token_ids[done * size : (done + 1) * size]))


class BlockPool:
    """The free blocks of a pool of `blocks` blocks, the scrap block included in the count."""

    def __init__(self, blocks: int, block_size: int) -> None:
        if blocks < 2:
            raise ValueError(f"a KV pool needs at least 2 blocks (one is scrap), got {blocks}")
        self.blocks, self.block_size = blocks, block_size
        self._free = list(range(blocks - 1, SCRAP_BLOCK, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def usable(self) -> int:
        """All blocks but the scrap block."""
        return self.blocks - 1

    @property
    def usage(self) -> float:
        """Share of the usable blocks in use, 0 to 1."""
        return 1 - self.free / self.usable

    def can_grow(self, table: BlockTable, tokens: int) -> bool:
        """Whether `table` could be grown to hold `tokens` tokens."""
        return table.blocks_for(tokens) <= self.free

    def grow(self, table: BlockTable, tokens: int) -> None:
        """Give `table` the blocks to hold `tokens` tokens. Ask `can_grow` first."""
        for _ in range(table.blocks_for(tokens)):
            table.blocks.append(self._free.pop())

    def release(self, table: BlockTable) -> None:
        """Take back all blocks of `table`, which is empty afterwards."""
        self._free.extend(reversed(table.blocks))
        table.blocks.clear()
        table.hashes.clear()

    def check_integrity(self, tables: Tokens[BlockTable]) -> None:
        """Every block but the scrap block is free or in one table, once."""
        seen = sorted([*self._free, *(block for table in tables for block in table.blocks)])
        assert seen == list(range(1, self.blocks)), "a KV block is lost, shared or owned twice"
