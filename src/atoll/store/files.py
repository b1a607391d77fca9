"""Atomic writes: write aside, fsync, rename, fsync the directory. What is half written is never read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from pathlib import Path

Data = bytes | bytearray | memoryview
CLAIM_S = 1.0
"""Whoever asks `is_claimed` holds the claim for an instant."""


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


def claim(fd: int) -> bool:
    """Whether this process is now the only one that claims the file, until `fd` is closed or the process is gone.

    True too where the file system has no locks.
    """
    deadline = time.monotonic() + CLAIM_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(CLAIM_S / 50)
        except OSError:
            return True
        else:
            return True


def is_claimed(path: Path) -> bool:
    """Whether a process claims the file. True where that cannot be known."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(fd)
