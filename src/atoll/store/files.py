"""Atomic writes: write aside, fsync, rename, fsync the directory. What is half written is never read."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

Data = bytes | bytearray | memoryview


def sync_directory(path: Path) -> None:
    """Make renames and new names in `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: Data) -> None:
    """Write every byte; OSError where the disk takes no more."""
    view = memoryview(data).cast("B")
    while len(view):
        view = view[os.write(fd, view) :]


def write_atomic(path: Path, data: Data, *, sync: bool = True) -> None:
    """Replace `path` by `data`, wholly or not at all. Without `sync` it is atomic but not yet durable."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.aside")
    try:
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            write_all(fd, data)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    if sync:
        sync_directory(path.parent)
