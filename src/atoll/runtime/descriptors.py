"""Open files of the syncer: as many as are allowed, some kept for the disk, and a shortage is called by its name."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

RESERVE = 16
"""A commit, the tape and the model need a few at a time, whoever has taken all others with connections."""
LIMIT_MAX = 65_536


def raise_limit() -> int:
    """The soft limit as high as the hard one, within reason; what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, LIMIT_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return soft


def reason_of(error: OSError) -> str:
    """The error in words that name what is short: open files are no disk space."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        here = error.errno == errno.EMFILE
        whose = f"this process may have {limit} open files" if here else "the whole system is out of them"
        return f"too many open files, the disk is not full: {whose}; raise `ulimit -n`, or see who holds connections"
    return f"{error}; make room there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)


class Reserve:
    """Descriptors that are held so that they can be given to the disk."""

    def __init__(self, count: int = RESERVE) -> None:
        self._count = count
        self._held: list[int] = []
        self._fill()

    def _fill(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Within the block the held ones are free for files."""
        self.close()
        try:
            yield
        finally:
            self._fill()

    def shortage(self) -> OSError | None:
        """Why no file or connection can be opened now, besides those that are held; None: it can."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            return error
        return None

    def close(self) -> None:
        """Give all back."""
        while self._held:
            os.close(self._held.pop())
