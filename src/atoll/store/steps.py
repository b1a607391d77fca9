"""Step logs: a line per step of one learner or rank, as the recipe's loop writes them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from atoll.errors import RunError


class StepRow(msgspec.Struct):
    """One step. t_ns: of a monotonic clock; all_reduce_ns: waited for the other ranks (data-parallel)."""

    step: int
    tokens: int
    loss: float
    t_ns: int
    all_reduce_ns: int = 0


_decoder = msgspec.json.Decoder(StepRow)


class StepLog:
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
