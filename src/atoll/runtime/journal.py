"""A syncer's tape while it runs: lines that the disk does not take are kept in order until it does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

from atoll.core.records import Record
from atoll.errors import RunError
from atoll.runtime.descriptors import reason_of
from atoll.store.tape import Tape

KEPT_MAX = 1_000_000


class Journal:
    """show: says a line to people. on_record: sees every line when it is written or kept."""

    tape: Tape

    def __init__(self, show: Callable[[str], None], on_record: Callable[[Record], None]) -> None:
        self._show = show
        self._on_record = on_record
        self._kept: deque[Record] = deque()
        self._unsynced = False

    def open(self, path: Path) -> None:
        """Begin or go on with the tape at `path`."""
        self.tape = Tape(path)

    def write(self, record: Record, *, sync: bool = False) -> None:
        """Append a line, or keep it while the disk is full. sync: `sync` must make it durable."""
        self._kept.append(record)
        if len(self._kept) > KEPT_MAX:
            raise RunError(f"{KEPT_MAX} tape lines could not be written; make room on the disk")
        try:
            self.write_kept()
        except OSError as error:
            if len(self._kept) == 1:
                self._show(f"the tape cannot be written: {reason_of(error)}; learners train on")
        self._unsynced |= sync
        self._on_record(record)

    def write_now(self, record: Record) -> None:
        """Append a line behind those that were kept. OSError where the disk does not take it; then it is not kept."""
        self.write_kept()
        self.tape.append(record)
        self._on_record(record)

    def write_kept(self) -> None:
        """OSError where the disk does not take all of it."""
        while self._kept:
            self.tape.append(self._kept[0])
            self._kept.popleft()

    def sync(self) -> None:
        """Make durable what was written to be so."""
        if self._unsynced:
            self._unsynced = False
            self._flush_or_say()

    def flush(self) -> None:
        """Make all of it durable. OSError."""
        self.tape.flush()

    def close(self) -> None:
        """The last lines are synced, or it is said why not."""
        try:
            self.tape.close()
        except OSError as error:
            self._show(f"the tape cannot be synced: {reason_of(error)}")

    def _flush_or_say(self) -> None:
        try:
            self.tape.flush()
        except OSError as error:
            self._show(f"the tape cannot be synced: {reason_of(error)}")
