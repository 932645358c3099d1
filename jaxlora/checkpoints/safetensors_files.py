"""A folder's safetensors files as one table of tensors, read by slices."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxlora.errors import CheckpointError
from jaxlora.json_file import read_json_object


DTYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}

_MAX_HEADER = 100_000_000  # the format's own limit


class StoredTensor(NamedTuple):
    """Where a tensor's bytes lie. `array()` maps them; nothing is read before it is used."""

    path: Path
    name: str
    dtype: str  # as the file says, e.g. "BF16"
    shape: tuple[int, ...]
    offset: int

    def array(self) -> np.ndarray:
        """A read-only view of the file. The dtype must be one of DTYPES."""
        if 0 in self.shape:
            return np.zeros(self.shape, DTYPES[self.dtype])
        return np.memmap(self.path, DTYPES[self.dtype], "r", self.offset, self.shape)


def open_folder(folder: Path) -> dict[str, StoredTensor]:
    """Tensor name -> where it is, from model.safetensors or the files its index names.

    Raises CheckpointError for a missing or truncated file, or an index that does not hold.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return _open_file(folder / "model.safetensors")
    weight_map = read_json_object(index, CheckpointError).object("weight_map")
    wanted = {name: weight_map.string(name) for name in weight_map}
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(wanted.values())):
        if Path(file).name != file:
            raise CheckpointError(f"{index}: names the file {file!r} outside its folder")
        if not (folder / file).exists():
            raise CheckpointError(f"{index}: names {file}, which is not in the folder")
        tensors |= _open_file(folder / file)
    for name, file in wanted.items():
        if name not in tensors or tensors[name].path.name != file:
            raise CheckpointError(f"{folder / file}: has no tensor {name}, which {index.name} says")
    return tensors


def _open_file(path: Path) -> dict[str, StoredTensor]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise CheckpointError(f"{path}: is truncated or not a safetensors file")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: has a broken safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: has a broken safetensors header")
    header.pop("__metadata__", None)
    return {name: _stored(path, name, entry, 8 + length, size) for name, entry in header.items()}


def _stored(path: Path, name: str, entry: object, start: int, size: int) -> StoredTensor:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])  # type: ignore[index]
        begin, end = entry["data_offsets"]  # type: ignore[index]
        numbers = (*shape, begin, end)
        if any(type(number) is not int or number < 0 for number in numbers) or begin > end:
            raise ValueError
        if not isinstance(dtype, str):
            raise TypeError
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: {name}: has a broken safetensors header entry") from error
    if start + end > size:
        raise CheckpointError(f"{path}: {name}: lies past the file's end; the file is truncated")
    if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise CheckpointError(f"{path}: {name}: its byte range does not match its shape")
    return StoredTensor(path, name, dtype, shape, start + begin)
