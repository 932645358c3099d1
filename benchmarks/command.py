"""The benchmarks' command lines: a user's mistake is one line on stderr and exit status 2."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Refuses in one line, as the server does."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")

    def need_gpu(self) -> None:
        import jax

        platform = jax.default_backend()
        if platform != "gpu":
            self.error(f"needs a GPU, JAX runs on: {platform}")


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def count_or_none(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def file_to_write(text: str) -> Path:
    """A file's path whose folder is there: known before hours of measuring."""
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no file in a folder that is there")
    return path


def folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no folder")
    return path
