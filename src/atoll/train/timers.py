"""What step() costs the training thread, measured inside it (protocol R9)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from atoll.core.messages import Timings

COPIES = ("capture", "take")


class Timers:
    """Times of one life, in ns."""

    def __init__(self) -> None:
        self._began_ns = 0
        self._waited_ns = 0
        self._ended_ns = 0
        self.restart()

    def restart(self) -> None:
        """Another life begins, perhaps in the middle of a step."""
        self.by_cause: dict[str, int] = {}
        self.step_ns = 0
        self.step_ns_max = 0
        self.gap_ns_max = 0

    def begin(self) -> None:
        """step() was entered."""
        self._began_ns = time.perf_counter_ns()
        self._waited_ns = 0

    def end(self) -> None:
        """step() is about to return."""
        now_ns = time.perf_counter_ns()
        spent = now_ns - self._began_ns - self._waited_ns
        self.step_ns += spent
        self.step_ns_max = max(self.step_ns_max, spent)
        if self._ended_ns:
            self.gap_ns_max = max(self.gap_ns_max, now_ns - self._ended_ns)
        self._ended_ns = now_ns

    @contextmanager
    def timed(self, cause: str) -> Iterator[None]:
        """Time a wait of R9 (excluded from step_ns) or a local copy (part of it)."""
        before_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            spent = time.perf_counter_ns() - before_ns
            self.by_cause[cause] = self.by_cause.get(cause, 0) + spent
            if cause not in COPIES:
                self._waited_ns += spent

    def timings(self) -> Timings:
        """As it goes to the syncer."""
        causes = tuple(sorted(self.by_cause.items()))
        return Timings(causes, self.step_ns, self.step_ns_max, self.gap_ns_max)
