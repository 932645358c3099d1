"""Opening an adapter's files: regular files of this folder only, each read once, whole.

What was checked must be what is used, so a file's bytes are read once and everything (header,
factors, hash) is taken from them.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from jaxlora.adapters.strict_json import MAX_JSON_BYTES
from jaxlora.errors import AdapterError


class AdapterFolder:
    """A folder with an adapter's files. Raises AdapterError where it is not a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._real = path.resolve(strict=True)
        except (OSError, RuntimeError, ValueError):  # absent, a loop of links, a NUL in the name
            raise AdapterError(f"{path}: no such folder") from None
        if not self._real.is_dir():
            raise AdapterError(f"{path}: not a folder")

    def has(self, name: str) -> bool:
        """Whether the folder has an entry of this name, a dangling link included."""
        return os.path.lexists(self.path / name)

    def read_json_bytes(self, name: str) -> bytes:
        """A small text file's bytes. Raises AdapterError, also where it is larger than 4 MiB."""
        data = self.read(name, limit=MAX_JSON_BYTES)
        if len(data) > MAX_JSON_BYTES:
            raise AdapterError(f"{self.path / name}: larger than {MAX_JSON_BYTES} bytes")
        return data

    def read(self, name: str, limit: int | None = None) -> bytes:
        """A file's bytes, at most `limit` + 1 of them. Raises AdapterError."""
        where = self.path / name
        target = self._target(where)
        try:
            # Without O_NONBLOCK the open of a pipe would wait for a writer.
            handle = os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(handle)
                if not stat.S_ISREG(status.st_mode):
                    raise AdapterError(f"{where}: not a regular file")
                size = status.st_size if limit is None else min(status.st_size, limit + 1)
                with open(handle, "rb", closefd=False) as file:
                    data = file.read(size)
            finally:
                os.close(handle)
        except OSError as error:
            raise AdapterError(f"{where}: {error.strerror}") from None
        if len(data) != size:
            raise AdapterError(f"{where}: changed while it was read")
        return data

    def _target(self, where: Path) -> Path:
        """The real file behind `where`: inside the folder, or in its own cache's `blobs`."""
        try:
            target = where.resolve(strict=True)
        except FileNotFoundError:
            raise AdapterError(f"{where}: no such file") from None
        except (OSError, RuntimeError):
            raise AdapterError(f"{where}: a link that leads nowhere") from None
        if target.is_relative_to(self._real) or self._is_cache_blob(target):
            return target
        raise AdapterError(
            f"{where}: a link that leads out of the adapter's folder: put the file itself there"
        )

    def _is_cache_blob(self, target: Path) -> bool:
        # Hugging Face cache: REPOSITORY/snapshots/REVISION/... links into REPOSITORY/blobs/.
        return any(
            parent.name == "snapshots" and target.parent == parent.parent / "blobs"
            for parent in self._real.parents
        )
