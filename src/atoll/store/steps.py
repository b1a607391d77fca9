"""Step logs: a line per step of one learner or rank, as a training loop writes them and others read them.

What a full disk does to them: rows wait in memory, in order, and are written once there is room; a run never ends for
want of a line. More than ROWS_MAX that wait, and those that still wait CLOSE_WAIT_S after the end,
are lost and counted.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from atoll.errors import ConfigError, RunError
from atoll.store.files import PASSING, write_all

ROWS_MAX = 200_000
"""That wait for room on the disk: some 25 MB."""
CLOSE_WAIT_S = 5.0

_logger = logging.getLogger("atoll")


class StepRow(msgspec.Struct):
    """One step. t_ns: of a monotonic clock; all_reduce_ns: waited for the other ranks (data-parallel)."""

    step: int
    tokens: int
    loss: float
    t_ns: int
    all_reduce_ns: int = 0


_decoder = msgspec.json.Decoder(StepRow)


def step_log_path(folder: Path, name: str, generation: int) -> Path:
    """`<folder>/<name>-<generation>.jsonl`; the audit looks for it in `steps/` of the run's directory."""
    return folder / f"{name}-{generation}.jsonl"


class StepLog:
    """The writer of one log: a line at a time, what an audit recounts without trusting us.

    A file of this name is of an earlier run: it is kept, as `<path>.1` and so on. RunError where the file cannot be
    made at all; after that nothing is raised, whatever the disk says.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[bytes] = deque()
        self._fd = -1
        self._stop_bytes = 0
        self._told = False
        self.lost = 0
        """Rows that will never be written."""
        try:
            self._open()
        except OSError as error:
            if error.errno not in PASSING:
                why = error.strerror or error
                raise RunError(f"step log {path} cannot be written: {why}; choose another") from error
            self._say(error)

    def write(self, step: int, tokens: int, loss: float, **more: int) -> None:
        """Before the step is reported, so that a crash leaves no reported step without its line."""
        row = {"step": step, "tokens": tokens, "loss": loss, "t_ns": time.monotonic_ns(), **more}
        if len(self._waiting) < ROWS_MAX:
            self._waiting.append(json.dumps(row).encode() + b"\n")
        else:
            self.lost += 1
        self._write_waiting()

    def close(self, *, wait_s: float | None = None) -> None:
        """Write what waits, for `wait_s` (CLOSE_WAIT_S); harmless when closed."""
        deadline = time.monotonic() + (CLOSE_WAIT_S if wait_s is None else wait_s)
        while not self._write_waiting() and time.monotonic() < deadline:
            time.sleep(0.1)
        self.lost += len(self._waiting)
        self._waiting.clear()
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1
        if self.lost:
            _logger.warning("%d rows of step log %s are lost: the disk took no more", self.lost, self._path)
            self.lost = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._fd = os.open(self._path, flags, 0o644)
        except FileExistsError:
            kept = _keep_aside(self._path)
            self._fd = os.open(self._path, flags, 0o644)
            _logger.warning("step log %s is there already, of another run; it is kept as %s", self._path, kept.name)

    def _write_waiting(self) -> bool:
        """Whether all is written. A line is there as a whole or not at all."""
        try:
            while self._waiting:
                if self._fd < 0:
                    self._open()
                os.lseek(self._fd, self._stop_bytes, os.SEEK_SET)
                write_all(self._fd, self._waiting[0])
                self._stop_bytes += len(self._waiting.popleft())
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._stop_bytes)
            self._say(error)
            return False
        return True

    def _say(self, error: OSError) -> None:
        """Once: it goes on by itself."""
        if not self._told:
            _logger.warning(
                "step log %s cannot be written (%s); training goes on, rows wait in memory for room on the disk",
                self._path,
                error.strerror or error,
            )
        self._told = True


def _keep_aside(path: Path) -> Path:
    """Give the file another name; nothing is overwritten."""
    for number in itertools.count(1):
        kept = path.with_name(f"{path.name}.{number}")
        if not kept.exists():
            os.rename(path, kept)
            break
    return kept


def check_folder(folder: object) -> Path | None:
    """Where step logs shall go, absolute; None for none. ConfigError where that cannot be. Nothing is made yet."""
    if folder is None:
        return None
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError(f"steps_dir={str(folder)[:80]!r} must be a path, such as 'runs/first/steps'")
    path = Path(os.path.abspath(os.fspath(folder)))
    there = next(above for above in (path, *path.parents) if above.exists() or above.is_symlink())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = f"{there} is not a folder that this process may write to"
        raise ConfigError(f"steps_dir={str(folder)!r} cannot hold step logs: {why}; choose another")
    return path


class LifeLogs:
    """The step logs of a learner's lives, one after another, in `folder`; None: nothing is written."""

    def __init__(self, folder: Path | None, name: str) -> None:
        self._folder, self._name = folder, name
        self._log: StepLog | None = None
        self._lives = self._step = 0

    def begin(self, generation: int) -> None:
        """A life begins, and its log with step 1. RunError where there can be none, but only for the first life."""
        if self._folder is None:
            return
        self.close(wait_s=0.0)
        self._lives, self._step = self._lives + 1, 0
        try:
            self._log = StepLog(step_log_path(self._folder, self._name, generation))
        except RunError as error:
            if self._lives == 1:
                raise
            _logger.warning("%s; training goes on without", error)

    def read(self, loss: Any) -> Any:
        """A tensor's value where it will be written down (waits for the accelerator); else as it is."""
        if self._log is None or loss is None:
            return loss
        return float(loss.detach() if hasattr(loss, "detach") else loss)

    def write(self, tokens: int, loss: float | None) -> None:
        """The next step of this life that counts."""
        if self._log is not None:
            self._step += 1
            self._log.write(self._step, tokens, loss or 0.0)

    def close(self, *, wait_s: float | None = None) -> None:
        """Write what waits, for a while; harmless when closed."""
        if self._log is not None:
            self._log.close(wait_s=wait_s)
            self._log = None


class StepReader:
    """The rows of one log, read on from where it stopped at each look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self.rows: list[StepRow] = []

    def follow(self) -> list[StepRow]:
        """The new rows. A line that is half written waits for the next look. RunError where the log is damaged."""
        if not self._path.exists():
            return []
        try:
            with self._path.open("rb") as log:
                log.seek(self._read)
                whole, end, _ = log.read().rpartition(b"\n")
            new = [_decoder.decode(line) for line in whole.splitlines()]
        except (OSError, msgspec.MsgspecError) as error:
            raise RunError(f"{self._path} cannot be read: {error}") from error
        self._read += len(whole) + len(end)
        self.rows += new
        return new
