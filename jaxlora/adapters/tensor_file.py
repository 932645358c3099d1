"""A safetensors file, checked by the letter of its format before any tensor is looked at.

Source: the format section of github.com/huggingface/safetensors. Eight bytes with the header's
length N (little-endian), N bytes of JSON, then the data: `{name: {"dtype", "shape",
"data_offsets": [begin, end]}}` with offsets into the data, which the tensors fill without holes or
overlaps, plus an optional `__metadata__` of strings.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import sys
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxlora.adapters.strict_json import parse_object, show
from jaxlora.errors import AdapterError


# Every dtype of the format, in bytes an element. F4 and F6 types count in bits and are refused.
_ITEM_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
_NUMPY_DTYPES = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
FACTOR_DTYPES = tuple(_NUMPY_DTYPES)

# Longer than the header of any adapter (a tensor takes about 200 bytes of it).
MAX_HEADER_BYTES = 32 << 20

if sys.byteorder != "little":
    raise ImportError("safetensors data is little-endian; this machine is not")


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One tensor of the header. `begin` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int


@dataclasses.dataclass(frozen=True)
class TensorFile:
    """The bytes of a checked safetensors file and its table of contents."""

    where: str
    data: bytes
    entries: Mapping[str, TensorEntry]

    def sha256(self) -> str:
        """The hash of the whole file, lower-case hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()

    def array(self, name: str) -> np.ndarray:
        """One tensor as a read-only array: a view of the file's bytes.

        Raises AdapterError for a dtype that factors are not stored in (other than F32, F16, BF16).
        """
        entry = self.entries[name]
        dtype = _NUMPY_DTYPES.get(entry.dtype)
        if dtype is None:
            raise AdapterError(
                f"{self.where}: {show(name, 160)} has dtype {entry.dtype}: "
                f"save factors as one of {', '.join(FACTOR_DTYPES)}"
            )
        count = math.prod(entry.shape)
        array = np.frombuffer(self.data, dtype, count, entry.begin).reshape(entry.shape)
        if not array.flags.aligned:  # the format lets a header end on any byte
            array = array.copy()
            array.flags.writeable = False
        return array


def parse_tensor_file(data: bytes, where: str) -> TensorFile:
    """Check a whole safetensors file. Raises AdapterError with what is wrong."""
    if len(data) < 8:
        raise AdapterError(f"{where}: {len(data)} bytes long: not a safetensors file")
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        raise AdapterError(
            f"{where}: the header is said to be {length} bytes long and the file has {len(data)}: "
            "truncated, or not a safetensors file"
        )
    if length > MAX_HEADER_BYTES:
        raise AdapterError(f"{where}: a header of {length} bytes (at most {MAX_HEADER_BYTES})")
    header_bytes = data[8 : 8 + length]
    if not header_bytes.startswith(b"{"):
        raise AdapterError(f"{where}: the header is not a JSON object: not a safetensors file")
    header = parse_object(header_bytes, f"{where}: header")
    _check_metadata(header.pop("__metadata__", {}), where)
    start = 8 + length
    entries = {
        name: _entry(fields, f"{where}: {show(name, 160)}", start)
        for name, fields in header.items()
    }
    _check_layout(entries, start, len(data), where)
    return TensorFile(where, data, entries)


def _check_metadata(metadata: Any, where: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise AdapterError(f"{where}: header: __metadata__ is not an object of strings")


def _entry(fields: Any, where: str, start: int) -> TensorEntry:
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise AdapterError(f"{where}: header: not an object of dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_SIZES:
        raise AdapterError(f"{where}: unknown dtype {show(dtype)}")
    if not _are_sizes(shape):
        raise AdapterError(f"{where}: shape {show(shape)} is not a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise AdapterError(f"{where}: data_offsets {show(offsets)} are not [begin, end]")
    size = math.prod(shape) * _ITEM_SIZES[dtype]
    if size != offsets[1] - offsets[0]:
        raise AdapterError(
            f"{where}: {dtype} {show(shape)} takes {size} bytes, "
            f"its data_offsets span {offsets[1] - offsets[0]}"
        )
    return TensorEntry(dtype, tuple(shape), start + offsets[0], size)


def _are_sizes(value: Any) -> bool:
    # type() and not isinstance(): true and false are ints too. 2**48 keeps products small.
    return (
        isinstance(value, list)
        and len(value) <= 8
        and all(type(item) is int and 0 <= item < 2**48 for item in value)
    )


def _check_layout(entries: Mapping[str, TensorEntry], start: int, end: int, where: str) -> None:
    position = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].size)):
        if entry.begin != position:
            fault = "overlaps" if entry.begin < position else "leaves a hole after"
            raise AdapterError(f"{where}: the data of {show(name, 160)} {fault} another tensor's")
        position += entry.size
    if position != end:
        fault = "truncated" if position > end else "bytes that belong to no tensor"
        raise AdapterError(
            f"{where}: the tensors end at byte {position} and the file at {end}: {fault}"
        )
