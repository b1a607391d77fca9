"""Members: the lives of learners, as the syncer knows them (protocol R10, R13).

    joining --reported--> ready <--stalled/stepped--> idle
    any of them --closed/silent--> away --returned--> idle (or joining)
    any --left/replaced/over--> ended

Liveness belongs to a life (name, generation), never to a name (hazard 14). A closed stream is a sure sign and counts at
once; silence needs a lease.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from atoll.core.config import LEARNERS_MAX, RunConfig
from atoll.core.context import Context
from atoll.core.contributions import Contribution
from atoll.core.ledger import LifeAccount
from atoll.core.machine import Average, Table
from atoll.core.messages import Fate, Life, Timings
from atoll.core.records import LifeEndLine, MemberLine
from atoll.core.remarks import remark_on_leaving

GENERATION_SHIFT = 32
NAMES_MAX = 2 * LEARNERS_MAX
"""Names whose newest life is remembered, so that an older one that wakes is told of it."""
IDLE_STEPS = 4
"""A learner is idle after so many of its own steps, and at least a lease, without a new one (R10)."""

MEMBER = Table(
    name="member",
    initial="joining",
    final=frozenset({"ended"}),
    rows={
        ("joining", "reported"): "ready",
        ("ready", "stalled"): "idle",
        ("idle", "stepped"): "ready",
        ("joining", "closed"): "away",
        ("ready", "closed"): "away",
        ("idle", "closed"): "away",
        ("joining", "silent"): "away",
        ("ready", "silent"): "away",
        ("idle", "silent"): "away",
        ("away", "returned"): "idle",
        ("away", "returned early"): "joining",
        ("joining", "gone"): "ended",
        ("ready", "gone"): "ended",
        ("idle", "gone"): "ended",
        ("away", "gone"): "ended",
    },
)


@dataclass(slots=True)
class Member:
    """One life and all that the syncer keeps about it."""

    life: Life
    stream: int | None
    account: LifeAccount
    step_ns: Average
    transfer_ns: Average
    """From announced to arrived, per contribution."""
    last_sign_ns: int
    last_advance_ns: int
    state: str = MEMBER.initial
    adopted: bool = False
    """True once it reported with its first parameters."""
    steps_seen: int = 0
    reported_steps: int = 0
    reported_at_ns: int | None = None
    """None before the first report: steps are timed from report to report."""
    waiting: bool = False
    clock: int = 0
    clock_restarts: bool = False
    """It was away: the steps that it reports at once after its return are surplus and do not count (R2)."""
    returned_ns: int = 0
    echo_ns: int = 0
    echo_at_ns: int = 0
    """`sent_ns` of its newest report, and when that was read."""
    declared: bool = False
    timings: Timings = field(default_factory=Timings)
    open: dict[int, Contribution] = field(default_factory=dict)
    """Per piece, the contribution that has no fate yet (at most one, R6)."""
    newest_seq: dict[int, int] = field(default_factory=dict)
    last_fate: dict[int, Fate] = field(default_factory=dict)
    units_told: bool = False
    refusals: int = 0
    raised: int = 0
    """Contributions with norms far above what was usual, that were taken."""
    missed_pieces: set[int] = field(default_factory=set)
    """Of which a contribution was missed since one was last merged."""
    closed_books: bool = False
    end_reason: str = ""

    @property
    def present(self) -> bool:
        """Connected and within its lease."""
        return self.state in ("joining", "ready", "idle")

    @property
    def ready(self) -> bool:
        return self.state == "ready"


class Roster:
    """All lives. At most one per name is not ended."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._config: RunConfig = ctx.config
        self._current: dict[str, Member] = {}
        self._ordered: list[Member] = []
        self._by_stream: dict[int, Member] = {}
        self._settling: dict[Life, Member] = {}
        self._newest: OrderedDict[str, int] = OrderedDict()
        self._granted = 0
        self.epoch = 0

    # ------------------------------------------------------------ look-ups

    def __iter__(self) -> Iterator[Member]:
        """Current lives in id order, ended ones excluded."""
        return iter(self._ordered)

    def __len__(self) -> int:
        return len(self._ordered)

    def _order(self) -> None:
        """A new list, so that a loop over the old one may end lives."""
        self._ordered = sorted(self._current.values(), key=lambda m: m.life)

    def present(self) -> list[Member]:
        """Connected ones in id order."""
        return [m for m in self._ordered if m.present]

    def within_lease(self, member: Member) -> bool:
        """It may yet come back: its stream is closed, but it was heard less than a lease ago."""
        heard_until_ns = member.last_sign_ns + self._config.lease_interval_ns
        return member.present or (member.state == "away" and self._ctx.now_ns < heard_until_ns)

    def returning(self) -> list[Member]:
        """Present ones, and those whose stream closed within their lease: a cut is no death (R22)."""
        return [m for m in self._ordered if self.within_lease(m)]

    def ready(self) -> list[Member]:
        """Those that count for quorum, grace and "all" (R10)."""
        return [m for m in self._ordered if m.ready]

    def with_open(self) -> list[Member]:
        """All whose contributions may still be on their way, ended lives too, in id order."""
        if not self._settling:
            return self._ordered
        return sorted([*self._current.values(), *self._settling.values()], key=lambda m: m.life)

    def by_name(self, name: str) -> Member | None:
        return self._current.get(name)

    def newest_generation(self, name: str) -> int:
        """The newest life that was granted under this name; 0: none that is remembered."""
        return self._newest.get(name, 0)

    def by_stream(self, stream: int) -> Member | None:
        return self._by_stream.get(stream)

    def by_life(self, life: Life) -> Member | None:
        """The member of this life, also while an ended one still has contributions on their way."""
        member = self._current.get(life.name)
        if member is not None and member.life == life:
            return member
        return self._settling.get(life)

    def longest_away(self) -> Member:
        """Who was heard of least recently among those that are away."""
        return min((m for m in self if not m.present), key=lambda m: (m.last_sign_ns, m.life))

    def kth_step_ns(self, k: int) -> float | None:
        """Step time of the k-th fastest ready learner whose average is known (R5)."""
        steps = sorted(m.step_ns.value for m in self.ready() if m.step_ns.value is not None)
        return steps[min(k, len(steps)) - 1] if steps else None

    # ------------------------------------------------------------ life cycle

    def grant(self, name: str, stream: int, clock: int) -> Member:
        """A new life under a free name: generation = epoch * 2^32 + n (R13)."""
        assert name not in self._current
        self._granted += 1
        life = Life(name, (self.epoch << GENERATION_SHIFT) + self._granted)
        now_ns = self._ctx.now_ns
        member = Member(
            life,
            stream,
            LifeAccount.empty(self._config.fragments),
            Average(self._config.average_rate),
            Average(self._config.average_rate),
            last_sign_ns=now_ns,
            last_advance_ns=now_ns,
            clock=clock,
        )
        self._current[name] = member
        self._newest[name] = life.generation
        self._newest.move_to_end(name)
        if len(self._newest) > NAMES_MAX:
            self._newest.popitem(last=False)
        self._order()
        self._by_stream[stream] = member
        return member

    def attach(self, member: Member, stream: int) -> None:
        """The same life on a new stream."""
        if member.stream is not None:
            self._by_stream.pop(member.stream, None)
        member.stream = stream
        self._by_stream[stream] = member
        self.sign(member)

    def detach(self, stream: int) -> Member | None:
        """The stream is closed; returns the member that had it, unless it has a newer one."""
        member = self._by_stream.pop(stream, None)
        if member is None:
            return None
        member.stream = None
        if member.present:
            self.move(member, "closed", "stream closed")
        return member

    def end(self, member: Member, reason: str) -> None:
        """This life is over. Its complete contributions live on; its books close when the last is settled."""
        self.move(member, "gone", reason)
        del self._current[member.life.name]
        self._order()
        if member.stream is not None:
            self._by_stream.pop(member.stream, None)
            member.stream = None
        self._settling[member.life] = member
        member.end_reason = reason
        self.close_books(member)

    def close_books(self, member: Member) -> None:
        """Write the end of an ended life once nothing of it is on its way (R14: settled first)."""
        if member.open or member.state != "ended" or member.closed_books:
            return
        member.closed_books = True
        self._settling.pop(member.life, None)
        remark_on_leaving(self._ctx, member)
        heard, timings = member.account.heard, member.timings
        self._ctx.write(
            LifeEndLine(
                self._ctx.now_ns,
                member.life.name,
                member.life.generation,
                member.end_reason,
                heard.steps,
                heard.tokens,
                heard.loss_sum,
                tuple(member.account.merged),
                heard.overwritten,
                member.account.lost_at_end(),
                timings.blocked_ns,
                timings.step_ns,
                timings.step_ns_max,
                timings.gap_ns_max,
            )
        )

    def move(self, member: Member, cause: str, reason: str) -> None:
        """One transition, on the tape."""
        before = member.state
        member.state = MEMBER.move(before, cause)
        self._ctx.write(
            MemberLine(
                self._ctx.now_ns, member.life.name, member.life.generation, before, member.state, reason
            )
        )

    # ------------------------------------------------------------ signs of life

    def sign(self, member: Member) -> None:
        """Anything heard from this life; an away one is back."""
        member.last_sign_ns = self._ctx.now_ns
        if member.state == "away" and member.stream is not None:
            cause = "returned" if member.adopted else "returned early"
            member.clock_restarts, member.returned_ns = True, self._ctx.now_ns
            self.move(member, cause, "heard again")

    def advance(self, member: Member, steps: int, waiting: bool) -> None:
        """What a heartbeat, report or announcement says about stepping."""
        member.waiting = waiting
        if steps > member.steps_seen or waiting:
            member.steps_seen = max(member.steps_seen, steps)
            member.last_advance_ns = self._ctx.now_ns
            if member.state == "idle":
                self.move(member, "stepped", "waits by R9" if waiting else "steps again")

    def reported(self, member: Member, steps: int) -> int:
        """A report of cumulative steps: the new ones since the last; updates the step average."""
        new = steps - member.reported_steps
        now_ns = self._ctx.now_ns
        if new > 0 and member.reported_at_ns is not None and not member.clock_restarts:
            member.step_ns.add_steady((now_ns - member.reported_at_ns) / new)
        member.reported_steps, member.reported_at_ns = steps, now_ns
        self.adopt(member)
        return new

    def adopt(self, member: Member) -> None:
        """It holds its first parameters: its first report says so, or an announcement after a reconnect."""
        if member.adopted:
            return
        member.adopted = True
        member.last_advance_ns = self._ctx.now_ns
        if member.state == "joining":
            self.move(member, "reported", "first parameters adopted")

    def idle_after_ns(self, member: Member) -> int:
        """4 of its own steps, but at least a lease: on a busy machine a short pause is no hang."""
        return max(int(IDLE_STEPS * member.step_ns.get()), self._config.lease_interval_ns)

    def overslept(self, gap_ns: int) -> None:
        """The syncer stood still: leases go on from where they were, and steps since then are surplus."""
        for member in self:
            member.last_sign_ns += gap_ns
            member.last_advance_ns += gap_ns
            member.clock_restarts, member.returned_ns = True, self._ctx.now_ns
        for member in self.with_open():
            for contribution in member.open.values():
                contribution.progress_at_ns += gap_ns

    def expire(self) -> None:
        """Move those that are silent or stalled."""
        now_ns = self._ctx.now_ns
        lease_ns = self._config.lease_interval_ns
        for member in self._ordered:
            if not member.present:
                continue
            if now_ns >= member.last_sign_ns + lease_ns:
                self.move(member, "silent", "nothing heard for a lease")
            elif member.ready and not member.waiting:
                limit_ns = self.idle_after_ns(member)
                if now_ns >= member.last_advance_ns + limit_ns:
                    self.move(member, "stalled", f"no step for {limit_ns / 1e9:.1f} s")

    def next_deadline_ns(self) -> int | None:
        """When `expire` may next have something to do."""
        lease_ns, now_ns, soonest_ns = self._config.lease_interval_ns, self._ctx.now_ns, None
        for member in self._ordered:
            deadline_ns = member.last_sign_ns + lease_ns
            if member.ready and not member.waiting:
                deadline_ns = min(deadline_ns, member.last_advance_ns + self.idle_after_ns(member))
            if deadline_ns > now_ns and (soonest_ns is None or deadline_ns < soonest_ns):
                soonest_ns = deadline_ns
        return soonest_ns
