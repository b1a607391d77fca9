"""Slots at the syncer (protocol R1-R3, R5): pace, quorum, grace, collecting, merging, committing.

Later slots go on while earlier ones collect; merges and commits of one piece happen in slot order. What one slot is,
and how the tape tells of it, is in core.slot.
"""

from __future__ import annotations

from atoll.core.causes import FAR_NORM, is_power_of_two, larger_quorum
from atoll.core.context import Context
from atoll.core.contributions import Contribution
from atoll.core.events import Commit, CommitDone, CommitFailed, Input, Merge, MergeDone, Publish
from atoll.core.fates import BYTES_LATE, MERGE_NOT_FINITE, Fates, Verdict
from atoll.core.machine import Average
from atoll.core.members import Member, Roster
from atoll.core.messages import Finishing, Life, Pace, Version
from atoll.core.pieces import Pieces
from atoll.core.records import PublishedLine, QuorumLine
from atoll.core.slot import Slot, closed_line, slot_line

COMMIT_RETRY_NS = 2_000_000_000
SAME_LEARNER_ROUNDS = 2


class SlotEngine:
    """Decides when slots have quorum, close, end collecting, merge and commit."""

    def __init__(self, ctx: Context, roster: Roster, pieces: Pieces, fates: Fates) -> None:
        config = ctx.config
        self._ctx = ctx
        self._config = config
        self._roster = roster
        self._pieces = pieces
        self._fates = fates
        self.reached = 0
        """T: newest slot whose quorum was reached (R2)."""
        self.closed = 0
        """Newest slot that has closed."""
        self.last = config.slots
        """N: the run ends after this slot."""
        self.live: dict[int, Slot] = {}
        """Slots that are not settled, by number."""
        self.final_deadline_ns: int | None = None
        self._first_clock_ns: int | None = None
        self._xi_quorum = Average(config.average_rate)
        self._xi_sync = Average(config.average_rate)
        self._interval = Average(config.average_rate)
        self._closed_at_ns = 0
        self._failures = 0
        """Commits that could not be written since one could."""
        self._alone: tuple[Life, int] | None = None

    # ------------------------------------------------------------ figures

    @property
    def interval_ns(self) -> int:
        """Moving average of the time between two closings; 0 before the second."""
        return int(self._interval.get())

    @property
    def settled(self) -> bool:
        """No slot is on its way."""
        return not self.live

    def quorum_size(self) -> int:
        return self._config.quorum_of(len(self._roster.ready()))

    def _step_ns(self) -> int:
        """The K-th fastest ready learner's step; a lease while nobody's is known."""
        step_ns = self._roster.kth_step_ns(self.quorum_size())
        return int(step_ns) if step_ns is not None else self._config.lease_interval_ns

    # ------------------------------------------------------------ pace and quorum (R2, R3)

    def tick(self, member: Member, new_steps: int) -> None:
        """A report of `new_steps`: c = min(max(c + n, T*s), (T+1)*s).

        The first reports after an absence start at T*s like a newcomer's: while few are back K_eff is small, and the
        surplus of each one that returns would make a slot of its own.
        """
        steps = self._config.slot_steps
        low, high = self.reached * steps, (self.reached + 1) * steps
        if member.clock_restarts:
            # What queued up in the outage comes in one go, many reports long.
            queued_ns = self._config.heartbeat_interval_ns
            member.clock_restarts = self._ctx.now_ns < member.returned_ns + queued_ns
            member.clock = low
            return
        member.clock = min(max(member.clock + new_steps, low), high)
        if member.clock == high and self._first_clock_ns is None:
            self._first_clock_ns = self._ctx.now_ns

    def _votes(self, number: int) -> int:
        """How many ready learners are in for slot `number`: by clock, in the lock modes by announcement."""
        ready = self._roster.ready()
        if self._config.locked:
            return sum(any(c.announce.slot >= number for c in member.open.values()) for member in ready)
        target = number * self._config.slot_steps
        return sum(member.clock >= target for member in ready)

    def try_quorum(self) -> bool:
        """Let the open slot reach its quorum if it has it. True if something changed."""
        number = self.reached + 1
        ready = len(self._roster.ready())
        if number > self.last or ready == 0 or self._backed_up(self._config.piece_of(number)):
            return False
        needed = self.quorum_size()
        if self._votes(number) < needed:
            return False
        previous = self.live.get(self.reached)
        if previous is not None and previous.state == "grace":
            self._close(previous, "the next slot has its quorum")
        self._reach(number, needed, ready)
        return True

    def _backed_up(self, piece: int) -> bool:
        """The syncer itself is behind with this piece (a slow merge, a full disk): no new slot of it until it is done.

        So slots on their way stay bounded; the learners' surplus is forgotten as after any outage (R2).
        """
        busy = ("waiting", "merging", "committing", "retrying")
        return any(slot.piece == piece and slot.state in busy for slot in self.live.values())

    def _reach(self, number: int, needed: int, ready: int) -> None:
        now_ns = self._ctx.now_ns
        first_ns = self._first_clock_ns if self._first_clock_ns is not None else now_ns
        self._xi_quorum.add_steady(now_ns - first_ns, self._step_ns())
        slot = Slot(number, self._config.piece_of(number), first_ns=first_ns, quorum_ns=now_ns, needed=needed)
        slot.move("quorum")
        slot.grace_ns = self._grace_ns()
        self.live[number] = slot
        self.reached = number
        self._first_clock_ns = None
        self._ctx.write(
            QuorumLine(
                now_ns,
                number,
                needed,
                ready,
                first_ns,
                slot.grace_ns,
                self._step_ns(),
                int(self._xi_quorum.get()),
                int(self._xi_sync.get()),
            )
        )

    def _grace_ns(self) -> int:
        """gamma * [tau * xi_step - (xi_quorum + xi_sync)], not negative, strictly below one step (Eq. 3, R5)."""
        config = self._config
        step_ns = self._roster.kth_step_ns(self.quorum_size())
        if config.locked or step_ns is None:
            return 0
        waits_ns = self._xi_quorum.get() + self._xi_sync.get()
        window_ns = config.grace_factor * (config.overlap * step_ns - waits_ns)
        return int(max(0.0, min(window_ns, step_ns - 1)))

    def _named(self, member: Member, number: int) -> Contribution | None:
        """The member's contribution that names slot `number` and has no fate yet."""
        contribution = member.open.get(self._config.piece_of(number))
        if contribution is not None and contribution.announce.slot == number:
            return contribution
        return None

    def try_close(self) -> bool:
        """Close the slot in grace when its window is over or every ready learner has announced."""
        slot = self.live.get(self.reached)
        if slot is None or slot.state != "grace":
            return False
        ready = self._roster.ready()
        if ready and all(self._named(member, slot.number) is not None for member in ready):
            self._close(slot, "all ready learners announced")
            return True
        if self._ctx.now_ns >= slot.quorum_ns + slot.grace_ns:
            self._close(slot, "grace is over" if slot.grace_ns else "no grace")
            return True
        return False

    # ------------------------------------------------------------ closing and collecting (R5)

    def open_final(self) -> None:
        """The last P slots of the finish, all open at once (R22)."""
        for number in range(self.last + 1, self.last + self._config.fragments + 1):
            slot = Slot(number, self._config.piece_of(number), quorum_ns=self._ctx.now_ns)
            slot.move("final round")
            self.live[number] = slot

    def close_final(self, reason: str) -> None:
        """All have declared, or time is over."""
        for slot in sorted(self.live.values(), key=lambda s: s.number):
            if slot.state == "final":
                self._close(slot, reason)

    def _close(self, slot: Slot, reason: str) -> None:
        now_ns = self._ctx.now_ns
        everyone = [c for c in self._all_open() if c.announce.slot == slot.number]
        slot.participants = sorted(everyone, key=lambda c: (c.life, c.announce.seq))
        regular = slot.state == "grace"
        slot.move("closed")
        slot.closed_ns = now_ns
        self.closed = max(self.closed, slot.number)
        self._ctx.write(closed_line(slot, reason, len(self._roster.ready()), len(self._roster.present())))
        if regular:
            self._tell_pace(slot)
            self._watch_diversity(slot)

    def _tell_pace(self, slot: Slot) -> None:
        now_ns = self._ctx.now_ns
        if slot.number > 1:
            self._interval.add_steady(now_ns - self._closed_at_ns, self._step_ns())
        self._closed_at_ns = now_ns
        slack_ns = max(0, slot.quorum_ns + slot.grace_ns - now_ns)
        for member in self._roster.present():
            self._send_pace(member, slot.number, slack_ns)
            if slot.number == self.last:
                self._ctx.send(member.stream, Finishing(slot.number))

    def _watch_diversity(self, slot: Slot) -> None:
        """Hazard 11: the same single learner fills slot after slot while others are ready."""
        lives = {c.life for c in slot.participants}
        if len(lives) != 1 or len(self._roster.ready()) < 2:
            self._alone = None
            return
        life = next(iter(lives))
        count = self._alone[1] + 1 if self._alone is not None and self._alone[0] == life else 1
        self._alone = (life, count)
        if count == SAME_LEARNER_ROUNDS * self._config.fragments:
            self._ctx.notice(
                f"learner {life.name} alone filled the last {count} slots although others are ready; check their "
                f"links, or begin the next run with {larger_quorum(self._config, self.quorum_size())}"
            )

    def _all_open(self) -> list[Contribution]:
        return [c for member in self._roster.with_open() for c in member.open.values()]

    def _still_expected(self, slot: Slot) -> bool:
        """True while announced bytes of a learner that is still there are not in."""
        now_ns = self._ctx.now_ns
        for contribution in slot.participants:
            if contribution.state != "announced":
                continue
            member = self._roster.by_life(contribution.life)
            stuck = now_ns >= contribution.progress_at_ns + self._config.lease_interval_ns
            final = slot.number > self.last
            there = member is not None and (self._roster.within_lease(member) if final else member.present)
            if there and not stuck:
                return True
        return False

    def _collect_deadlines(self, slot: Slot) -> tuple[int, int]:
        """(when enough complete ones suffice, when collecting ends whatever is missing)."""
        if slot.number > self.last:
            end_ns = self.final_deadline_ns
            assert end_ns is not None
            return end_ns, end_ns
        step_ns = self._step_ns()
        overlap_ns = slot.closed_ns + self._config.overlap * step_ns
        return overlap_ns, slot.closed_ns + max(self._config.interval * step_ns // 2, 1)

    def try_collect(self, slot: Slot) -> bool:
        """End collecting if R5 says so."""
        if slot.state != "collecting":
            return False
        if self._still_expected(slot):
            if self._config.locked and slot.number <= self.last:
                return False
            enough_ns, end_ns = self._collect_deadlines(slot)
            complete = sum(c.complete for c in slot.participants)
            enough = complete >= min(self.quorum_size(), len(slot.participants))
            now_ns = self._ctx.now_ns
            if now_ns < end_ns and not (enough and now_ns >= enough_ns):
                return False
        slot.collected_ns = self._ctx.now_ns
        slot.move("collected")
        for contribution in slot.participants:
            if contribution.state == "announced":
                self._fates.settle(contribution, BYTES_LATE)
        return True

    # ------------------------------------------------------------ merging and committing (R6, R11, R25)

    def try_merge(self, slot: Slot) -> bool:
        """Start the merge of a collected slot when all earlier slots of its piece are settled."""
        if slot.state == "retrying" and self._ctx.now_ns >= slot.retry_at_ns:
            assert slot.commit is not None
            slot.move("retry")
            self._ctx.act(slot.commit)
            return True
        earlier = any(s.piece == slot.piece and s.number < slot.number for s in self.live.values())
        if slot.state != "waiting" or earlier:
            return False
        slot.inputs = self._judge(slot)
        piece = self._pieces[slot.piece]
        if not slot.inputs:
            slot.move("empty")
            self._record_empty(slot)
            return True
        slot.move("inputs")
        slot.merge_started_ns = self._ctx.now_ns
        inputs = tuple(Input(c.life, c.announce.seq, c.weight) for c in slot.inputs)
        version = Version(piece.version.lineage, piece.version.n + 1)
        self._ctx.act(Merge(slot.number, slot.piece, piece.version, version, inputs))
        return True

    def _judge(self, slot: Slot) -> list[Contribution]:
        """The contributions that may be merged, in id order; the others get their fate."""
        piece = self._pieces[slot.piece]
        fresh = []
        for contribution in slot.participants:
            if not contribution.complete:
                continue
            anchor = contribution.announce.anchor
            age = piece.version.n - anchor.n
            assert age >= 0, "anchors were checked at the entrance"
            if age > self._config.stale_max:
                self._fates.settle(contribution, Verdict("missed", f"stale: its anchor is {age} versions old"))
            else:
                fresh.append(contribution)
        judged = piece.history.judge(fresh)
        if judged.overruled:
            self._ctx.notice(
                f"slot {slot.number}: more than half of the contributions have norms far above the history of "
                f"fragment {slot.piece}; none is refused. If the loss rises, lower the inner learning rate"
            )
        for contribution in judged.raised:
            self._fates.raised(contribution, judged.usual)
        for contribution in judged.refused:
            reason = f"norm {contribution.norm:.3g} {FAR_NORM}"
            self._fates.settle(contribution, Verdict("refused", reason))
        return [c for c in fresh if c not in judged.refused]

    def merge_done(self, event: MergeDone) -> None:
        slot = self.live[event.slot]
        piece = self._pieces[slot.piece]
        if not event.finite:
            slot.move("not finite")
            self._ctx.notice(f"slot {slot.number}: the merged fragment {slot.piece} is not finite and was dropped")
            for contribution in slot.inputs:
                self._fates.settle(contribution, MERGE_NOT_FINITE)
            self._record_empty(slot)
            return
        slot.merge = event
        slot.move("merged")
        version = Version(piece.version.lineage, piece.version.n + 1)
        newest = dict(piece.newest_merged)
        newest.update({c.life: c.announce.seq for c in slot.inputs})
        commit = Commit(
            slot.number,
            slot.piece,
            version,
            slot_line(slot, piece.version, version, self._ctx.now_ns),
            tuple(sorted((life, seq) for life, seq in newest.items() if self._roster.by_life(life) is not None)),
        )
        slot.commit = commit
        self._ctx.act(commit)

    def commit_done(self, event: CommitDone) -> None:
        slot = self.live.pop(event.slot)
        assert slot.commit is not None
        assert slot.merge is not None
        slot.move("committed")
        self._failures = 0
        piece = self._pieces[slot.piece]
        assert slot.commit.version > piece.version, "versions only grow"
        piece.version = slot.commit.version
        piece.slot = piece.settled_slot = slot.number
        piece.update_hash, piece.update_bytes = slot.merge.update_hash, slot.merge.update_bytes
        piece.newest_merged = dict(slot.commit.newest_merged)
        for contribution in slot.inputs:
            self._fates.merged(contribution)
        self._xi_sync.add_steady(self._ctx.now_ns - slot.closed_ns, self._step_ns())
        self._ctx.act(Publish(slot.piece, piece.version))
        self._ctx.write(PublishedLine(self._ctx.now_ns, slot.number, slot.piece, piece.version))
        self._pieces.tell_everyone(slot.piece)

    def commit_failed(self, event: CommitFailed) -> None:
        slot = self.live[event.slot]
        slot.move("failed")
        slot.retry_at_ns = self._ctx.now_ns + COMMIT_RETRY_NS
        self._failures += 1
        if is_power_of_two(self._failures):
            self._ctx.notice(
                f"slot {slot.number} could not be written ({event.reason}); merges stop, learners go on, "
                f"tried again every {COMMIT_RETRY_NS / 1e9:.0f} s"
            )

    def tell_pace(self, member: Member) -> None:
        """The newest slot that has closed, to one who may have missed it."""
        self._send_pace(member, self.closed, 0)

    def _send_pace(self, member: Member, slot: int, slack_ns: int) -> None:
        age_ns = self._ctx.now_ns - member.echo_at_ns
        self._ctx.send(member.stream, Pace(slot, self.interval_ns, slack_ns, member.echo_ns, age_ns))

    # ------------------------------------------------------------ records and time

    def _record_empty(self, slot: Slot) -> None:
        """An empty slot is recorded, changes nothing and makes no version (hazard 27).

        Learners hear of it: with stale_max = 0 all would wait for its version before they capture that piece again.
        """
        del self.live[slot.number]
        piece = self._pieces[slot.piece]
        self._ctx.write(slot_line(slot, piece.version, piece.version, self._ctx.now_ns))
        piece.settled_slot = slot.number
        self._pieces.tell_everyone(slot.piece)

    def next_deadline_ns(self) -> int | None:
        """When a slot may next have something to do by time alone."""
        deadlines = []
        for slot in self.live.values():
            if slot.state == "grace":
                deadlines.append(slot.quorum_ns + slot.grace_ns)
            elif slot.state == "retrying":
                deadlines.append(slot.retry_at_ns)
            elif slot.state == "collecting":
                if not (self._config.locked and slot.number <= self.last):
                    deadlines.extend(self._collect_deadlines(slot))
                deadlines.extend(
                    c.progress_at_ns + self._config.lease_interval_ns
                    for c in slot.participants
                    if c.state == "announced"
                )
        return min((d for d in deadlines if d > self._ctx.now_ns), default=None)
