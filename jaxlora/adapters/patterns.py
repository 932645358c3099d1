"""PEFT's regular expressions over module paths, matched in bounded time.

PEFT hands `target_modules`, `exclude_modules` and the keys of `rank_pattern` and `alpha_pattern` to
Python's `re`, which backtracks: `(.*)*x` takes time exponential in the path. An adapter's file must
not be able to stop the server, so only patterns without repetition, groups or classes go to `re`.
The others are matched by sets of positions: a set is an integer with a bit per position, every
element of the pattern maps a set of starts to the set of ends it can reach, and the work is
counted. For what is accepted here (no backreferences, no atomic groups, no flags) whether a whole
path matches does not depend on the order of the search, so the answer is `re`'s.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from jaxlora.adapters.strict_json import reason_of, show
from jaxlora.errors import AdapterError


MAX_LENGTH = 20_000
# For all patterns of a config over all paths of a model: a few seconds. Unsloth's long target
# regex over 560 modules takes a fifth of it.
MAX_WORK = 3_000_000

# Python's own parser, without which `re`'s syntax would have to be written down again here. It is
# private, and present in every version from 3.11 on.
_parser: Any = importlib.import_module("re._parser")
_PLAIN = re.compile(r"(?:[\w.|-]|\\\.)*", re.ASCII)


class Budget:
    """The work that all patterns of one config may take together. Mutated by every match."""

    def __init__(self, work: int = MAX_WORK) -> None:
        self._left = work

    def spend(self, work: int, where: str) -> None:
        """Raises AdapterError, beginning with `where`, when nothing is left."""
        self._left -= work
        if self._left < 0:
            raise AdapterError(f"{where} takes too long to match: write it more simply")


class Pattern:
    """A regular expression that must match a whole module path (one line of ASCII)."""

    def __init__(self, expression: str, where: str, budget: Budget, prefix: str = "") -> None:
        """`prefix` is a regular expression before the given one, which stays one unit.

        Raises AdapterError, beginning with `where`, for what `re` or this matcher refuses.
        """
        self._where = f"{where}: the pattern {show(expression)}"
        self._budget = budget
        self._length = len(expression)
        if len(expression) > MAX_LENGTH:
            raise AdapterError(f"{self._where} is longer than {MAX_LENGTH} characters")
        is_plain = _PLAIN.fullmatch(expression) is not None
        budget.spend((4 if is_plain else 100) * len(expression), self._where)  # parsing is slow
        self._compiled, self._tree = None, None
        try:
            if is_plain:
                self._compiled = re.compile(f"{prefix}({expression})")
            else:
                self._tree = _parser.parse(expression)
                self._refuse_unsupported(self._tree)
                if prefix:  # after the pattern by itself: "a)|(b" is none
                    self._tree = _parser.parse(f"{prefix}({expression})")
        except (re.error, RecursionError, OverflowError, ValueError) as error:
            raise AdapterError(
                f"{self._where} is not a regular expression: {reason_of(error)}"
            ) from None
        if self._tree is not None and self._tree.state.flags & ~re.UNICODE.value:
            raise AdapterError(f"{self._where} sets flags: write it without")

    @classmethod
    def suffix(cls, expression: str, where: str, budget: Budget) -> Pattern:
        """peft's rule for rank_pattern and alpha_pattern: anchored at the end and after a dot.

        Source: `get_pattern_key` in peft/utils/other.py (0.21), `(.*\\.)?(KEY)$`.
        """
        return cls(expression, where, budget, prefix=r"(.*\.)?")

    def matches(self, path: str) -> bool:
        """Whether the whole of `path` matches. Raises AdapterError when that takes too long."""
        if self._compiled is not None:
            self._budget.spend(1 + self._length // 64, self._where)
            return self._compiled.fullmatch(path) is not None
        try:
            return bool(self._sequence(self._tree, 1, path) >> len(path) & 1)
        except RecursionError:
            raise AdapterError(f"{self._where} is nested too deep") from None

    def _refuse_unsupported(self, tree: Any) -> None:
        for op, argument in tree:
            name = str(op)
            if name not in _STEP_OF:
                raise AdapterError(f"{self._where} uses {name.lower()}: write it without")
            if name == "SUBPATTERN" and (argument[1] or argument[2]):
                raise AdapterError(f"{self._where} sets flags: write it without")
            if name in ("ASSERT", "ASSERT_NOT") and argument[0] < 0:
                least, most = argument[1].getwidth()
                if least != most:
                    raise AdapterError(f"{self._where} looks behind by no fixed width, as in re")
            for inner in _inner_trees(name, argument):
                self._refuse_unsupported(inner)

    def _sequence(self, tree: Any, starts: int, path: str) -> int:
        """Ends of `tree` begun at any of `starts`; both are sets of positions, a bit each."""
        for op, argument in tree:
            if not starts:
                return 0
            self._budget.spend(1 + starts.bit_count(), self._where)
            starts = _STEP_OF[str(op)](self, argument, starts, path)
        return starts

    def _literal(self, argument: int, starts: int, path: str) -> int:
        return self._where_character(starts, path, lambda c: ord(c) == argument)

    def _not_literal(self, argument: int, starts: int, path: str) -> int:
        return self._where_character(starts, path, lambda c: ord(c) != argument)

    def _any(self, argument: None, starts: int, path: str) -> int:
        return (starts << 1) & _all_positions(path)

    def _in(self, argument: Any, starts: int, path: str) -> int:
        self._budget.spend(len(argument) * starts.bit_count(), self._where)
        return self._where_character(starts, path, lambda c: _in_class(argument, c))

    def _branch(self, argument: Any, starts: int, path: str) -> int:
        self._budget.spend(4 * len(argument[1]), self._where)
        ends = 0
        for alternative in argument[1]:
            ends |= self._sequence(alternative, starts, path)
        return ends

    def _subpattern(self, argument: Any, starts: int, path: str) -> int:
        return self._sequence(argument[3], starts, path)

    def _repeat(self, argument: Any, starts: int, path: str) -> int:
        least, most, body = argument
        for _ in range(least):
            ends = self._sequence(body, starts, path)
            if ends == starts:  # also where nothing is left: more rounds change nothing
                break
            starts = ends
        reached = frontier = starts
        for _ in range(int(most) - least):
            frontier = self._sequence(body, frontier, path) & ~reached
            if not frontier:
                break
            reached |= frontier
        return reached

    def _at(self, argument: Any, starts: int, path: str) -> int:
        return sum(1 << p for p in _positions(starts) if _is_at(str(argument), p, path))

    def _assert(self, argument: Any, starts: int, path: str) -> int:
        return sum(1 << p for p in _positions(starts) if self._looks(argument, p, path))

    def _assert_not(self, argument: Any, starts: int, path: str) -> int:
        return sum(1 << p for p in _positions(starts) if not self._looks(argument, p, path))

    def _looks(self, argument: Any, position: int, path: str) -> bool:
        direction, body = argument
        if direction > 0:
            return bool(self._sequence(body, 1 << position, path))
        begin = position - body.getwidth()[0]  # `re` only allows a fixed width behind
        return begin >= 0 and bool(self._sequence(body, 1 << begin, path) >> position & 1)

    def _where_character(self, starts: int, path: str, is_accepted: Any) -> int:
        positions = _positions(starts)
        return sum(2 << p for p in positions if p < len(path) and is_accepted(path[p]))


_STEP_OF: dict[str, Any] = {
    "LITERAL": Pattern._literal,
    "NOT_LITERAL": Pattern._not_literal,
    "ANY": Pattern._any,
    "IN": Pattern._in,
    "BRANCH": Pattern._branch,
    "SUBPATTERN": Pattern._subpattern,
    "MAX_REPEAT": Pattern._repeat,
    "MIN_REPEAT": Pattern._repeat,
    "AT": Pattern._at,
    "ASSERT": Pattern._assert,
    "ASSERT_NOT": Pattern._assert_not,
}


def _inner_trees(name: str, argument: Any) -> list[Any]:
    match name:
        case "BRANCH":
            return argument[1]
        case "SUBPATTERN":
            return [argument[3]]
        case "MAX_REPEAT" | "MIN_REPEAT":
            return [argument[2]]
        case "ASSERT" | "ASSERT_NOT":
            return [argument[1]]
    return []


def _all_positions(path: str) -> int:
    return (2 << len(path)) - 1


def _positions(bits: int) -> list[int]:
    positions = []
    while bits:
        lowest = bits & -bits
        positions.append(lowest.bit_length() - 1)
        bits ^= lowest
    return positions


def _in_class(items: Any, character: str) -> bool:
    negated, found = False, False
    for op, argument in items:
        match str(op):
            case "NEGATE":
                negated = True
            case "LITERAL":
                found = found or ord(character) == argument
            case "RANGE":
                found = found or argument[0] <= ord(character) <= argument[1]
            case "CATEGORY":
                found = found or _in_category(str(argument), character)
    return found != negated


def _in_category(category: str, character: str) -> bool:
    kind = category.removeprefix("CATEGORY_")
    negated = kind.startswith("NOT_")
    match kind.removeprefix("NOT_"):
        case "DIGIT":
            found = character.isdecimal()
        case "SPACE":
            found = character.isspace()
        case _:
            found = _is_word(character)
    return found != negated


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _is_at(anchor: str, position: int, path: str) -> bool:
    match anchor:
        case "AT_BEGINNING" | "AT_BEGINNING_STRING":
            return position == 0
        case "AT_END" | "AT_END_STRING":
            return position == len(path)
    before = position > 0 and _is_word(path[position - 1])
    after = position < len(path) and _is_word(path[position])
    return (before != after) == (anchor == "AT_BOUNDARY")
