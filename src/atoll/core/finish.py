"""The run as a whole (protocol R22): waiting for a start, running, and an end that loses nothing it need not.

    waiting --start--> running --last slot closed--> draining --all settled--> final --all settled--> finished

A stop (Ctrl-C) makes the newest slot the last one and goes the same way.
"""

from __future__ import annotations

from atoll.core.context import Context
from atoll.core.events import RunOver
from atoll.core.fates import ENDING, Fates
from atoll.core.machine import Table
from atoll.core.members import Member, Roster
from atoll.core.messages import FinalRound, Finished, Finishing, Refuse
from atoll.core.pieces import Pieces
from atoll.core.records import PhaseLine, StartLine
from atoll.core.slots import SlotEngine

FINISH_TRANSFERS = 4
PATIENCE = 10
"""Bytes that move give the finish more time, but never more than so many of its bounds."""

PHASE = Table(
    name="run",
    initial="waiting",
    final=frozenset({"over"}),
    rows={
        ("waiting", "start"): "running",
        ("waiting", "stop"): "over",
        ("running", "last slot closed"): "draining",
        ("draining", "settled"): "final",
        ("final", "settled"): "finished",
        ("finished", "all left"): "over",
        ("finished", "time over"): "over",
    },
)


class Finish:
    """Moves the run from phase to phase."""

    def __init__(self, ctx: Context, roster: Roster, pieces: Pieces, fates: Fates, slots: SlotEngine) -> None:
        self._ctx = ctx
        self._config = ctx.config
        self._roster = roster
        self._pieces = pieces
        self._fates = fates
        self._slots = slots
        self.phase = PHASE.initial
        self._first_ready_ns: int | None = None
        self._deadline_ns: int | None = None
        self._latest_ns = 0
        self._stopping = False

    @property
    def joinable(self) -> bool:
        """False once the end has begun: a newcomer is told `finished`."""
        return self.phase in ("waiting", "running")

    def move(self, cause: str, reason: str) -> None:
        self.phase = PHASE.move(self.phase, cause)
        self._ctx.write(PhaseLine(self._ctx.now_ns, self.phase, self._slots.closed, reason))

    # ------------------------------------------------------------ start

    def try_start(self) -> bool:
        """Slots begin when the expected learners are ready, or `start_wait_ns` after the first."""
        if self.phase != "waiting":
            return False
        ready = self._roster.ready()
        if not ready:
            return False
        now_ns = self._ctx.now_ns
        if self._first_ready_ns is None:
            self._first_ready_ns = now_ns
        everyone = len(ready) >= self._config.learners
        if not everyone and now_ns < self._first_ready_ns + self._config.start_wait_ns:
            return False
        reason = "all expected learners are ready" if everyone else "start_wait is over"
        self._ctx.write(StartLine(now_ns, tuple(m.life.name for m in ready), reason))
        self.move("start", reason)
        return True

    # ------------------------------------------------------------ end

    def stop(self) -> None:
        """End early: the newest slot that has its quorum becomes the last."""
        if self._stopping or self.phase not in ("waiting", "running"):
            return
        self._stopping = True
        if self.phase == "waiting":
            self.move("stop", "stopped before the first slot")
            self._settle_after(0)
            for member in list(self._roster):
                self._ctx.send(member.stream, Refuse("finished", "the run was stopped before its first slot"))
                self._roster.end(member, "stopped")
            self._ctx.act(RunOver())
            return
        self._slots.last = self._slots.reached
        if self._slots.closed == self._slots.last:
            for member in self._roster.present():
                self._ctx.send(member.stream, Finishing(self._slots.last))

    def advance(self) -> bool:
        """One step towards the end if it is due. True if something changed."""
        if self.phase == "running" and self._slots.closed >= self._slots.last:
            return self._drain()
        if self.phase == "draining" and self._slots.settled:
            return self._final()
        if self.phase == "final":
            return self._close_or_settle_final()
        if self.phase == "finished":
            return self._end()
        return False

    def _drain(self) -> bool:
        self.move("last slot closed", "stopped" if self._stopping else "all slots are done")
        self._settle_after(self._slots.last)
        return True

    def _settle_after(self, slot: int) -> None:
        """Contributions for later slots have missed them, those of learners that left too."""
        for member in self._roster.with_open():
            for contribution in list(member.open.values()):
                if contribution.announce.slot > slot:
                    self._fates.settle(contribution, ENDING)

    def _bound_ns(self) -> int:
        """A lease, 4 whole-model transfers of the slowest, and 2 steps of the slowest: it hears at a boundary."""
        present = self._roster.present()
        transfer_ns = max((m.transfer_ns.get() for m in present), default=0.0)
        step_ns = max((m.step_ns.get() for m in present), default=0.0)
        whole_ns = FINISH_TRANSFERS * self._config.fragments * transfer_ns
        return int(self._config.lease_interval_ns + whole_ns + 2 * step_ns)

    def _set_deadline(self) -> None:
        bound_ns = self._bound_ns()
        self._deadline_ns = self._ctx.now_ns + bound_ns
        self._latest_ns = self._ctx.now_ns + PATIENCE * bound_ns

    def _final(self) -> bool:
        self.move("settled", "all slots are settled")
        self._set_deadline()
        self._slots.final_deadline_ns = self._deadline_ns
        self._slots.open_final()
        for member in self._roster.present():
            self._ctx.send(member.stream, FinalRound(self._pieces.versions()))
        return True

    def _close_or_settle_final(self) -> bool:
        if self._slots.settled:
            self.move("settled", "the last contributions are merged")
            self._set_deadline()
            for member in self._roster.present():
                self._ctx.send(member.stream, Finished(self._pieces.versions()))
            return True
        if not any(slot.state == "final" for slot in self._slots.live.values()):
            return False
        assert self._deadline_ns is not None
        awaited = [m for m in self._roster.returning() if m.adopted and not m.declared]
        late = self._ctx.now_ns >= self._deadline_ns
        if awaited and not late:
            return False
        missing = ", ".join(m.life.name for m in self._roster if m.adopted and not m.declared)
        if missing:
            self._ctx.notice(f"the finish did not wait longer for {missing}; work that was not sent is lost")
        self._slots.close_final("time is over" if awaited else "all declared")
        return True

    def _end(self) -> bool:
        assert self._deadline_ns is not None
        if not any(m.present or m.adopted for m in self._roster.returning()):
            self.move("all left", "everyone has left")
        elif self._ctx.now_ns >= self._deadline_ns:
            self.move("time over", "someone did not say goodbye in time")
        else:
            return False
        for member in list(self._roster):
            self._roster.end(member, "finish")
        self._ctx.act(RunOver())
        return True

    def tell_phase(self, member: Member) -> None:
        """What a learner that reconnects late must hear again."""
        if self.phase in ("draining", "final", "finished"):
            self._ctx.send(member.stream, Finishing(self._slots.last))
        if self.phase == "final":
            self._ctx.send(member.stream, FinalRound(self._pieces.versions()))
        if self.phase == "finished":
            self._ctx.send(member.stream, Finished(self._pieces.versions()))

    def moved(self) -> None:
        """Bulk bytes moved: a lease from now for the next.

        The average upload says little where downloads or a queue of round trips take the time, or none was ever whole.
        """
        if self.phase not in ("final", "finished") or self._deadline_ns is None:
            return
        until_ns = min(self._ctx.now_ns + self._config.lease_interval_ns, self._latest_ns)
        self._deadline_ns = max(self._deadline_ns, until_ns)
        self._slots.final_deadline_ns = self._deadline_ns

    def overslept(self, gap_ns: int) -> None:
        """The syncer stood still: nobody could hand anything in."""
        if self._deadline_ns is not None:
            self._deadline_ns += gap_ns
            self._latest_ns += gap_ns
        if self._slots.final_deadline_ns is not None:
            self._slots.final_deadline_ns += gap_ns

    def next_deadline_ns(self) -> int | None:
        """When time alone moves the run on."""
        if self.phase == "waiting" and self._first_ready_ns is not None:
            return self._first_ready_ns + self._config.start_wait_ns
        return self._deadline_ns
