"""stdout and stderr of our own processes: what is said to people never raises into what the process is there for.

A terminal that was closed, a pipe that nobody reads, a log on a full disk, a descriptor that was closed before the
start, a terminal of another encoding: each of them would end a `print` with an error, in the middle of a run.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import select
import signal
import stat
import sys
from collections.abc import Callable
from typing import TextIO, TypeVar

T = TypeVar("T")

CHUNK_BYTES = 4096
"""A pipe that says it is writable takes so much at once (PIPE_BUF)."""
READER_WAIT_S = 1.0
"""For a reader that does not read, such as a pager, or a terminal after Ctrl-S; what comes meanwhile is left out."""

_logger = logging.getLogger("atoll")


class Patient(io.RawIOBase):
    """A descriptor that takes what it can; the rest is dropped. Never raises, never waits for long."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._behind = False
        mode = os.fstat(fd).st_mode
        self._waits = not stat.S_ISREG(mode)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data) -> int:  # type: ignore[no-untyped-def,override]
        """All of it, as far as the caller can tell."""
        left = bytes(data)
        size = len(left)
        if self._behind and self._takes(0.0):
            left = b"\n" + left  # the line that was cut off ends here
            self._behind = False
        while left:
            if not self._takes(0.0 if self._behind else READER_WAIT_S):
                self._behind = True
                break
            try:
                left = left[os.write(self._fd, left[:CHUNK_BYTES]) :]
            except OSError as error:
                self._behind |= error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EAGAIN)
                break
        return size

    def _takes(self, wait_s: float) -> bool:
        if not self._waits:
            return True
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(1000 * wait_s))


def open_missing() -> None:
    """0, 1 and 2 lead somewhere: else the next file or socket gets the number, and what is printed goes into it."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(fd, True)


def settle(*, lasting: bool) -> None:
    """Once, at the start of a process of ours.

    lasting: it has more to do than to print, and goes on whatever becomes of its output. Else a closed pipe ends it.
    """
    open_missing()
    sys.stdout = _settled(sys.stdout, 1, lasting=lasting)
    sys.stderr = _settled(sys.stderr, 2, lasting=lasting)


def _settled(stream: TextIO | None, fd: int, *, lasting: bool) -> TextIO:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    if lasting or stream is None:
        raw = Patient(fd)
        return io.TextIOWrapper(
            io.BufferedWriter(raw), encoding, errors="backslashreplace", line_buffering=True, write_through=fd == 2
        )
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream


class Told:
    """Calls of somebody's callbacks for people: what goes wrong in one is logged once, and goes no further."""

    def __init__(self) -> None:
        self._failed = False

    def __call__(self, callback: Callable[[T], object], value: T) -> None:
        try:
            callback(value)
        except Exception as error:
            if not self._failed:
                _logger.warning("what was to be shown could not be: %s: %s", type(error).__name__, error)
            self._failed = True


def ending_signals() -> tuple[signal.Signals, ...]:
    """Those that ask a process to end. SIGHUP is none where it is ignored, as under nohup."""
    hung_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hung_up else ()))


class Asked:
    """How often a process was asked to end. A closing terminal may send SIGHUP twice: it counts as a first one only."""

    def __init__(self) -> None:
        self.count = 0

    def hear(self, number: int) -> int:
        """The new count."""
        if number != signal.SIGHUP or not self.count:
            self.count += 1
        return self.count
