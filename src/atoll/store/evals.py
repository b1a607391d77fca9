"""evals.jsonl of a run's directory: the loss of the merged model while the run goes on, one JSON line each.

Written by an evaluator beside the run, appended whole, never changed. A torn last line is ignored by readers.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from atoll.errors import RunError
from atoll.store.files import write_all

NAME = "evals.jsonl"
LINE_BYTES_MAX = 64 * 1024


class EvalLine(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation. Fields are only added, with defaults."""

    slot: int
    """Newest slot that is part of the model; the tape tells when it was published."""
    loss: float
    """Mean over held-out data: nats per byte for the built-in recipes."""
    batches: int
    cpu_s: float
    """CPU time that this evaluation took, user and system."""
    hash: str = ""
    """Of the whole model."""


def append_eval(run_dir: Path, line: EvalLine) -> None:
    """Append one line, whole. OSError: nothing of it is there."""
    with (run_dir / NAME).open("ab", buffering=0) as file:
        stop_bytes = file.seek(0, os.SEEK_END)
        try:
            write_all(file.fileno(), msgspec.json.encode(line) + b"\n")
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(stop_bytes)
            raise


def read_evals(run_dir: Path) -> list[EvalLine]:
    """All whole lines; none where nothing was evaluated. RunError where the file is damaged."""
    path = run_dir / NAME
    if not path.exists():
        return []
    found = []
    with path.open("rb") as file:
        while (line := file.readline(LINE_BYTES_MAX)).endswith(b"\n"):
            try:
                found.append(msgspec.json.decode(line, type=EvalLine))
            except msgspec.DecodeError as error:
                raise RunError(f"{path} is damaged: {error}; remove the line, or the file") from error
    return found
