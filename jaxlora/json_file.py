"""Reading a JSON object from a file with every value's type checked, for one-line messages."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxlora.errors import JaxloraError


_REQUIRED: Any = object()


class JsonObject:
    """A JSON object that knows its file: wrong types and missing keys raise `error_type`.

    Each getter takes a default for an absent key (without one, the key is required). `null`, where
    given, is what a JSON null means; otherwise null counts as absent.
    """

    def __init__(
        self,
        path: Path,
        values: dict[str, Any],
        prefix: str = "",
        error_type: type[JaxloraError] = JaxloraError,
    ) -> None:
        self.path = path
        self._values = values
        self._prefix = f"{prefix}." if prefix else ""
        self._error_type = error_type

    def error(self, key: str, problem: str) -> JaxloraError:
        return self._error_type(f"{self.path}: {self._prefix}{_show(key)}: {problem}")

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def _read(self, key: str, wanted: str, default: Any, null: Any, valid: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            if key in self._values and null is not _REQUIRED:
                return null
            if default is _REQUIRED:
                raise self.error(key, f"is missing, wants {wanted}")
            return default
        if not valid(value):
            raise self.error(key, f"wants {wanted}, got {json.dumps(value)[:80]}")
        return value

    def string(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._read(key, "a string", default, _REQUIRED, lambda v: isinstance(v, str))

    def boolean(self, key: str, default: Any = _REQUIRED) -> bool:
        return self._read(key, "true or false", default, _REQUIRED, lambda v: isinstance(v, bool))

    def integer(self, key: str, default: Any = _REQUIRED) -> int:
        return self._read(key, "an integer", default, _REQUIRED, _is_integer)

    def positive(self, key: str, default: Any = _REQUIRED, null: Any = _REQUIRED) -> Any:
        return self._read(
            key, "a positive integer", default, null, lambda v: _is_integer(v) and 0 < v < 2**31
        )

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        return float(self._read(key, "a finite number", default, _REQUIRED, _is_finite))

    def strings(self, key: str) -> list[str]:
        return self._read(
            key,
            "a list of strings",
            _REQUIRED,
            _REQUIRED,
            lambda v: isinstance(v, list) and all(isinstance(item, str) for item in v),
        )

    def object(self, key: str) -> JsonObject:
        """The nested object; an empty one where the key is absent or null."""
        value = self._read(key, "an object", {}, _REQUIRED, lambda v: isinstance(v, dict))
        return JsonObject(self.path, value, f"{self._prefix}{key}", self._error_type)


def read_json_object(path: Path, error_type: type[JaxloraError]) -> JsonObject:
    """Read a JSON object. Raises `error_type` for a missing file, bad JSON, or another value.

    Bad JSON is also a key given twice, or deep nesting.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise error_type(f"{path}: cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise error_type(f"{path}: is not JSON: nested too deep") from error
    except ValueError as error:  # not UTF-8, not JSON, a number of 5000 digits, a key twice
        raise error_type(f"{path}: is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise error_type(f"{path}: wants a JSON object")
    return JsonObject(path, values, error_type=error_type)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {_show(twice)} is given twice")
    return result


def _show(key: str) -> str:
    """A key of any file on one line; the names of ordinary keys as they are."""
    return key if key.isidentifier() else ascii(key)[:80]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    if _is_integer(value):
        return abs(value) < 2**63
    return isinstance(value, float) and math.isfinite(value)
