"""Links in virtual time: control messages in order, bulk bytes that share a rate, and how either breaks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from atoll.sim.clock import Clock

CHUNKS = 4
"""Steps in which a transfer on a limited link moves: between two of them it can be cut, stalled or stopped."""


class Line:
    """One direction of a control connection: in order, after a latency; held back while that direction is down.

    Nothing is lost here: as with TCP, what was said in a partition arrives when it is over.
    """

    def __init__(self, clock: Clock, latency_ns: int) -> None:
        self._clock = clock
        self._latency_ns = latency_ns
        self._holds = 0
        self._waiting: deque[Callable[[], None]] = deque()

    def send(self, deliver: Callable[[], None]) -> None:
        """Call `deliver` a latency from now, or when the direction is open again."""
        self._clock.call_after(self._latency_ns, lambda: self._arrive(deliver))

    def _arrive(self, deliver: Callable[[], None]) -> None:
        if self._holds:
            self._waiting.append(deliver)
        else:
            deliver()

    @property
    def held(self) -> bool:
        return self._holds > 0

    def hold(self) -> None:
        """This direction carries nothing until `release`; holds add up."""
        self._holds += 1

    def release(self) -> None:
        self._holds -= 1
        while self._waiting and not self._holds:
            self._waiting.popleft()()


class Rate:
    """A rate that transfers share: each chunk moves at the rate divided by the transfers that are under way."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.factor = 1.0
        self.active = 0

    def chunk_ns(self, size_bytes: int) -> float:
        """How long a chunk takes now. 0 on a link without limit."""
        if not self.bytes_per_s:
            return 0.0
        return size_bytes * self.factor * max(self.active, 1) / self.bytes_per_s * 1e9


class Transfer:
    """Bytes under way over one or two links (the learner's own, and its site's)."""

    def __init__(self, total_bytes: int, rates: list[Rate], ended: Callable[[Transfer], None]) -> None:
        self.total_bytes = total_bytes
        self.moved_bytes = 0
        self.stopped = False
        """The syncer does not want it any more."""
        self.broken = False
        self._rates = rates
        self._ended = ended

    @property
    def whole(self) -> bool:
        return self.moved_bytes >= self.total_bytes


class Bulk:
    """The bulk connections of one learner: chunks move, stall while it is held, break when it is cut."""

    def __init__(self, clock: Clock, moved: Callable[[], None]) -> None:
        self._clock = clock
        self._moved = moved
        self.cuts = 0
        self._holds = 0
        self._held: list[Transfer] = []
        self._running: list[Transfer] = []

    def start(self, transfer: Transfer) -> None:
        """Move its chunks from now on."""
        if self.cuts:
            transfer.broken = True
            self._clock.call_after(0, lambda: transfer._ended(transfer))
            return
        self._running.append(transfer)
        for rate in transfer._rates:
            rate.active += 1
        self._next(transfer)

    def _next(self, transfer: Transfer) -> None:
        if transfer not in self._running:
            return
        if self._holds:
            self._held.append(transfer)
            return
        if transfer.moved_bytes:
            self._moved()
        if transfer.whole:
            self._end(transfer)
            return
        chunk_bytes = -(-transfer.total_bytes // CHUNKS)
        duration_ns = max((rate.chunk_ns(chunk_bytes) for rate in transfer._rates), default=0.0)
        if duration_ns == 0:
            chunk_bytes = transfer.total_bytes

        def moved() -> None:
            transfer.moved_bytes = min(transfer.total_bytes, transfer.moved_bytes + chunk_bytes)
            self._next(transfer)

        self._clock.call_after(duration_ns, moved)

    def stop(self, transfer: Transfer) -> None:
        """It is not wanted any more: it ends now, also where its bytes are on their way or being waited for."""
        transfer.stopped = True
        if transfer in self._running:
            self._end(transfer)
        else:
            transfer._ended(transfer)

    def _end(self, transfer: Transfer) -> None:
        self._running.remove(transfer)
        for rate in transfer._rates:
            rate.active -= 1
        transfer._ended(transfer)

    def cut(self) -> None:
        """Break all transfers; none can begin until `mend`."""
        self.cuts += 1
        for transfer in list(self._running):
            transfer.broken = True
            self._end(transfer)
        self._held.clear()

    def mend(self) -> None:
        self.cuts -= 1

    def hold(self) -> None:
        """Bytes stand still until `release`."""
        self._holds += 1

    def release(self) -> None:
        self._holds -= 1
        if not self._holds:
            held, self._held = self._held, []
            for transfer in held:
                self._next(transfer)

    def drop(self) -> None:
        """The process is gone: its transfers end without a word."""
        for transfer in self._running:
            for rate in transfer._rates:
                rate.active -= 1
        self._running.clear()
        self._held.clear()
