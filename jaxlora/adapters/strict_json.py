"""JSON from a file nobody vouches for: read exactly, or refused in one line.

Python's own reader keeps the last of two equal keys, accepts NaN and Infinity, and ends in a
traceback on deep nesting. Here all of these are an AdapterError that names the file and the thing.
"""

from __future__ import annotations

import json
import math
from typing import Any

from jaxlora.errors import AdapterError


# A list of full module paths for a deep model is some hundred kilobytes.
MAX_JSON_BYTES = 4 << 20


def show(value: object, limit: int = 80) -> str:
    """A value from a file, safe to print in a one-line message: ASCII, no line break, cut short."""
    text = ascii(value[: limit + 1] if isinstance(value, str) else value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def reason_of(error: Exception) -> str:
    """A library's message, which may quote the file, as `show` would have it, without quotes."""
    return ascii(str(error))[1:-1][:120]


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `data`; `where` names the file in messages.

    Raises AdapterError: not UTF-8, not JSON, not an object, nested too deep, a key given twice, a
    number that is not finite.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError:
        raise AdapterError(f"{where}: not UTF-8 text") from None
    except _DuplicateKeyError as error:
        raise AdapterError(f"{where}: the key {show(error.args[0])} is given twice") from None
    except RecursionError:
        raise AdapterError(f"{where}: nested too deep") from None
    except ValueError as error:  # also an integer of thousands of digits
        raise AdapterError(f"{where}: not valid JSON: {reason_of(error)}") from None
    if not isinstance(value, dict):
        raise AdapterError(f"{where}: not a JSON object")
    _refuse_non_finite(value, where)
    return value


class _DuplicateKeyError(Exception):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return result


def _refuse_non_finite(value: dict[str, Any], where: str) -> None:
    # A stack, not recursion: depth is the file's choice. Each entry carries its top-level key.
    stack: list[tuple[str, Any]] = list(value.items())
    while stack:
        key, item = stack.pop()
        if isinstance(item, float) and not math.isfinite(item):
            raise AdapterError(f"{where}: {show(key)} holds a number that is not finite")
        if isinstance(item, dict):
            stack.extend((key, inner) for inner in item.values())
        elif isinstance(item, list):
            stack.extend((key, inner) for inner in item)
