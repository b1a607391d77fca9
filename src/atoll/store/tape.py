"""The tape: one JSON line per choice, appended, never changed. Kinds: core/records.py.

A line is {"i": number without gaps, "kind": class name in lower case, ...fields}. A torn last line (the writer died in
it) is ignored by readers and cut off by the next writer; damage anywhere else is an error.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec

from atoll.core.records import Record
from atoll.errors import RunError
from atoll.store.files import claim, is_claimed, sync_directory, write_all

LINE_BYTES_MAX = 64 * 1024 * 1024
KINDS: dict[str, type] = {kind.__name__.lower(): kind for kind in get_args(Record)}

_encoder = msgspec.json.Encoder()
_decoders = {name: msgspec.json.Decoder(kind) for name, kind in KINDS.items()}


RESCUE = "restore the file from a copy; what was merged is not in it, and `atoll pull RUN --to DIR` still reads that"
QUIET_S = 10.0
"""A tape that was written to in so many seconds has a writer."""


class _Head(msgspec.Struct):
    i: int
    kind: str


_head_decoder = msgspec.json.Decoder(_Head)
_HEAD = re.compile(rb'\{"i":(\d{1,18}),"kind":"([a-z0-9]+)",')
"""As `encode_line` begins one: spares reading it twice."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line. `record` is None where this version does not know the kind."""

    i: int
    kind: str
    record: Record | None
    stop_bytes: int
    """Where the next line begins in the file."""


def encode_line(i: int, record: Record) -> bytes:
    """The line of a record, with its newline."""
    try:
        body = _encoder.encode(record)
    except UnicodeEncodeError:  # a text has the name of a file that is no UTF-8
        body = _encoder.encode(printable(msgspec.to_builtins(record)))
    return b'{"i":%d,"kind":"%s",' % (i, type(record).__name__.lower().encode()) + body[1:] + b"\n"


def printable(value: Any) -> Any:
    """Plain data, with `\\udcff` in its texts for what no encoding has: names of files may have any bytes."""
    if isinstance(value, dict):
        return {name: printable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [printable(each) for each in value]
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def decode_line(line: bytes) -> tuple[int, str, Record | None]:
    """(i, kind, record); msgspec.DecodeError where it is damaged."""
    found = _HEAD.match(line)
    if found is not None:
        i, kind = int(found[1]), found[2].decode()
    else:
        head = _head_decoder.decode(line)
        i, kind = head.i, head.kind
    decoder = _decoders.get(kind)
    record: Any = decoder.decode(line) if decoder is not None else None
    if decoder is None:
        _head_decoder.decode(line)  # damage is damage in a line of an unknown kind too
    return i, kind, record


def read_tape(path: Path, start_bytes: int = 0, first: int | None = 0) -> Iterator[Entry]:
    """All whole lines from `start_bytes` on. `first`: the number that must come first (None: any)."""
    expected = first
    stop = start_bytes
    with path.open("rb") as file:
        file.seek(start_bytes)
        while line := file.readline(LINE_BYTES_MAX):
            if not line.endswith(b"\n"):
                return
            try:
                i, kind, record = decode_line(line)
            except msgspec.DecodeError as error:
                if not file.read(1):
                    return
                raise RunError(f"{path} is damaged at byte {stop} ({error}); {RESCUE}") from error
            if expected is not None and i != expected:
                missing = f"{path} jumps from line {expected - 1} to {i} at byte {stop}: lines are missing"
                raise RunError(f"{missing}; {RESCUE}")
            expected = i + 1
            stop += len(line)
            yield Entry(i, kind, record, stop)


def is_written(path: Path) -> bool:
    """Whether a syncer that lives has this tape open, or is about to. True where that cannot be known."""
    # A network file system may keep locks of other machines to itself; what they write is seen.
    known = path.exists()
    written_s = (path if known else path.parent).stat().st_mtime
    return (known and is_claimed(path)) or time.time() - written_s < QUIET_S


class Tape:
    """The writer. One process writes; `flush` may run in another thread than `append`."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not claim(self._fd):
            os.close(self._fd)
            raise RunError(f"{path} is being written by another syncer; end that one, or choose another directory")
        last = None
        for entry in read_tape(path):
            last = entry
        self._next = 0 if last is None else last.i + 1
        self._stop_bytes = 0 if last is None else last.stop_bytes
        self._flushed_bytes = self._stop_bytes
        self._lock = threading.Lock()
        os.ftruncate(self._fd, self._stop_bytes)
        sync_directory(path.parent)

    @property
    def lines(self) -> int:
        """Lines written so far."""
        return self._next

    def append(self, record: Record, *, sync: bool = False) -> None:
        """Write a line; with `sync` it is on disk on return. OSError (disk full): the line is not there at all."""
        with self._lock:
            line = encode_line(self._next, record)
            os.lseek(self._fd, self._stop_bytes, os.SEEK_SET)
            before = os.fstat(self._fd)
            try:
                write_all(self._fd, line)
            except OSError:
                os.ftruncate(self._fd, self._stop_bytes)
                # Readers see by the time of the file how old the newest line is.
                os.utime(self._fd, ns=(before.st_atime_ns, before.st_mtime_ns))
                raise
            self._next += 1
            self._stop_bytes += len(line)
        if sync:
            self.flush()

    def flush(self) -> None:
        """fdatasync, where something was written since the last one."""
        stop = self._stop_bytes
        if stop != self._flushed_bytes:
            os.fdatasync(self._fd)
            self._flushed_bytes = max(self._flushed_bytes, stop)

    def close(self) -> None:
        """Flush and close; harmless when closed."""
        if self._fd >= 0:
            try:
                self.flush()
            finally:
                os.close(self._fd)
                self._fd = -1
