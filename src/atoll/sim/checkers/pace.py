"""Quorum, grace, closing and collecting as declared (R2, R3, R5): neither before their time nor after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.core.messages import Life
from atoll.core.records import ClosedLine, FateLine, PhaseLine, PublishedLine, QuorumLine, Record, SlotLine
from atoll.sim.checkers.shadow import AVERAGE_YOUNG, Shadow, ShadowContribution, ShadowMember

if TYPE_CHECKING:
    from atoll.sim.world import World

BUSY = ("waiting", "merging", "committing", "retrying")
NOT_IN = "its bytes were not in"
ALONE_ROUNDS = 2
FINISH_PATIENCE = 10


@dataclass(slots=True)
class _Slot:
    number: int
    piece: int
    quorum_ns: int
    grace_ns: int
    closed_ns: int | None = None
    participants: list[ShadowContribution] = field(default_factory=list)


@dataclass(slots=True)
class _Mean:
    """Exponential moving average."""

    rate: float
    value: float | None = None
    count: int = 0

    def add(self, sample: float, least: float) -> None:
        """After 8 samples one counts at most 4 averages, or `least`."""
        if self.count >= AVERAGE_YOUNG:
            sample = min(sample, max(4 * (self.value or 0.0), least))
        self.count += 1
        self.value = sample if self.value is None else self.value + self.rate * (sample - self.value)


class Pace:
    """Reads the tape line by line, before the shadow takes each line in."""

    def __init__(self, world: World, shadow: Shadow) -> None:
        self._world = world
        self._config = world.config
        self._shadow = shadow
        self._slots: dict[int, _Slot] = {}
        self._closed: set[int] = set()
        self._phase = "waiting"
        self._phase_ns = 0
        self._first_ready_ns: int | None = None
        slot_steps = world.config.interval // world.config.fragments
        self._last = -(-world.config.steps // slot_steps)
        """N: steps are rounded up to whole slots (R1, R22)."""
        self._stopped = False
        self._quorum_wait = _Mean(world.config.average_rate)
        self._sync = _Mean(world.config.average_rate)
        self._alone: tuple[Life, int] | None = None
        self._warnings = 0

    def read(self, record: Record) -> None:
        match record:
            case QuorumLine():
                self._quorum(record)
            case ClosedLine():
                self._close(record)
            case FateLine():
                self._fate(record)
            case SlotLine():
                self._settled(record)
            case PublishedLine(now_ns, slot):
                closed_ns = self._slots.pop(slot).closed_ns
                assert closed_ns is not None
                self._sync.add(now_ns - closed_ns, self._step_ns())
            case PhaseLine():
                self._moved(record)

    def _step_ns(self) -> int:
        step_ns = self._shadow.kth_step_ns()
        return int(step_ns) if step_ns is not None else self._config.lease_interval_ns

    # ------------------------------------------------------------ quorum and grace

    def _votes(self, number: int) -> int:
        ready = self._shadow.ready()
        if self._config.mode != "decoupled":
            return sum(any(c.announce.slot >= number for c in m.open.values()) for m in ready)
        return sum(m.clock >= number * self._config.slot_steps for m in ready)

    def _quorum(self, record: QuorumLine) -> None:
        shadow, number = self._shadow, record.slot
        assert self._phase == "running", "a slot opens only while the run goes on"
        assert number == shadow.reached + 1, "quorums come in slot order, one at a time"
        assert number <= self._last, "no regular slot after the last"
        assert record.ready == len(shadow.ready()), f"{record.ready} ready, in truth {len(shadow.ready())}"
        assert record.needed == shadow.needed(), f"K_eff {record.needed}, by R3 {shadow.needed()}"
        assert self._votes(number) >= record.needed, f"slot {number}: {self._votes(number)} of {record.needed} clocks"
        first_ns = shadow.first_ns if shadow.first_ns is not None else record.now_ns
        assert record.first_ns == first_ns, f"slot {number}: the first clock came at {first_ns}"
        self._quorum_wait.add(record.now_ns - first_ns, self._step_ns())
        assert record.quorum_wait_ns == int(self._quorum_wait.value or 0)
        assert record.sync_ns == int(self._sync.value or 0)
        self._grace(record)
        self._slots[number] = _Slot(number, number % self._config.fragments, record.now_ns, record.grace_ns)
        shadow.reached, shadow.first_ns = number, None

    def _grace(self, record: QuorumLine) -> None:
        """Eq. 3, strictly below one step."""
        config = self._config
        step_ns = self._shadow.kth_step_ns()
        if config.mode != "decoupled" or step_ns is None:
            assert record.grace_ns == 0, "grace without a known step"
            return
        assert record.step_ns == int(step_ns), f"K-th fastest step {record.step_ns}, by R5 {int(step_ns)}"
        waits_ns = (self._quorum_wait.value or 0) + (self._sync.value or 0)
        window_ns = max(0.0, min(config.grace_factor * (config.overlap * step_ns - waits_ns), step_ns - 1))
        assert abs(record.grace_ns - window_ns) <= 1, f"grace {record.grace_ns}, by Eq. 3 {window_ns:.0f}"
        assert record.grace_ns < max(step_ns, 1), "grace is strictly below one step"

    # ------------------------------------------------------------ closing

    def _naming(self, number: int) -> list[ShadowContribution]:
        return [c for m in self._shadow.members.values() for c in m.open.values() if c.announce.slot == number]

    def _all_ready_announced(self, number: int) -> bool:
        """R5: every ready learner has announced *for t*; nobody ready is nobody to wait for, but no reason either."""
        ready, piece = self._shadow.ready(), number % self._config.fragments
        return bool(ready) and all(piece in m.open and m.open[piece].announce.slot == number for m in ready)

    def _close(self, record: ClosedLine) -> None:
        shadow, number, now_ns = self._shadow, record.slot, record.now_ns
        assert number not in self._closed, f"slot {number} closed twice"
        serves = number % self._config.fragments
        assert record.piece == serves, f"slot {number} serves piece {serves}, not {record.piece} (R1)"
        self._closed.add(number)
        if number > self._last:
            self._slots[number] = _Slot(number, record.piece, now_ns, 0)
            self._close_final(record)
        else:
            self._close_regular(record, self._slots[number])
        slot = self._slots[number]
        naming = self._naming(number)
        inside = {(c.life.name, c.life.generation, c.announce.seq) for c in naming}
        assert set(record.participants) == inside, f"slot {number}: participants are those announced by now (R5)"
        assert record.ready == len(shadow.ready()), "ready is a number of its own (hazard 12)"
        present = sum(m.present for m in shadow.members.values())
        assert record.live == present, f"{record.live} live, in truth {present} (hazard 12)"
        slot.closed_ns, slot.participants = now_ns, naming

    def _close_regular(self, record: ClosedLine, slot: _Slot) -> None:
        now_ns, reason = record.now_ns, record.reason
        assert record.waited_ns == now_ns - slot.quorum_ns, "each wait is recorded with its numbers"
        if reason == "all ready learners announced":
            assert self._all_ready_announced(slot.number), f"slot {slot.number}: not all ready learners announced"
        elif reason == "the next slot has its quorum":
            assert self._votes(slot.number + 1) >= self._shadow.needed()
        else:
            assert now_ns >= slot.quorum_ns + slot.grace_ns, f"slot {slot.number} closed in its grace: {reason}"
        self._watch_alone(record)

    def _watch_alone(self, record: ClosedLine) -> None:
        """Hazard 11, counted again."""
        lives = {Life(name, generation) for name, generation, _ in record.participants}
        if len(lives) != 1 or record.ready < 2:
            self._alone = None
            return
        [life] = lives
        count = self._alone[1] + 1 if self._alone is not None and self._alone[0] == life else 1
        self._alone = (life, count)
        self._warnings += count == ALONE_ROUNDS * self._config.fragments

    def _close_final(self, record: ClosedLine) -> None:
        """R22: whoever may yet hand in is waited for, while bytes of theirs move, for at most 10 bounds."""
        assert self._phase == "final", "the last slots close in the finish"
        now_ns, lease_ns = record.now_ns, self._config.lease_interval_ns
        for member in self._shadow.members.values():
            heard = member.present or (member.state == "away" and now_ns < member.last_sign_ns + lease_ns)
            if not (heard and member.adopted) or member.declared:
                continue
            patient = now_ns - self._phase_ns >= FINISH_PATIENCE * lease_ns
            stands = now_ns >= max(member.moved_ns, self._phase_ns) + lease_ns
            assert patient or stands, f"the last round ends while bytes of {member.life} move (R22)"

    # ------------------------------------------------------------ collecting

    def _owner(self, contribution: ShadowContribution) -> ShadowMember:
        return self._shadow.members[contribution.life]

    def _may_end(self, slot: _Slot, now_ns: int) -> bool:
        """R5: whether collecting may, and so must, end now."""
        config = self._config
        lease_ns = config.lease_interval_ns
        missing = [c for c in slot.participants if not c.complete and not c.settled]
        if not any(self._owner(c).present and now_ns < c.progress_at_ns + lease_ns for c in missing):
            return True
        if slot.number > self._last:
            return now_ns >= self._phase_ns + lease_ns
        if config.mode != "decoupled":
            return False
        step_ns = self._step_ns()
        assert slot.closed_ns is not None
        if now_ns >= slot.closed_ns + max(config.interval * step_ns // 2, 1):
            return True
        complete = sum(c.complete and not c.settled for c in slot.participants)
        enough = complete >= min(self._shadow.needed(), len(slot.participants))
        return enough and now_ns >= slot.closed_ns + config.overlap * step_ns

    def _fate(self, record: FateLine) -> None:
        """A contribution is missed only for a reason that is true."""
        life, reason = Life(record.name, record.generation), record.reason
        member = self._shadow.members[life]
        if reason.startswith(NOT_IN):
            slot = self._slots[record.slot]
            assert self._may_end(slot, record.now_ns), f"slot {record.slot} did not wait for {life}'s bytes (R5)"
            mine = [c for c in slot.participants if c.life == life and c.announce.seq == record.seq]
            assert [c.complete for c in mine] == [False], f"{life}'s bytes were in"
        elif reason.endswith("had closed"):
            assert record.slot in self._closed, f"slot {record.slot} had not closed"
        elif reason.endswith("not ready"):
            assert member.state != "ready", f"{life} was ready"
        elif reason == "the run is ending":
            assert self._phase != "running" or record.slot > self._last, f"{life} was refused and the run goes on"
        elif reason.startswith("stale"):
            newest_n = self._world.checkers.tape.version_of(record.piece)
            age = newest_n - member.open[record.piece].announce.anchor.n
            assert age > self._config.stale_max, f"{life} was {age} versions behind, which may be (R6)"
        elif reason.startswith(("its learner is gone", "its learner left")):
            mine_open = member.open.get(record.piece)
            assert mine_open is None or not mine_open.complete, f"{life}: a complete contribution outlives its learner"

    def _settled(self, record: SlotLine) -> None:
        slot = self._slots.get(record.slot)
        assert slot is not None, f"slot {record.slot} settles and was never open"
        assert slot.closed_ns is not None, f"slot {record.slot} settles before it closed"
        merged = {(m.name, m.generation, m.seq) for m in record.merged}
        for c in slot.participants:
            key = (c.life.name, c.life.generation, c.announce.seq)
            assert c.settled or key in merged, f"slot {record.slot}: {key} has no fate"
            if key in merged:
                assert c.complete, f"{key} was merged before its bytes were in"
                [one] = [m for m in record.merged if (m.name, m.generation, m.seq) == key]
                told = (one.c_steps, one.c_tokens, one.own_step, tuple(one.anchor))
                was = (c.announce.c_steps, c.announce.c_tokens, c.announce.own_step, tuple(c.announce.anchor))
                assert told == was, f"{key} was announced as {was} and merged as {told}"
        inside = {(c.life.name, c.life.generation, c.announce.seq) for c in slot.participants}
        assert merged <= inside, f"slot {record.slot} merged what did not take part: {merged - inside}"
        if not record.merged:
            del self._slots[record.slot]

    # ------------------------------------------------------------ the run

    def _moved(self, record: PhaseLine) -> None:
        config, phase = self._config, record.phase
        if phase == "running":
            self._note_first_ready()
            waited = self._first_ready_ns is not None and (
                record.now_ns >= self._first_ready_ns + config.start_wait_ns
            )
            assert len(self._shadow.ready()) >= config.learners or waited, "slots began too early (R22)"
        if phase == "draining":
            assert self._last == self._world.syncer.core.slots.last, "the run ends with another slot than it should"
            assert self._last in self._closed or self._last == 0, "the run ends before its last slot closed"
        if phase == "final":
            assert not self._slots, f"the last round begins while slots {list(self._slots)} are open"
        if phase == "finished":
            assert not self._slots, "the run ends and slots are open"
        self._phase, self._phase_ns = phase, record.now_ns

    def stopped(self) -> None:
        """Ctrl-C was taken: the newest slot that has its quorum is the last (R22)."""
        if self._phase in ("waiting", "running") and not self._stopped:
            self._stopped = True
            self._last = self._shadow.reached

    def _note_first_ready(self) -> None:
        if self._first_ready_ns is None and self._shadow.ready():
            self._first_ready_ns = self._world.clock.now_ns

    def after(self) -> None:
        """After each event of the syncer: nothing that is due is left undone."""
        world, shadow = self._world, self._shadow
        self._note_first_ready()
        if world.syncer.over:
            return
        live = world.syncer.core.slots.live
        now_ns = world.clock.now_ns
        for slot in self._slots.values():
            if slot.closed_ns is not None and live[slot.number].state == "collecting":
                late = slot.number <= self._last and self._may_end(slot, now_ns)
                assert not late, f"slot {slot.number} still collects (R5)"
        if self._phase != "running":
            return
        current = self._slots.get(shadow.reached)
        if current is not None and current.closed_ns is None:
            assert not self._all_ready_announced(current.number), f"slot {current.number} waits and all have announced"
            assert now_ns < current.quorum_ns + current.grace_ns, f"slot {current.number} is open beyond its grace"
        self._quorum_in_time()

    def _quorum_in_time(self) -> None:
        number = self._shadow.reached + 1
        slots = self._world.syncer.core.slots
        if number > self._last or not self._shadow.ready():
            return
        piece = number % self._config.fragments
        if any(s.piece == piece and s.state in BUSY for s in slots.live.values()):
            return
        assert self._votes(number) < self._shadow.needed(), f"slot {number} has its quorum and does not open (R2)"

    @property
    def warnings_due(self) -> int:
        """How often people had to be told that one learner alone fills the slots (hazard 11)."""
        return self._warnings
