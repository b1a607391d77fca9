"""Atomic writes: write aside, fsync, rename, fsync the directory. What is half written is never read."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

Data = bytes | bytearray | memoryview
CLAIM_S = 1.0
"""Whoever asks `is_claimed` holds the claim for an instant."""
PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EAGAIN, errno.EINTR, errno.ESTALE})
"""What a disk may say today and not tomorrow."""
END_WAIT_S = 300.0
"""How long the last files of a run wait for room on the disk."""
RETRY_S = 1.0
ASIDE = re.compile(r"\..+\.[0-9a-f]{8}\.aside")
ASIDE_AGE_S = 600.0
NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class Patience:
    """Whether a write that failed is worth another try: while the disk is full, for so long. `tell` hears the first."""

    def __init__(self, tell: Callable[[OSError], object], *, wait_s: float = END_WAIT_S) -> None:
        self._tell = tell
        self._deadline_s = time.monotonic() + wait_s
        self._told = False

    def again(self, error: OSError) -> bool:
        """After RETRY_S."""
        if error.errno not in PASSING or time.monotonic() >= self._deadline_s:
            return False
        if not self._told:
            self._told = True
            self._tell(error)
        return True


def insist(work: Callable[[], object], tell: Callable[[OSError], object], *, wait_s: float = END_WAIT_S) -> None:
    """Do `work` until it is done, as long as `Patience` has it. OSError at last."""
    patience = Patience(tell, wait_s=wait_s)
    while True:
        try:
            work()
            return
        except OSError as error:
            if not patience.again(error):
                raise
        time.sleep(RETRY_S)


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
    with _aside(path, data, sync=sync) as aside:
        os.replace(aside, path)
    if sync:
        sync_directory(path.parent)


def write_first(path: Path, data: Data) -> bool:
    """Make `path` with `data`, durably, wholly or not at all; False where it is there already, then it stays."""
    with _aside(path, data, sync=True) as aside:
        try:
            os.link(aside, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            if not _write_new(path, data):
                return False
    sync_directory(path.parent)
    return True


def _write_new(path: Path, data: Data) -> bool:
    """`write_first` where the file system has no links: a reader may see it half written."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    return True


@contextlib.contextmanager
def _aside(path: Path, data: Data, *, sync: bool) -> Iterator[Path]:
    """`data` in a file beside `path`, which is gone afterwards."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.aside")
    try:
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            write_all(fd, data)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        yield aside
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def is_vacant(directory: Path) -> bool:
    """Whether it holds nothing but what writers that were killed may have left."""
    return all(ASIDE.fullmatch(entry.name) for entry in directory.iterdir())


def remove_asides(directory: Path, *, age_s: float = ASIDE_AGE_S) -> int:
    """Remove what writers that were killed have left in a directory of ours; how many files.

    One that was written to within `age_s` may have a writer that lives, and stays.
    """
    removed, limit_s = 0, time.time() - age_s
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            ours = ASIDE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
            if ours and entry.stat(follow_symlinks=False).st_mtime <= limit_s:
                os.unlink(entry.path)
                removed += 1
    return removed


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
