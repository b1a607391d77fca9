"""Members, clocks and contributions, worked out again from what crosses the wire and what the tape says (R2, R6, R10).

Nothing here asks the core. Hooks come in the order in which things happen; the tape is read up to the instant before
each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.core import events as ev
from atoll.core.messages import (
    LATE_ANNOUNCEMENT,
    LATE_BYTES,
    Announce,
    Declare,
    Fate,
    Finishing,
    Heartbeat,
    Life,
    Refuse,
    Report,
    UpdateReady,
    Welcome,
)
from atoll.core.records import (
    ClosedLine,
    FateLine,
    GrantLine,
    MemberLine,
    OversleptLine,
    Record,
    ReportLine,
    SlotLine,
)

if TYPE_CHECKING:
    from atoll.sim.world import World

PRESENT = ("joining", "ready", "idle")
AVERAGE_YOUNG = 8
IDLE_STEPS = 4


@dataclass(slots=True)
class ShadowContribution:
    """One accepted contribution without a fate."""

    life: Life
    announce: Announce
    progress_at_ns: int
    complete: bool = False
    settled: bool = False


@dataclass(slots=True)
class ShadowMember:
    """One life as an onlooker at the syncer's door would describe it."""

    life: Life
    stream: int
    state: str
    clock: int
    last_sign_ns: int
    last_advance_ns: int
    reported_at_ns: int | None = None
    steps_seen: int = 0
    reported_steps: int = 0
    waiting: bool = False
    declared: bool = False
    moved_ns: int = 0
    """When bulk bytes of it last moved."""
    adopted: bool = False
    surplus_until_ns: int = -1
    """What is reported before does not count, nor does the first report after (it was away)."""
    surplus: bool = False
    step_ns: float | None = None
    samples: int = 0
    open: dict[int, ShadowContribution] = field(default_factory=dict)
    heard_seq: dict[int, int] = field(default_factory=dict)
    told: dict[int, int] = field(default_factory=dict)
    """Per piece, the newest version that it was told of."""

    @property
    def present(self) -> bool:
        return self.state in PRESENT


class Shadow:
    """The roster, once more."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._config = world.config
        self.members: dict[Life, ShadowMember] = {}
        self._by_stream: dict[int, ShadowMember] = {}
        self._steps: dict[tuple[Life, int], int] = {}
        self._granting: tuple[int, str] | None = None
        self._asking = 0
        """Generation of the Hello that is answered now."""
        self._closing: int | None = None
        self._finishing: set[int] = set()
        """Streams on which it was said that the run is ending."""
        self._closed = 0
        """Newest slot that has closed."""
        self._late: dict[tuple[Life, int], str] = {}
        """Of each contribution with a fate: what came too late."""
        self.reached = 0
        self.first_ns: int | None = None
        """When the first clock reached (T + 1) * s."""

    # ------------------------------------------------------------ look-ups

    def ready(self) -> list[ShadowMember]:
        return [m for m in self.members.values() if m.state == "ready"]

    def steps_of(self, key: tuple[Life, int]) -> int:
        """c_steps of an accepted contribution."""
        return self._steps[key]

    def needed(self) -> int:
        """K_eff (R3)."""
        ready, config = len(self.ready()), self._config
        if config.mode != "decoupled":
            return max(1, ready)
        return max(1, min(config.quorum or -(-ready // 2), ready))

    def kth_step_ns(self) -> float | None:
        """Step time of the K-th fastest ready learner."""
        known = sorted(m.step_ns for m in self.ready() if m.step_ns is not None)
        return known[min(self.needed(), len(known)) - 1] if known else None

    def idle_after_ns(self, member: ShadowMember) -> int:
        return max(int(IDLE_STEPS * (member.step_ns or 0.0)), self._config.lease_interval_ns)

    # ------------------------------------------------------------ the wire

    def before(self, event: ev.SyncerEvent) -> None:
        now_ns = self._world.clock.now_ns
        match event:
            case ev.Received(stream, message):
                member = self._by_stream.get(stream)
                if member is not None and member.state != "ended":
                    self._heard(member, message, now_ns)
            case ev.BulkProgress(life):
                found = self.members.get(life)
                if found is not None:
                    self._bulk(found, now_ns)
            case ev.ContributionArrived(life, piece, seq, _, hash_ok, finite, _):
                found = self.members.get(life)
                contribution = found.open.get(piece) if found is not None else None
                if contribution is not None and contribution.announce.seq == seq and hash_ok and finite:
                    contribution.complete = True
            case ev.StreamOpened(stream, hello):
                self._granting = (stream, hello.name)
                self._asking = hello.generation
            case ev.StreamClosed(stream):
                self._closing = stream

    def _heard(self, member: ShadowMember, message: object, now_ns: int) -> None:
        member.last_sign_ns = now_ns
        match message:
            case Report(counters):
                self._advance(member, counters.steps, False, now_ns)
            case Heartbeat(steps, waiting):
                self._advance(member, steps, waiting, now_ns)
            case Declare():
                member.declared = True
            case Announce(seq, piece) if seq > member.heard_seq.get(piece, 0):
                member.heard_seq[piece] = seq
                self._advance(member, message.own_step, False, now_ns)

    def _advance(self, member: ShadowMember, steps: int, waiting: bool, now_ns: int) -> None:
        member.waiting = waiting
        if steps > member.steps_seen or waiting:
            member.steps_seen = max(member.steps_seen, steps)
            member.last_advance_ns = now_ns

    def _bulk(self, member: ShadowMember, now_ns: int) -> None:
        member.moved_ns = now_ns
        for contribution in member.open.values():
            if not contribution.complete:
                contribution.progress_at_ns = now_ns
        if member.present:
            member.last_sign_ns = now_ns

    def sent(self, stream: int, name: str, message: object) -> Life | None:
        """The syncer says something on a stream: whose it is, None where it is refused."""
        if isinstance(message, Refuse):
            self._refused(message, name)
        if isinstance(message, Welcome):
            member = self.members[Life(name, message.generation)]
            self._by_stream.pop(member.stream, None)
            member.stream = stream
            self._by_stream[stream] = member
            member.last_sign_ns = self._world.clock.now_ns
        elif isinstance(message, Finishing):
            self._finishing.add(stream)
        elif isinstance(message, UpdateReady):
            told = self._by_stream.get(stream)
            if told is not None:
                self._told(told, message)
        owner = self._by_stream.get(stream)
        if owner is not None and isinstance(message, Fate):
            due = self._late[owner.life, message.seq]
            assert message.late == due, f"{owner.life} seq {message.seq}: late is {due!r}, told {message.late!r} (R4)"
        return owner.life if owner is not None else None

    def _refused(self, message: Refuse, name: str) -> None:
        """R13: a life that has not ended is never refused; a name only while it is in use."""
        current = [m for m in self.members.values() if m.life.name == name and m.state != "ended"]
        if message.kind == "replaced" and self._asking:
            assert all(m.life.generation != self._asking for m in current), f"{name} came back, and was taken for dead"
        if message.kind == "name":
            assert any(m.present for m in current), f"the name {name} is free, and was refused"

    def _told(self, member: ShadowMember, message: UpdateReady) -> None:
        found = self._world.syncer.published[message.piece]
        assert message.version == found.version, "an update is told that is not published"
        assert message.merged == found.merged_for(member.life), f"{member.life} is told of another's seq (R6)"
        member.told[message.piece] = message.version.n

    def all_told(self) -> None:
        """A version is published: every present member hears of it."""
        for member in self.members.values():
            if member.present and member.stream in self._world.syncer.streams:
                for piece, found in self._world.syncer.published.items():
                    assert member.told.get(piece, -1) >= found.version.n, (
                        f"{member.life} was not told of version {found.version.n} of piece {piece}"
                    )

    def accepted(self, action: ev.Accept) -> None:
        """R3, R6: from a ready learner, one per piece, against a version that exists."""
        life, announce = action.life, action.announce
        member = self.members[life]
        current = member.open.get(announce.piece)
        if current is not None:
            assert current.announce == announce, f"{life} piece {announce.piece}: two contributions at once (R6)"
            return
        last = announce.slot > self._world.syncer.core.slots.last
        assert announce.final or not last, f"{life} named slot {announce.slot} as a regular one (R22)"
        assert last or member.state == "ready", f"{life} takes part and is {member.state} (R3)"
        published = self._world.syncer.published[announce.piece].version
        newest = self._world.syncer.core.pieces[announce.piece].version
        assert announce.anchor <= max(published, newest), f"{life} is ahead of what exists"
        assert 1 <= announce.c_steps <= announce.counters.steps, f"{life} claims {announce.c_steps} steps"
        assert 1 <= announce.c_tokens <= announce.counters.tokens, f"{life} claims {announce.c_tokens} tokens"
        now_ns = self._world.clock.now_ns
        member.open[announce.piece] = ShadowContribution(life, announce, now_ns)
        self._steps[life, announce.seq] = announce.c_steps

    # ------------------------------------------------------------ the tape

    def read(self, record: Record) -> None:
        match record:
            case GrantLine():
                self._granted(record)
            case MemberLine():
                self._moved(record)
            case ReportLine():
                self._reported(record)
            case OversleptLine(now_ns, gap_ns):
                self._overslept(now_ns, gap_ns)
            case ClosedLine():
                self._closed = max(self._closed, record.slot)
            case FateLine():
                life = Life(record.name, record.generation)
                self._late[life, record.seq] = self._what_was_late(life, record)
                self._settle(life, record.piece, record.seq)
            case SlotLine():
                for m in record.merged:
                    self._settle(Life(m.name, m.generation), record.piece, m.seq)

    def _granted(self, record: GrantLine) -> None:
        life = Life(record.name, record.generation)
        assert self._granting is not None, "a generation was granted and nobody asked"
        stream, name = self._granting
        assert name == record.name
        assert life not in self.members, f"{life} was granted twice"
        others = [m for m in self.members.values() if m.life.name == name and m.state != "ended"]
        assert not others, f"two lives of {name} at once (R13)"
        assert all(m.life.generation < record.generation for m in self.members.values()), "generations grow"
        clock = self.reached * self._config.slot_steps
        now_ns = record.now_ns
        member = ShadowMember(life, stream, "joining", clock, now_ns, now_ns)
        self.members[life] = member
        self._by_stream[stream] = member

    def _moved(self, record: MemberLine) -> None:
        """R10: each change of state has its reason in what was heard."""
        member = self.members[Life(record.name, record.generation)]
        assert member.state == record.before, f"{record} but the member is {member.state}"
        now_ns, lease_ns, reason = record.now_ns, self._config.lease_interval_ns, record.reason
        if record.state == "away" and reason == "stream closed":
            assert self._closing == member.stream, f"{member.life} is away, its stream did not close"
        elif record.state == "away":
            assert now_ns >= member.last_sign_ns + lease_ns, f"{member.life} was heard within its lease (R10)"
            self._check_silence(member, now_ns - lease_ns)
        elif record.state == "idle" and record.before == "ready":
            assert not member.waiting, f"{member.life} waits by R9 and is called idle"
            assert now_ns >= member.last_advance_ns + self.idle_after_ns(member), f"{member.life} steps (R10)"
        elif record.before == "idle" and record.state == "ready":
            assert member.last_advance_ns == now_ns, f"{member.life} is ready again and has not stepped"
        elif record.state == "ended" and reason == "replaced":
            assert not member.present, f"{member.life} was replaced while it was there (R13)"
        if record.before == "away" and record.state != "ended":
            self._comes_back(member, now_ns)
        if record.before == "joining" and record.state == "ready":
            member.last_advance_ns = now_ns
            member.adopted = True
        member.state = record.state

    def _check_silence(self, member: ShadowMember, since_ns: int) -> None:
        """R10: an agent that lives, on a line that holds, is heard, also while its training thread hangs."""
        for agent in self._world.processes:
            if agent.life == member.life and agent.alive and agent.stream == member.stream:
                held = agent.line_held_since(since_ns - agent.spec.latency_ns)
                assert not held, f"{member.life} is called silent, its agent lives and its line holds"

    def _comes_back(self, member: ShadowMember, now_ns: int) -> None:
        member.surplus = True
        member.surplus_until_ns = now_ns + self._config.heartbeat_interval_ns

    def _reported(self, record: ReportLine) -> None:
        """R2: the clock of the report."""
        member = self.members[Life(record.name, record.generation)]
        new = record.steps - member.reported_steps
        if new > 0 and member.reported_at_ns is not None and not member.surplus:
            self._sample(member, (record.now_ns - member.reported_at_ns) / new)
        member.adopted = True
        member.reported_steps, member.reported_at_ns = record.steps, record.now_ns
        steps = self._config.slot_steps
        low, high = self.reached * steps, (self.reached + 1) * steps
        if member.surplus:
            member.surplus = record.now_ns < member.surplus_until_ns
            member.clock = low
        else:
            member.clock = min(max(member.clock + new, low), high)
            if member.clock == high and self.first_ns is None:
                self.first_ns = record.now_ns
        assert record.clock == member.clock, f"{member.life}: clock {record.clock}, by R2 {member.clock}"

    def _sample(self, member: ShadowMember, sample_ns: float) -> None:
        if member.samples >= AVERAGE_YOUNG:
            sample_ns = min(sample_ns, IDLE_STEPS * (member.step_ns or 0.0))
        member.samples += 1
        old = member.step_ns
        member.step_ns = sample_ns if old is None else old + self._config.average_rate * (sample_ns - old)

    def _overslept(self, now_ns: int, gap_ns: int) -> None:
        for member in self.members.values():
            member.last_sign_ns += gap_ns
            member.last_advance_ns += gap_ns
            self._comes_back(member, now_ns)
            for contribution in member.open.values():
                contribution.progress_at_ns += gap_ns

    def _what_was_late(self, life: Life, record: FateLine) -> str:
        """Not accepted, for a slot that had closed: its announcement. Not whole when collecting ended: its bytes."""
        contribution = self.members[life].open.get(record.piece)
        accepted = contribution is not None and contribution.announce.seq == record.seq
        if record.fate != "missed":
            return ""
        if not accepted:
            regular = record.slot <= self._world.syncer.core.slots.last
            return LATE_ANNOUNCEMENT if regular and record.slot <= self._closed else ""
        assert contribution is not None
        collected = record.reason.startswith("its bytes")
        return LATE_BYTES if collected and not contribution.complete else ""

    def _settle(self, life: Life, piece: int, seq: int) -> None:
        member = self.members[life]
        contribution = member.open.get(piece)
        if contribution is not None and contribution.announce.seq == seq:
            contribution.settled = True
            del member.open[piece]

    # ------------------------------------------------------------ neither early nor late

    def after(self, event: ev.SyncerEvent) -> None:
        """Who is silent or stalled is not counted any more."""
        if isinstance(event, ev.StreamClosed):
            gone = self._by_stream.pop(event.stream, None)
            assert gone is None or gone.stream != event.stream or not gone.present, f"{gone} is there, without a stream"
        self._granting = self._closing = None
        now_ns, lease_ns = self._world.clock.now_ns, self._config.lease_interval_ns
        if self._world.syncer.over:
            return
        ending = self._world.syncer.core.finish.phase in ("draining", "final", "finished")
        for member in self.members.values():
            if not member.present:
                continue
            if ending and member.stream in self._world.syncer.streams:
                assert member.stream in self._finishing, f"{member.life} was not told that the run is ending (R22)"
            assert now_ns < member.last_sign_ns + lease_ns, f"{member.life} is {member.state} and silent for a lease"
            if member.state == "ready" and not member.waiting:
                assert now_ns < member.last_advance_ns + self.idle_after_ns(member), f"{member.life} stalls and counts"
