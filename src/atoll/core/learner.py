"""The learner: decisions at step boundaries (protocol R4, R6-R9, R14, R22).

    joining --all first parameters adopted--> training --last slot closed--> finishing --all taken--> over

Between boundaries events only update what is known; updates are taken and pieces captured when the driver says
`Stepped`, or at once while the training thread waits anyway (R9). `waiting` names the cause of such a wait; the driver
blocks on its queue while it is not None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from atoll.core.alone import SYNCER_WAIT_NS, Alone
from atoll.core.capture import CapturePlanner
from atoll.core.config import RunConfig
from atoll.core.events import (
    AgentRestarted,
    Capture,
    CaptureSeed,
    End,
    Free,
    Heard,
    Interrupted,
    LearnerAction,
    LearnerEvent,
    Past,
    Revert,
    Stepped,
    StreamLost,
    Take,
    Tell,
    UpdateArrived,
    UploadDone,
    Wake,
)
from atoll.core.forecast import Forecast
from atoll.core.held import HeldPiece, Unsettled
from atoll.core.layout import Layout
from atoll.core.ledger import LearnerBook
from atoll.core.machine import Average, Table
from atoll.core.messages import (
    Announce,
    Declare,
    Fate,
    FinalRound,
    Finished,
    Finishing,
    Leave,
    Pace,
    Refuse,
    Replaced,
    Report,
    SeedRequest,
    Timings,
    UpdateReady,
    Version,
    Welcome,
)

LEARNER = Table(
    name="learner",
    initial="joining",
    final=frozenset({"over"}),
    rows={
        ("joining", "adopted"): "training",
        ("training", "last slot closed"): "finishing",
        ("finishing", "finished"): "over",
        ("joining", "ended"): "over",
        ("training", "ended"): "over",
        ("finishing", "ended"): "over",
    },
)


class Learner:
    """State machine of one life. Settings and generation come from the syncer's Welcome.

    syncer_wait_ns: how long it trains on without a syncer (R28). in_place: the syncer did not know the life before this
    one any more; the training thread goes on and does not wait for the first parameters, its steps until then count for
    nothing. progress_steps: how far the life before had come, in steps of the run.
    """

    def __init__(
        self,
        config: RunConfig,
        layout: Layout,
        name: str,
        generation: int,
        *,
        syncer_wait_ns: int = SYNCER_WAIT_NS,
        in_place: bool = False,
        progress_steps: int = 0,
    ) -> None:
        self._config = config
        self._name = name
        self._generation = generation
        self._actions: list[LearnerAction] = []
        self._now_ns = 0
        self.state = LEARNER.initial
        sizes_bytes = layout.payload_sizes(config.payload)
        self.book = LearnerBook.empty(len(sizes_bytes))
        self.pieces = [HeldPiece(size, book) for size, book in zip(sizes_bytes, self.book.pieces, strict=True)]
        self._fates: list[Fate] = []
        self._seq = 0
        self._in_place = in_place
        self._alone = Alone(config, wait_ns=syncer_wait_ns, progress_steps=progress_steps)
        self._heard_at_ns = 0
        self._forecast = Forecast(config)
        self._joined_at = 0
        self._reported_steps = 0
        self._last_capture_step = 0
        self._idle_since = 0
        """T when a contribution was last settled."""
        self._boundary_ns: int | None = None
        self._standing = True
        """The training thread stands at a boundary. Else it is in the middle of a step, whatever is heard meanwhile."""
        self._step_ns = Average(config.average_rate)
        self._rate = Average(config.average_rate)
        self._finish_slot: int | None = None
        self._final_versions: tuple[Version, ...] | None = None
        self._declared = False
        self._finished_versions: tuple[Version, ...] | None = None
        self.ended: End | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            Heard: self._on_heard,
            StreamLost: self._on_stream_lost,
            UpdateArrived: self._on_update_arrived,
            UploadDone: self._on_upload_done,
            Stepped: self._on_stepped,
            Interrupted: self._on_interrupted,
            AgentRestarted: lambda event: self._tell_again(),
            Wake: lambda event: None,
        }
        self._messages: dict[type, Callable[[Any], None]] = {
            Welcome: self._on_welcome,
            Refuse: self._on_refuse,
            Replaced: lambda m: self._end(False, m.reason, "put out"),
            SeedRequest: lambda m: self._actions.append(CaptureSeed()),
            Pace: self._on_pace,
            Fate: self._on_fate,
            UpdateReady: self._on_update_ready,
            Finishing: self._on_finishing,
            FinalRound: self._on_final_round,
            Finished: self._on_finished,
        }

    # ------------------------------------------------------------ what the driver may ask

    @property
    def waiting(self) -> str | None:
        """Why the training thread must wait now (R9): parameters | lock | finish; None: it may train."""
        if self.state == "joining":
            return None if self._in_place else "parameters"
        if self.state == "finishing":
            return "finish"
        if self.state == "training" and self._lock_due():
            return "lock"
        return None

    @property
    def counts(self) -> bool:
        """Whether the next step counts: not before a life that begins in place has its first parameters."""
        return self.state != "joining"

    @property
    def over(self) -> bool:
        """True after End."""
        return self.state == "over"

    @property
    def progress(self) -> float:
        """Global progress of the run, 0 to 1, for schedules (R22). It never falls."""
        return self._alone.progress

    @property
    def progress_steps(self) -> int:
        """The same in steps of the run."""
        return self._alone.progress_steps

    def past(self) -> Past:
        """What a new agent of this life must know (R28); the rest `AgentRestarted` tells it."""
        held = tuple((piece, own.held) for piece, own in enumerate(self.pieces) if own.held is not None)
        staged = self.staged()
        free = tuple(place for place in range(self._config.places) if place not in staged)
        return Past(self._generation, held, free)

    def staged(self) -> list[int]:
        """Places that hold updates which are not taken yet."""
        return [own.arrived.place for own in self.pieces if own.arrived is not None]

    @property
    def anchors(self) -> list[Version | None]:
        """Of every piece."""
        return [own.anchor for own in self.pieces]

    @property
    def _unsettled(self) -> list[Unsettled]:
        """In the order of their capture."""
        return sorted((own.unsettled for own in self.pieces if own.unsettled is not None), key=lambda u: u.seq)

    @property
    def _own_steps(self) -> int:
        """Since T was heard."""
        return self.book.steps - self._forecast.own_steps_at_closed

    def handle(self, event: LearnerEvent, *, now_ns: int) -> list[LearnerAction]:
        """Take one event at monotonic time `now_ns`; return what to do, in order."""
        assert now_ns >= self._now_ns, "the driver's clock is monotonic"
        self._now_ns = now_ns
        if self.state != "over":
            self._handlers[type(event)](event)
            if isinstance(event, Stepped):
                self._standing = True
            self._alone.look(self._forecast.closed, self._own_steps, now_ns)
            if self.state != "over" and self._standing and self.waiting is not None:
                self._while_waiting()
            self._standing = self._standing and self.waiting is not None
        actions, self._actions = self._actions, []
        return actions

    # ------------------------------------------------------------ what is heard

    def _on_heard(self, event: Heard) -> None:
        self._heard_at_ns = event.at_ns
        self._messages[type(event.message)](event.message)

    def _on_welcome(self, message: Welcome) -> None:
        assert message.generation == self._generation
        self._alone.back()
        if self.state == "joining":
            self._joined_at = message.slot
        self._hear_slot(message.slot, message.slot_interval_ns)

    def _on_pace(self, message: Pace) -> None:
        self._hear_slot(message.slot, message.slot_interval_ns)
        self._forecast.hear_pace(message, self._heard_at_ns)

    def _hear_slot(self, slot: int, interval_ns: int) -> None:
        self._forecast.hear_slot(slot, interval_ns, self._heard_at_ns, self._step_ns.get(), self.book.steps)

    def _on_update_ready(self, message: UpdateReady) -> None:
        self.pieces[message.piece].hear(message)

    def _on_stream_lost(self, event: StreamLost) -> None:
        self._alone.lost(self._now_ns)

    def _on_upload_done(self, event: UploadDone) -> None:
        if event.moved_bytes:
            self._rate.add(event.moved_bytes / max(event.duration_ns, 1) * 1e9)
        unsettled = self.pieces[event.piece].unsettled
        if unsettled is not None and unsettled.seq == event.seq:
            unsettled.uploaded = unsettled.uploaded or event.whole

    def _on_fate(self, message: Fate) -> None:
        """Kept for the boundary: the step in progress is not in the book yet, but a revert would drop its work."""
        self._fates.append(message)

    def _apply_fates(self) -> None:
        fates, self._fates = self._fates, []
        for message in fates:
            self._apply_fate(message)

    def _apply_fate(self, message: Fate) -> None:
        """missed: the work is local again; refused: theta goes back to the anchor (R7)."""
        own = self.pieces[message.piece]
        unsettled = own.unsettled
        if unsettled is None or unsettled.seq != message.seq:
            return
        own.not_merged(message.slot)
        self._idle_since = self._forecast.closed
        if message.fate == "missed":
            own.book.missed()
            if not unsettled.probe:
                self._forecast.too_late(message.late, self._step_ns.get())
        elif own.book.refused():
            self._actions.append(Revert(message.piece))

    def _on_update_arrived(self, event: UpdateArrived) -> None:
        """Only the newest staged update of a piece is kept."""
        place = self.pieces[event.piece].arrive(event)
        if place is not None:
            self._actions.append(Free(place))

    def _on_finishing(self, message: Finishing) -> None:
        self._finish_slot = message.slot

    def _on_final_round(self, message: FinalRound) -> None:
        self._final_versions = message.versions

    def _on_finished(self, message: Finished) -> None:
        self._finished_versions = message.versions

    def _on_refuse(self, message: Refuse) -> None:
        """The agent passes on only what ends this life: the run is over, or a newer life has the name (R28)."""
        if message.kind == "finished":
            self._end(True, message.message, "run over")
        else:
            self._end(False, message.message, "put out")

    def _on_interrupted(self, event: Interrupted) -> None:
        self._leave(event.reason)
        self._end(True, event.reason, "left")

    # ------------------------------------------------------------ the boundary

    def _on_stepped(self, event: Stepped) -> None:
        if self.state == "joining" and self._in_place:
            self._step_uncounted()
            return
        assert self.state == "training", "step() comes after the first parameters and before the end"
        self.book.step(event.tokens, event.loss)
        if self._boundary_ns is not None:
            self._step_ns.add(self._now_ns - self._boundary_ns)
        self._boundary_ns = self._now_ns
        self._apply_fates()
        self._take_arrived()
        if self._may_finish():
            self._enter_finish()
            return
        if self._config.locked:
            self._capture_locked()
        else:
            self._capture_ahead()
        self._report_if_due()
        self._check_alone()

    def _report_if_due(self) -> None:
        if self.book.steps - self._reported_steps >= self._config.slot_steps:
            self._report()

    def _report(self) -> None:
        self._reported_steps = self.book.steps
        self._actions.append(Tell(Report(self.book.counters())))

    def _check_alone(self) -> None:
        """Without a syncer a learner trains on, but not for ever (R28)."""
        self._alone.look(self._forecast.closed, self._own_steps, self._now_ns)
        reason = self._alone.gave_up(self._now_ns)
        if reason:
            unmerged = f"what it trained meanwhile ({self._own_steps} steps) is not merged"
            self._end(False, f"{reason}; {unmerged}", "syncer lost")

    def _step_uncounted(self) -> None:
        """A step of a life that begins in place: first parameters come piece by piece, and replace what it trained."""
        self._take_arrived()
        self._adopt()
        self._check_alone()

    def _tell_again(self) -> None:
        """To a new agent: what the old one may not have told. Counters are today's: older ones would run backwards."""
        counters = self.book.counters()
        for unsettled in self._unsettled:
            self._actions.append(Tell(replace(unsettled.announce, counters=counters)))
        if self.state != "joining":
            self._report()
        if self._declared:
            self._actions.append(Tell(Declare()))

    # ------------------------------------------------------------ taking updates (R7)

    def _take_arrived(self) -> None:
        """Take every staged update that may be taken now; drop those that are not newer."""
        for piece, own in enumerate(self.pieces):
            if own.arrived is not None and not self._held_back(own):
                update, own.arrived = own.arrived, None
                self._take(piece, own, update)

    def _held_back(self, own: HeldPiece) -> bool:
        """Lock modes take an update exactly `overlap` steps after their capture."""
        unsettled = own.unsettled
        if not self._config.locked or unsettled is None or self.state != "training":
            return False
        return self.book.steps < unsettled.captured_step + self._config.overlap

    def _take(self, piece: int, own: HeldPiece, update: UpdateArrived) -> None:
        if update.slot > self._forecast.closed:
            self._heard_at_ns = self._now_ns
            self._hear_slot(update.slot, self._forecast.interval_ns)
        if not own.is_newer(update):
            self._actions.append(Free(update.place))
            return
        if own.anchor is None or self.state == "joining":
            self._actions.append(Take(piece, update.version, update.place, "adopt", False))
            own.anchor = update.version
            return
        contains = own.contains_unsettled(update, self._generation)
        own.book.take(contains_in_flight=contains, overwrite=self._config.take == "overwrite")
        self._actions.append(Take(piece, update.version, update.place, self._config.take, contains))
        own.took(update, contains=contains)
        if contains:
            self._idle_since = self._forecast.closed
            self._forecast.merged()

    # ------------------------------------------------------------ capture (R4)

    def _capture(self, piece: int, slot: int, *, probe: bool = False, final: bool = False) -> None:
        own = self.pieces[piece]
        assert own.anchor is not None
        self._seq += 1
        c_steps, c_tokens = own.book.capture()
        announce = Announce(
            self._seq,
            piece,
            slot,
            own.anchor,
            self.book.steps,
            c_steps,
            c_tokens,
            self.book.counters(),
            own.size_bytes,
            final,
        )
        own.captured(announce, probe=probe)
        self._actions.append(Capture(announce))

    def _capture_ahead(self) -> None:
        if not self._alone.connected:
            return
        planner = self._planner()
        for piece, slot in planner.plan(self._backlog_bytes(), self._rate.value):
            self._capture(piece, slot, probe=planner.probes)

    def _planner(self) -> CapturePlanner:
        horizon = self._forecast.horizon(
            now_ns=self._now_ns,
            step_ns=self._step_ns.get(),
            own_steps=self.book.steps,
            joined_at=self._joined_at,
            probe=not self._unsettled and self._forecast.closed >= self._idle_since + self._config.fragments,
        )
        return CapturePlanner(self._config, horizon, [own.view() for own in self.pieces])

    def _backlog_bytes(self) -> list[int]:
        """What the uplink has yet to carry, in order. The first counts whole: less was worse (docs/LOG.md)."""
        return [self.pieces[u.announce.piece].size_bytes for u in self._unsettled if not u.uploaded]

    def _capture_locked(self) -> None:
        """Every s steps the piece of the first slot that has not closed and is not named yet.

        A slot whose contribution was missed before it closed is named again: the others wait for it.
        """
        if self.book.steps - self._last_capture_step < self._config.slot_steps:
            return
        named = {u.slot for u in self._unsettled}
        closed = self._forecast.closed
        slot = next(s for s in range(closed + 1, closed + len(named) + 2) if s not in named)
        piece = self._config.piece_of(slot)
        last = self._config.slots if self._finish_slot is None else self._finish_slot
        own = self.pieces[piece]
        if slot > last or own.unsettled is not None or not own.book.local_steps:
            return
        self._last_capture_step = self.book.steps
        self._capture(piece, slot)

    def _lock_due(self) -> bool:
        """A contribution is `overlap` steps old and its update has not been taken (R9)."""
        if not self._config.locked or not self._alone.connected:
            return False
        overlap = self._config.overlap
        return any(not u.passed and self.book.steps >= u.captured_step + overlap for u in self._unsettled)

    # ------------------------------------------------------------ waits (R9, R22)

    def _while_waiting(self) -> None:
        """The training thread stands at a boundary: take what is there and see whether the wait is over."""
        self._apply_fates()
        self._take_arrived()
        if self.state == "joining":
            self._adopt()
        elif self.state == "finishing":
            self._finish()
        elif self._may_finish():
            self._enter_finish()
            self._finish()
        if self.state != "over":
            self._boundary_ns = self._now_ns

    def _may_finish(self) -> bool:
        """The last slot has closed; in the lock modes every capture is `overlap` steps old too, as in any slot."""
        if self._finish_slot is None:
            return False
        overlap = self._config.overlap
        return not self._config.locked or all(self.book.steps >= u.captured_step + overlap for u in self._unsettled)

    def _enter_finish(self) -> None:
        self.state = LEARNER.move(self.state, "last slot closed")

    def _adopt(self) -> None:
        if any(anchor is None for anchor in self.anchors):
            return
        self.state = LEARNER.move(self.state, "adopted")
        self._joined_at = self._idle_since = self._forecast.closed
        self._forecast.own_steps_at_closed = self.book.steps
        self._report()
        if self._may_finish():
            self._enter_finish()

    def _finish(self) -> None:
        if self._alone.gave_up(self._now_ns):
            reason = "the syncer went away in the finish; the last steps of this learner are not merged"
            self._end(False, reason, "syncer lost")
            return
        if self._finished_versions is not None:
            self._finish_end(self._finished_versions)
        elif self._final_versions is not None and not self._declared:
            self._final_captures(self._final_versions)

    def _reached(self, versions: tuple[Version, ...]) -> bool:
        return all(a is not None and a >= v for a, v in zip(self.anchors, versions, strict=True))

    def _final_captures(self, versions: tuple[Version, ...]) -> None:
        """All updates are taken and everything is settled: each piece with work left goes once (R22)."""
        if not self._reached(versions) or self._unsettled:
            return
        assert self._finish_slot is not None
        first = self._finish_slot + 1
        for slot in range(first, first + self._config.fragments):
            piece = self._config.piece_of(slot)
            if self.book.pieces[piece].local_steps:
                self._capture(piece, slot, final=True)
        self._declared = True
        self._actions.append(Tell(Declare()))

    def _finish_end(self, versions: tuple[Version, ...]) -> None:
        """The run is over: what the codec's rounding left in r goes too, so that all end with the same bits (R22)."""
        if not self._reached(versions):
            return
        self._actions += [Revert(piece) for piece in range(len(self.anchors))]
        self._leave("finished")
        self._end(True, "finished", "finished")

    def _leave(self, reason: str) -> None:
        for book in self.book.pieces:
            book.end()
        self.book.check()
        self._actions.append(Tell(Leave(reason, self.book.counters(), Timings())))

    def _end(self, ok: bool, reason: str, kind: str) -> None:
        self.state = LEARNER.move(self.state, "finished" if kind == "finished" else "ended")
        self.ended = End(ok, reason, kind)
        self._actions.append(self.ended)
