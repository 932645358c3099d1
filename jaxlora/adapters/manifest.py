"""The optional manifest beside an adapter's files: what its maker says they are.

    {
      "files": {"adapter_model.safetensors": {"sha256": "..."}},
      "base": {"name": "...", "fingerprint": "..."},
      "provenance": {...},
      "description": "..."
    }

Every key is optional. What is said of the weights' hash and the base's fingerprint must be true;
the rest is for people and is not read.
"""

from __future__ import annotations

import re
from typing import Any

from jaxlora.adapters.folder import AdapterFolder
from jaxlora.adapters.strict_json import parse_object, show
from jaxlora.adapters.support_rows import FILE_ROWS, Action
from jaxlora.adapters.tensor_file import TensorFile
from jaxlora.errors import AdapterError


MANIFEST_NAMES = tuple(row.name for row in FILE_ROWS if row.action is Action.CHECKED)
WEIGHTS_NAME = "adapter_model.safetensors"


def check_manifests(folder: AdapterFolder, weights: TensorFile, base_fingerprint: str) -> None:
    """Raises AdapterError where a manifest is there and does not agree with the files."""
    for name in MANIFEST_NAMES:
        if folder.has(name):
            where = str(folder.path / name)
            manifest = parse_object(folder.read_json_bytes(name), where)
            _check(manifest, where, weights, base_fingerprint)


def _check(
    manifest: dict[str, Any], where: str, weights: TensorFile, base_fingerprint: str
) -> None:
    for key in manifest:
        if key not in ("files", "base", "provenance", "description"):
            raise AdapterError(f"{where}: unknown key {show(key)}")
    files = _object(manifest, "files", where)
    if files.keys() - {WEIGHTS_NAME}:
        other = show(min(files.keys() - {WEIGHTS_NAME}))
        raise AdapterError(f"{where}: files names {other}: only {WEIGHTS_NAME} is read")
    _object(manifest, "provenance", where)
    _text(manifest, "description", where)
    said = _hash(_object(files, WEIGHTS_NAME, f"{where}: files"), "sha256", where)
    if said is not None and said != (found := weights.sha256()):
        raise AdapterError(f"{where}: {WEIGHTS_NAME} should have sha256 {said} and has {found}")
    base = _object(manifest, "base", where)
    _text(base, "name", f"{where}: base")
    said = _hash(base, "fingerprint", f"{where}: base")
    if said is not None and said != base_fingerprint:
        raise AdapterError(
            f"{where}: made for a base of fingerprint {said}; this one's is {base_fingerprint}"
        )


def _object(parent: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = parent.get(key, {})
    if not isinstance(value, dict):
        raise AdapterError(f"{where}: {key} is not an object")
    return value


def _text(parent: dict[str, Any], key: str, where: str) -> None:
    if not isinstance(parent.get(key, ""), str):
        raise AdapterError(f"{where}: {key} is not a string")


def _hash(parent: dict[str, Any], key: str, where: str) -> str | None:
    value = parent.get(key)
    if key in parent and not (isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value)):
        raise AdapterError(f"{where}: {key} is not 64 lower-case hexadecimal digits")
    return value
