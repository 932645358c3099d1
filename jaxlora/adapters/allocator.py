"""An allocator of row runs. Plain Python: it hands out numbers and touches no device."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


class RunAllocator:
    """Hands out runs of consecutive rows of a pool of `rows` rows: first fit, frees coalesce."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._free: list[tuple[int, int]] = [(0, rows)] if rows else []  # (start, length), sorted
        self._used: dict[int, int] = {}  # start -> length

    @property
    def free_rows(self) -> int:
        return sum(length for _, length in self._free)

    @property
    def fragmentation(self) -> float:
        """1 - largest free run / free rows; 0 when nothing is free."""
        free = self.free_rows
        return 1 - max(length for _, length in self._free) / free if free else 0.0

    def allocate(self, lengths: Sequence[int]) -> list[int] | None:
        """The start of a run for each (positive) length; None, changing nothing, if they don't fit.

        The runs follow one another where a free run is long enough for all of them.
        """
        if (start := self._take(sum(lengths))) is not None:
            starts = []
            for length in lengths:
                self._used[start] = length
                starts.append(start)
                start += length
            return starts
        starts = []
        for length in lengths:
            if (start := self._take(length)) is None:
                self.release(starts)
                return None
            self._used[start] = length
            starts.append(start)
        return starts

    def release(self, starts: Sequence[int]) -> None:
        """Free runs handed out by `allocate`. Raises KeyError for a start that is not in use."""
        for start in starts:
            self._give_back(start, self._used.pop(start))

    def check_integrity(self) -> None:
        """Free and used runs tile the pool without overlap, and no two free runs touch."""
        free = [(start, length, True) for start, length in self._free]
        used = [(start, length, False) for start, length in self._used.items()]
        row, was_free = 0, False
        for start, length, is_free in sorted(free + used):
            assert length > 0 and start == row, f"a run at row {start}, one expected at {row}"
            assert not (was_free and is_free), f"two free runs touch at row {start}"
            row, was_free = start + length, is_free
        assert row == self.rows, f"runs cover {row} of {self.rows} rows"

    def _take(self, length: int) -> int | None:
        for index, (start, free) in enumerate(self._free):
            if free >= length:
                rest = [(start + length, free - length)] if free > length else []
                self._free[index : index + 1] = rest
                return start
        return None

    def _give_back(self, start: int, length: int) -> None:
        index = bisect.bisect(self._free, (start, length))
        if index < len(self._free) and start + length == self._free[index][0]:
            length += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == start:
            index -= 1
            start, length = self._free[index][0], self._free.pop(index)[1] + length
        self._free.insert(index, (start, length))
