"""Push-ahead capture (protocol R4): which pieces a learner captures at a step boundary, and for which slots.

At each boundary, in this order:

1. a piece that missed its turn, for the next slot of that piece that its bytes can reach, longest unmerged first;
2. the pieces of the coming slots that are expected to close before the next boundary (plus transfer and delay), in
   slot order.

Only what can still be merged is captured: the piece is settled, its anchor will be within `stale_max` when the slot is
merged, its bytes are expected by closing + overlap. The uplink is kept short: at the next boundary it holds the
transfer in progress and at most one more. (Counting queued transfers instead of those left at the next boundary would
starve a slow learner on a fast link: one step of it may span many slots.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from atoll.core.config import RunConfig
from atoll.core.forecast import Horizon

UPLINK_LEFT_MAX = 2
ROUNDS_AHEAD = 2
EARLY = 0.1
STARVED = 2
"""Times as long unmerged as any other piece, and no other is captured before it."""
HELD_ROUNDS = 2
MISSES = 2
"""A closing may come earlier than predicted by so much of a step, and by so many mean errors of earlier predictions;
or later, by so many errors."""


@dataclass(slots=True)
class PieceView:
    """What the planner must know of one piece."""

    size_bytes: int
    settled: bool
    """Nothing of it is unsettled (R6)."""
    worked: bool
    """There is local work to send."""
    anchor_n: int
    newest_n: int
    """Newest version heard of."""
    newest_slot: int
    """Newest settled slot of this piece heard of."""
    last_named_slot: int
    """Slot of the last capture that was not missed; 0: none."""
    last_merged_slot: int
    passed_slot: int
    """Newest slot of this piece that is known to be over for this learner; it is not named again."""

    @property
    def ready(self) -> bool:
        """It may be captured."""
        return self.settled and self.worked


class CapturePlanner:
    """Chooses (piece, slot) pairs at one boundary. Keeps nothing for the next."""

    def __init__(self, config: RunConfig, horizon: Horizon, pieces: list[PieceView]) -> None:
        self._config = config
        self._at = horizon
        self._pieces = pieces
        self.probes = False
        """What was planned is not expected in time."""

    def closing_ns(self, slot: int) -> float:
        """When `slot` is expected to close."""
        at = self._at
        ahead = slot - at.closed
        if at.slot_interval_ns:
            return at.closed_at_ns - at.delay_ns / 2 + ahead * at.slot_interval_ns
        return at.now_ns + (ahead * self._config.slot_steps - at.own_steps) * at.step_ns

    def plan(self, backlog_bytes: list[int], rate_bytes_per_s: float | None) -> list[tuple[int, int]]:
        """(piece, slot) to capture now, in order. `backlog_bytes`: transfers that are not yet done, in order."""
        link = _Uplink(self._at, backlog_bytes, rate_bytes_per_s)
        chosen: dict[int, int] = {}
        for piece, slots in self._candidates(link):
            if piece in chosen:
                continue
            view = self._pieces[piece]
            slot = self._slot_in_time(piece, slots, link) if view.ready else None
            if slot is not None and link.take(view.size_bytes):
                chosen[piece] = slot
            elif slot is None and view.settled and self._starves(piece):
                break
        if not chosen and self._at.probe:
            self.probes = True
            return self._probe(link)
        return list(chosen.items())

    def _slot_in_time(self, piece: int, slots: list[int], link: _Uplink) -> int | None:
        """The first of `slots` into which the piece can still be merged."""
        view = self._pieces[piece]
        for slot in slots:
            if slot <= view.passed_slot or self._will_have_closed(slot):
                continue
            if self._fresh_enough(view, piece, slot) and self._in_time(slot, link, view.size_bytes):
                return slot
        return None

    def _probe(self, link: _Uplink) -> list[tuple[int, int]]:
        """One piece whose bytes are not expected in time, with the most time that there is.

        A rate that was measured while the link stood still would forbid all captures, and so never be corrected.
        """
        for piece, slots in self._candidates(link):
            view = self._pieces[piece]
            for slot in reversed(slots):
                if view.ready and slot > view.passed_slot and self._fresh_enough(view, piece, slot):
                    return [(piece, slot)]
        return []

    def _candidates(self, link: _Uplink) -> Iterator[tuple[int, list[int]]]:
        """Pieces with the slots that they may name, most urgent first."""
        for piece in self._overdue():
            yield piece, self._slots_of(piece)
        for slot in self._coming(link):
            yield self._config.piece_of(slot), [slot]

    def _overdue(self) -> list[int]:
        """Pieces whose last turn passed without a capture that could be merged, longest unmerged first (hazard 17)."""
        late = []
        for piece, view in enumerate(self._pieces):
            turn = self._config.next_slot_of(piece, self._at.closed) - self._config.fragments
            if turn > self._at.joined_at and view.last_named_slot < turn:
                late.append((view.last_merged_slot, turn, piece))
        return [piece for _, _, piece in sorted(late)]

    def _starves(self, piece: int) -> bool:
        """It has waited twice as long as any other; for two rounds the uplink is kept free for it, less and less often.

        Else the same chance can pass it by for ever: its update comes when the uplink is free, and overwriting leaves
        no work to send; a step later the uplink is taken. Or the uplink is free only while its anchor is too old. Less
        and less often (after 2, 4, 8... rounds), for it may be one that this link never carries in time.
        """
        waits = [self._at.closed - view.last_merged_slot for view in self._pieces]
        others = max((wait for index, wait in enumerate(waits) if index != piece), default=waits[piece])
        rounds = waits[piece] // self._config.fragments
        if rounds < HELD_ROUNDS or waits[piece] <= STARVED * others:
            return False
        return rounds - (1 << rounds.bit_length() - 1) < HELD_ROUNDS

    def _slots_of(self, piece: int) -> list[int]:
        first = self._config.next_slot_of(piece, self._at.closed)
        step = self._config.fragments
        return [s for s in range(first, first + ROUNDS_AHEAD * step, step) if s <= self._at.last_slot]

    def _coming(self, link: _Uplink) -> list[int]:
        """Slots above T whose pieces cannot wait for the next boundary, in slot order."""
        at = self._at
        slots = []
        for slot in range(at.closed + 1, min(at.closed + self._config.fragments, at.last_slot) + 1):
            size_bytes = self._pieces[self._config.piece_of(slot)].size_bytes
            if not self._cannot_wait(slot, link.arrival_ns(size_bytes)):
                break
            slots.append(slot)
        return slots

    def _cannot_wait(self, slot: int, arrival_ns: float) -> bool:
        """True when the announcement, or the bytes, would be too late if captured at the next boundary.

        The slot closes when it is expected to, or up to `slack_ns` later if it still lacks this learner.
        """
        at = self._at
        if (slot - at.closed) * self._config.slot_steps <= at.own_steps:
            return True
        closing_ns = self.closing_ns(slot)
        if closing_ns + self._overlap_ns() < arrival_ns + at.step_ns + at.bytes_late_ns:
            return True
        margin_ns = EARLY * at.step_ns + MISSES * at.miss_ns + at.delay_ns + at.announce_late_ns
        return closing_ns + at.slack_ns <= at.now_ns + at.step_ns + margin_ns

    def _overlap_ns(self) -> float:
        """How long bytes are waited for after closing: overlap, but never more than half a round (R5)."""
        interval_ns = self._at.slot_interval_ns or self._config.slot_steps * self._at.step_ns
        steps = min(self._config.overlap, self._config.interval / 2)
        return steps * interval_ns / self._config.slot_steps

    def _fresh_enough(self, view: PieceView, piece: int, slot: int) -> bool:
        """The anchor will be at most `stale_max` versions old when `slot` is merged, if the slots before it merge.

        A slot that closed more than a round ago and made no version that was heard of was empty.
        """
        settled_to = max(view.newest_slot, self._at.closed - self._config.fragments, 0)
        first = self._config.next_slot_of(piece, settled_to)
        between = max(0, (slot - first) // self._config.fragments)
        return view.newest_n + between - view.anchor_n <= self._config.stale_max

    def _will_have_closed(self, slot: int) -> bool:
        """The slot closes while the announcement is on its way, as far as predictions go.

        Not where that time is so long past that its closing would have been heard of: then it is late, and open. Nor
        where predictions are less sure than that is long. Experience of coming too late makes it longer.
        """
        at = self._at
        way_ns, closing_ns = at.delay_ns / 2, self.closing_ns(slot)
        margin_ns = way_ns + at.announce_late_ns
        if at.miss_ns >= margin_ns:
            return False
        heard_ns = way_ns + MISSES * at.miss_ns + at.announce_late_ns
        return at.now_ns - heard_ns < closing_ns < at.now_ns + margin_ns - at.slack_ns

    def _in_time(self, slot: int, link: _Uplink, size_bytes: int) -> bool:
        """Its bytes are expected by closing + overlap, by as much earlier as experience tells."""
        closing_ns = max(self.closing_ns(slot), self._at.now_ns + self._at.delay_ns)
        return link.arrival_ns(size_bytes) + self._at.bytes_late_ns <= closing_ns + self._overlap_ns()


class _Uplink:
    """The queue of the uplink as this boundary leaves it."""

    def __init__(self, at: Horizon, backlog_bytes: list[int], rate_bytes_per_s: float | None) -> None:
        self._at = at
        self._ns_per_byte = 1e9 / rate_bytes_per_s if rate_bytes_per_s else 0.0
        self._free_ns = float(at.now_ns)
        self._left = 0
        for size_bytes in backlog_bytes:
            self._add(size_bytes)

    def _add(self, size_bytes: int) -> None:
        self._free_ns += size_bytes * self._ns_per_byte
        if self._free_ns > self._at.now_ns + self._at.step_ns:
            self._left += 1

    def arrival_ns(self, size_bytes: int) -> float:
        """When the last byte is at the syncer.

        The measured rate counts the way back of the answer too, which the bytes do not wait for.
        """
        way_ns = self._at.delay_ns / 2
        return max(self._free_ns + size_bytes * self._ns_per_byte - way_ns, self._at.now_ns + way_ns)

    def take(self, size_bytes: int) -> bool:
        """Queue one more transfer if at the next boundary at most one waits behind the one in progress."""
        ends_ns = self._free_ns + size_bytes * self._ns_per_byte
        if ends_ns > self._at.now_ns + self._at.step_ns and self._left >= UPLINK_LEFT_MAX:
            return False
        self._add(size_bytes)
        return True
