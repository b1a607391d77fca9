"""Virtual time: a heap of callbacks. Equal times run in the order in which they were scheduled."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """`call_at` schedules, `run_next` runs the earliest; `now_ns` only grows."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._count = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []

    def call_at(self, at_ns: int, callback: Callable[[], None]) -> None:
        """Run `callback` at `at_ns`, or now if that has passed."""
        self._count += 1
        heapq.heappush(self._heap, (max(at_ns, self.now_ns), self._count, callback))

    def call_after(self, delay_ns: float, callback: Callable[[], None]) -> None:
        """Run `callback` after `delay_ns`."""
        self.call_at(self.now_ns + int(delay_ns), callback)

    def due(self) -> bool:
        """True while something is to be done at this very instant."""
        return bool(self._heap) and self._heap[0][0] <= self.now_ns

    def run_next(self) -> bool:
        """Run the earliest callback; False when there is none."""
        if not self._heap:
            return False
        self.now_ns, _, callback = heapq.heappop(self._heap)
        callback()
        return True


class Timer:
    """One wish at a time: a newer one takes the place of the older, as in the real drivers."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._at_ns: int | None = None

    def set(self, at_ns: int) -> None:
        """Ring at `at_ns`, unless another time is set by then."""
        self._at_ns = at_ns
        self._clock.call_at(at_ns, lambda: self._due(at_ns))

    def _due(self, at_ns: int) -> None:
        if self._at_ns == at_ns:
            self._ring()
