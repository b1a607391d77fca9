"""A run's directory into its read model, whole or as it grows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from atoll.core.config import DATA_PARALLEL
from atoll.core.records import Record
from atoll.errors import RunError
from atoll.store.rundir import RECIPE_FILE, read_settings
from atoll.store.steps import StepReader
from atoll.store.tape import is_written, read_tape
from atoll.watch.parallel import fold_parallel
from atoll.watch.view import RunView


class Follower:
    """Reads the tape of a run on from where it stopped."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "tape.jsonl"
        if not run_dir.is_dir():
            what = "is a file" if run_dir.exists() else "does not exist"
            raise RunError(f"directory {str(run_dir)!r} {what}; give the directory of a run")
        if not self._path.is_file():
            if self._path.exists():
                raise RunError(f"{self._path} is not a regular file; give the directory of a run")
            if read_settings(run_dir).get("mode") == DATA_PARALLEL:
                raise RunError(f"run {run_dir} is of mode={DATA_PARALLEL}, without a syncer; use `atoll report` for it")
            raise RunError(f"run {run_dir} {not_begun(self._path)}")
        self._stop_bytes = 0
        self._next = 0

    def records(self) -> Iterator[Record]:
        """What has come since the last call. RunError where the tape is damaged."""
        try:
            for entry in read_tape(self._path, self._stop_bytes, self._next):
                self._stop_bytes, self._next = entry.stop_bytes, entry.i + 1
                if entry.record is not None:
                    yield entry.record
        except OSError as error:
            raise RunError(f"{self._path} cannot be read: {error}") from error

    def follow_into(self, feed: Callable[[Record], object], view: RunView) -> None:
        """Feed `view`, by `feed`, what has come; and tell it where its writer is gone."""
        written = is_written(self._path)  # before reading: what is read after the end is the last
        for record in self.records():
            feed(record)
        if not written:
            view.break_off()
        with contextlib.suppress(OSError):
            view.silent_s = max(0.0, time.time() - self._path.stat().st_mtime)


def fold_run(run_dir: Path) -> RunView:
    """The read model of a run as far as its tape goes."""
    view = RunView()
    view.loss_unit = loss_unit(run_dir)
    Follower(run_dir).follow_into(view.feed, view)
    if view.run is None:
        raise RunError(f"run {run_dir} {not_begun(run_dir / 'tape.jsonl')}")
    return view


def not_begun(tape: Path) -> str:
    """What to say of a run without a line on its tape."""
    if is_written(tape):
        return "has not begun: its tape is empty; try again later"
    return "broke off before it began: its syncer is gone; start another"


def read_run(run_dir: Path) -> RunView:
    """The read model of a run of any mode."""
    settings = read_settings(run_dir) if (run_dir / "run.toml").is_file() else {}
    if settings.get("mode") != DATA_PARALLEL:
        return fold_run(run_dir)
    logs = {path.stem.rpartition("-")[0]: StepReader(path) for path in sorted((run_dir / "steps").glob("*.jsonl"))}
    view = fold_parallel(settings, {name: log.follow() for name, log in logs.items()})
    view.loss_unit = loss_unit(run_dir)
    return view


def loss_unit(run_dir: Path) -> str:
    """What a loss of this run is counted in; empty where learners are loops of somebody's own, which nobody knows."""
    return "nats per byte" if (run_dir / RECIPE_FILE).is_file() else ""
