"""Cut a growing text at the first stop string, before it or behind it, never inside it."""

from __future__ import annotations

import re
from collections.abc import Sequence


class StopStringFilter:
    """Passes an answer's text on until one of `stops` is complete. One object per answer.

    The match is the one that is complete first, reading character by character, and of several that
    end at the same character the longest; so neither the text nor the match depends on how the text
    was split into pushes. Work is linear in the text and in the stop strings, whatever they are.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """With `include` the stop string is shown. Raises ValueError for an empty stop string."""
        self._include = include
        self._matchers = [_Matcher(stop) for stop in stops]
        # Where a stop string may begin: most text has no such place, and passes without a search.
        self._begin = re.compile("|".join(re.escape(first) for first in {s[0] for s in stops}))
        self._held = ""  # read but not passed on: it may be the start of a stop string
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Read `text`; returns the text now safe to show, and the stop string once one is complete.

        The stop string itself is shown whole with `include`, else not at all. After a match nothing
        more is shown.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._matchers:
            return text, None
        seen = self._held + text
        start = len(self._held)
        if not start:
            begin = self._begin.search(text)
            if begin is None:
                return text, None
            start = begin.start()
        for position, character in enumerate(seen[start:], start=start + 1):
            complete = [matcher.stop for matcher in self._matchers if matcher.step(character)]
            if complete:
                self._matched = max(complete, key=len)
                self._held = ""
                end = position if self._include else position - len(self._matched)
                return seen[:end], self._matched
        safe = len(seen) - max(matcher.length for matcher in self._matchers)
        self._held = seen[safe:]
        return seen[:safe], None

    def flush(self) -> str:
        """The text held back, once the answer has ended without a match."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Knuth, Morris and Pratt's search for one string, fed a character at a time."""

    def __init__(self, stop: str) -> None:
        if not stop:
            raise ValueError("stop strings must not be empty")
        self.stop = stop
        self.length = 0  # of the longest start of `stop` that the text ends with
        # borders[n]: length of the longest proper suffix of stop[:n] that also starts it.
        self._borders = [0, 0]
        for character in stop[1:]:
            self._borders.append(self._extend(self._borders[-1], character))

    def step(self, character: str) -> bool:
        """Whether `character` completes the stop string. Not to be called after that."""
        self.length = self._extend(self.length, character)
        return self.length == len(self.stop)

    def _extend(self, length: int, character: str) -> int:
        while length and self.stop[length] != character:
            length = self._borders[length]
        return length + 1 if self.stop[length] == character else 0
