"""What a learner holds of one piece: its anchor, the update that has arrived, and what of its work is on its way."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.capture import PieceView
from atoll.core.events import UpdateArrived
from atoll.core.ledger import PieceBook
from atoll.core.messages import Announce, UpdateReady, Version


@dataclass(slots=True)
class Unsettled:
    """A contribution between capture and its fate, or the taking of an update that contains it (R6)."""

    announce: Announce
    probe: bool = False
    """It was not expected in time: that it came too late teaches nothing."""
    uploaded: bool = False
    passed: bool = False
    """An update of its slot or a later one was taken that does not contain it: lock modes wait no more for it."""

    @property
    def seq(self) -> int:
        return self.announce.seq

    @property
    def slot(self) -> int:
        return self.announce.slot

    @property
    def captured_step(self) -> int:
        return self.announce.own_step


@dataclass(slots=True)
class HeldPiece:
    """One piece at one learner. Slots are 0 before there is one."""

    size_bytes: int
    """Of its payload."""
    book: PieceBook
    anchor: Version | None = None
    newest: UpdateReady | None = None
    """The newest update that was heard of."""
    arrived: UpdateArrived | None = None
    """The newest update that is staged and not taken."""
    unsettled: Unsettled | None = None
    last_named: int = 0
    """Slot of the last capture that was not missed."""
    last_merged: int = 0
    passed: int = 0
    """Newest slot of this piece that is known to be over for this learner; it is not named again."""

    @property
    def held(self) -> Version | None:
        """The newest version that is here, taken or not."""
        return self.arrived.version if self.arrived is not None else self.anchor

    def hear(self, message: UpdateReady) -> None:
        """An update is ready at the syncer; only the newest counts."""
        newest = self.newest
        if newest is None or (message.version, message.slot) > (newest.version, newest.slot):
            self.newest = message

    def arrive(self, event: UpdateArrived) -> int | None:
        """An update was staged; returns the place that is free by that: its own, where it is not the newest."""
        older = self.arrived
        if older is not None and older.version >= event.version:
            return event.place
        self.arrived = event
        return older.place if older is not None else None

    def is_newer(self, update: UpdateArrived) -> bool:
        """Than the anchor."""
        return self.anchor is None or update.version > self.anchor

    def contains_unsettled(self, update: UpdateArrived, generation: int) -> bool:
        """The update has in it what this life's learner has on its way."""
        own, merged = self.unsettled, update.merged
        return own is not None and merged.generation == generation and merged.seq >= own.seq

    def took(self, update: UpdateArrived, *, contains: bool) -> None:
        """It is the anchor now."""
        self.anchor = update.version
        self.passed = max(self.passed, update.slot)
        if contains:
            self.unsettled = None
            self.last_merged = update.slot
        elif self.unsettled is not None and update.slot >= self.unsettled.slot:
            self.unsettled.passed = True

    def captured(self, announce: Announce, *, probe: bool) -> None:
        """Its work is on its way, for the slot that it names."""
        assert self.unsettled is None, "one contribution per piece is unsettled (R6)"
        self.unsettled = Unsettled(announce, probe)
        self.last_named = announce.slot

    def not_merged(self, slot: int) -> None:
        """What was on its way is settled: that slot is over without it."""
        self.unsettled = None
        self.last_named = 0
        self.passed = max(self.passed, slot)

    def view(self) -> PieceView:
        """For the planner."""
        anchor, newest = self.anchor, self.newest
        assert anchor is not None
        return PieceView(
            self.size_bytes,
            self.unsettled is None,
            self.book.local_steps > 0,
            anchor.n,
            max(newest.version.n if newest is not None else 0, anchor.n),
            newest.slot if newest is not None else 0,
            self.last_named,
            self.last_merged,
            self.passed,
        )
