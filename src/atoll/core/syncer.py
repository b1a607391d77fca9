"""The syncer: frozen events in, frozen actions out. It waits for nobody, and never does wrong quietly.

Composed of small machines: members (members.py), contributions and their fates (contributions.py, fates.py), pieces
(pieces.py), version 0 (seeding.py), slots (slots.py) and the run as a whole (finish.py). This file is the entrance: who
may join, what each message means, and the loop that lets every machine move until nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.core.config import LEARNERS_MAX, RunConfig
from atoll.core.context import Context
from atoll.core.contributions import Contribution, weight_is_valid
from atoll.core.events import (
    Accept,
    BulkProgress,
    CloseStream,
    CommitDone,
    CommitFailed,
    ContributionArrived,
    MergeDone,
    Overslept,
    Received,
    SeedArrived,
    SeedCommitted,
    SetTimer,
    Started,
    StopRequested,
    StreamClosed,
    StreamOpened,
    SyncerAction,
    SyncerEvent,
    Wake,
)
from atoll.core.fates import DAMAGED, ENDING, NOT_FINITE, Fates, Verdict, had_closed
from atoll.core.finish import Finish
from atoll.core.layout import Layout, first_difference
from atoll.core.members import Member, Roster
from atoll.core.messages import (
    PROTOCOL_VERSION,
    Announce,
    Counters,
    Declare,
    Heartbeat,
    Hello,
    Leave,
    Refuse,
    Replaced,
    Report,
    Welcome,
)
from atoll.core.pieces import Pieces
from atoll.core.records import GrantLine, OversleptLine, ReportLine
from atoll.core.remarks import remark_on_units
from atoll.core.seeding import Seeding
from atoll.core.slots import SlotEngine

OTHER_NAME = "choose another name; after a crash give atoll.join name_wait_s=60, and it waits for the name"


class Syncer:
    """The state machine of a syncer with one shard. `handle` is its only entrance."""

    def __init__(self, config: RunConfig, layout: Layout, *, learners_max: int = LEARNERS_MAX) -> None:
        assert len(layout.pieces) == config.fragments
        self._ctx = Context(config, layout)
        self._config = config
        self._layout = layout
        self._learners_max = learners_max
        self.roster = Roster(self._ctx)
        self.pieces = Pieces(self._ctx, self.roster)
        self._fates = Fates(self._ctx, self.roster)
        self.slots = SlotEngine(self._ctx, self.roster, self.pieces, self._fates)
        self.finish = Finish(self._ctx, self.roster, self.pieces, self._fates, self.slots)
        self._seeding = Seeding(self._ctx, self.roster, self.pieces, self._expel)
        self._timer_ns: int | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            Started: self._on_started,
            StreamOpened: self._on_stream_opened,
            StreamClosed: self._on_stream_closed,
            Received: self._on_received,
            BulkProgress: self._on_bulk_progress,
            ContributionArrived: self._on_contribution_arrived,
            SeedArrived: self._seeding.arrived,
            SeedCommitted: self._seeding.committed,
            MergeDone: self.slots.merge_done,
            CommitDone: self.slots.commit_done,
            CommitFailed: self.slots.commit_failed,
            Wake: lambda event: None,
            StopRequested: lambda event: self.finish.stop(),
            Overslept: self._on_overslept,
        }
        self._messages: dict[type, Callable[[Member, Any], None]] = {
            Report: self._on_report,
            Heartbeat: self._on_heartbeat,
            Announce: self._on_announce,
            Declare: self._on_declare,
            Leave: self._on_leave,
        }

    @property
    def seeded(self) -> bool:
        """Version 0 is committed."""
        return self._seeding.done

    def handle(self, event: SyncerEvent, *, now_ns: int) -> list[SyncerAction]:
        """Take one event at monotonic time `now_ns`; return what to do, in order."""
        self._ctx.begin(now_ns)
        if self.finish.phase != "over":
            self._handlers[type(event)](event)
            self._advance()
        return self._ctx.take()

    # ------------------------------------------------------------ the loop

    def _advance(self) -> None:
        self.roster.expire()
        self._seeding.advance()
        while self._advance_once():
            pass
        self._set_timer()

    def _advance_once(self) -> bool:
        changed = self.finish.try_start()
        if self.finish.phase == "running":
            changed |= self.slots.try_close()
            changed |= self.slots.try_quorum()
        for slot in sorted(self.slots.live.values(), key=lambda s: s.number):
            changed |= self.slots.try_collect(slot)
            changed |= self.slots.try_merge(slot)
        changed |= self.finish.advance()
        return changed

    def _set_timer(self) -> None:
        deadlines = [
            self.roster.next_deadline_ns(),
            self.slots.next_deadline_ns(),
            self.finish.next_deadline_ns(),
            self._seeding.next_deadline_ns(),
        ]
        wanted = min((d for d in deadlines if d is not None and d > self._ctx.now_ns), default=None)
        if wanted is not None and wanted != self._timer_ns:
            self._ctx.act(SetTimer(wanted))
        self._timer_ns = wanted

    def _on_overslept(self, event: Overslept) -> None:
        """Nobody was silent, late or stalled in that time; what was said meanwhile is yet to be read."""
        self._ctx.write(OversleptLine(self._ctx.now_ns, event.gap_ns))
        self._ctx.notice(f"this syncer stood still for {event.gap_ns / 1e9:.1f} s; learners trained on meanwhile")
        self._seeding.overslept(event.gap_ns)
        self.roster.overslept(event.gap_ns)
        self.finish.overslept(event.gap_ns)

    # ------------------------------------------------------------ start and version 0 (R22)

    def _on_started(self, event: Started) -> None:
        self.roster.epoch = event.epoch
        self._seeding.from_file = event.has_init

    # ------------------------------------------------------------ joining (R13, R14)

    def _on_stream_opened(self, event: StreamOpened) -> None:
        refusal = self._refusal(event.hello)
        if refusal is not None:
            self._ctx.send(event.stream, refusal)
            self._ctx.act(CloseStream(event.stream))
            return
        if self._knows(event.hello):
            self._resume(event)
        else:
            self._admit(event)

    def _knows(self, hello: Hello) -> bool:
        """This very life is there, present or away. Any other Hello asks for a new one (R28)."""
        member = self.roster.by_name(hello.name)
        return member is not None and member.life.generation == hello.generation

    def _refusal(self, hello: Hello) -> Refuse | None:
        """Why this Hello cannot be answered with Welcome; None if it can."""
        if hello.protocol != PROTOCOL_VERSION:
            return Refuse(
                "protocol",
                f"the learner speaks protocol {hello.protocol}, the syncer {PROTOCOL_VERSION}; "
                "install the same version of Atoll on both",
            )
        if hello.run_id and hello.run_id != self._config.run_id:
            return Refuse(
                "run", f"the learner asks for run {hello.run_id!r}, the syncer serves {self._config.run_id!r}"
            )
        if hello.fingerprint != self._layout.fingerprint:
            difference = first_difference(self._layout.tensors(), hello.tensors)
            if difference is None and hello.extra != self._layout.extra:
                ours, theirs = self._layout.extra, hello.extra
                difference = f"fingerprint_extra is {ours!r} in the run and {theirs!r} at the learner"
            if difference is None:
                return Refuse("layout", "the models' fingerprints differ; install the same version")
            return Refuse("layout", f"{difference}; join with the model of the run")
        member = self.roster.by_name(hello.name)
        if self._knows(hello):
            return None
        if self.roster.newest_generation(hello.name) > hello.generation > 0:
            return Refuse("replaced", f"a newer life of learner {hello.name!r} has taken its place")
        if not self.finish.joinable:
            return Refuse("finished", "the run is over")
        if member is not None and member.present:
            return Refuse("name", f"the name {hello.name!r} is in use by a live learner; {OTHER_NAME}")
        if member is None and len(self.roster.present()) >= self._learners_max:
            return Refuse("settings", f"the syncer has {self._learners_max} learners already")
        return None

    def _admit(self, event: StreamOpened) -> None:
        """A new life; an old one under this name that is closed or past its lease is replaced."""
        name = event.hello.name
        old = self.roster.by_name(name)
        if old is not None:
            self._end_life(old, "replaced", Replaced(f"another learner joined as {name!r}"))
        elif len(self.roster) >= self._learners_max:
            gone = self.roster.longest_away()
            self._end_life(gone, "a newcomer needed its place in the list of learners")
        member = self.roster.grant(name, event.stream, self.slots.reached * self._config.slot_steps)
        self._ctx.write(GrantLine(self._ctx.now_ns, name, member.life.generation), sync=True)
        self._welcome(member, resumed=False)

    def _resume(self, event: StreamOpened) -> None:
        member = self.roster.by_name(event.hello.name)
        assert member is not None
        if member.stream is not None:
            self._ctx.act(CloseStream(member.stream))
        self.roster.attach(member, event.stream)
        self._welcome(member, resumed=True)
        self.finish.tell_phase(member)

    def _welcome(self, member: Member, *, resumed: bool) -> None:
        self._ctx.send(
            member.stream,
            Welcome(
                member.life.generation,
                self.roster.epoch,
                resumed,
                tuple(self._config.to_dict().items()),
                self.slots.closed,
                self.slots.interval_ns,
                self.finish.phase,
                self.pieces.newest_merged(member.life),
                () if resumed else tuple((tensor.name, tensor.value) for tensor in self._layout.constants),
            ),
        )
        if self.seeded:
            self.pieces.tell_all(member)
        else:
            self._seeding.tell_again(member)

    def _end_life(self, member: Member, reason: str, told: Replaced | Refuse | None = None) -> None:
        """Settle what is incomplete; complete contributions outlive their learner (R6, R14)."""
        stream = member.stream
        for contribution in list(member.open.values()):
            if not contribution.complete:
                self._fates.settle(contribution, Verdict("missed", f"its learner is gone: {reason}"))
        if stream is not None:
            if told is not None:
                self._ctx.send(stream, told)
            self._ctx.act(CloseStream(stream))
        self.roster.end(member, reason)

    def _expel(self, member: Member, reason: str) -> None:
        """The peer breaks the protocol: its life ends, the others go on. It may ask for a new one."""
        self._ctx.notice(f"learner {member.life.name} was put out: {reason}")
        told = Refuse("put out", f"the syncer ended this life of the learner: {reason}")
        self._end_life(member, f"expelled: {reason}", told)

    def _on_stream_closed(self, event: StreamClosed) -> None:
        self.roster.detach(event.stream)

    # ------------------------------------------------------------ messages

    def _on_received(self, event: Received) -> None:
        member = self.roster.by_stream(event.stream)
        if member is None:
            return
        handler = self._messages.get(type(event.message))
        if handler is None:
            self._expel(member, f"unexpected message {type(event.message).__name__}")
            return
        self._sign(member)
        handler(member, event.message)

    def _on_bulk_progress(self, event: BulkProgress) -> None:
        member = self.roster.by_life(event.life)
        if member is None:
            return
        self._seeding.moved(event.life)
        for contribution in member.open.values():
            if not contribution.complete:
                contribution.progress_at_ns = self._ctx.now_ns
        if member.present:
            self.roster.sign(member)
            self.finish.moved()

    def _sign(self, member: Member) -> None:
        """A sign of life. One that was silent for a lease on a stream that held is told what it was not told."""
        silent = member.state == "away"
        self.roster.sign(member)
        if silent and member.present:
            self.slots.tell_pace(member)
            if self.seeded:
                self.pieces.tell_all(member)
            self.finish.tell_phase(member)

    def _hear(self, member: Member, counters: Counters, *, leaving: bool = False) -> bool:
        """Book newer counters; a peer whose counters run backwards, or do not add up, is put out."""
        fault = member.account.hear(counters, leaving=leaving)
        if fault:
            self._expel(member, fault)
        return not fault

    def _on_report(self, member: Member, message: Report) -> None:
        if not self.seeded:
            self._expel(member, "it reported before version 0 was committed")
            return
        if not self._hear(member, message.counters):
            return
        member.timings = message.timings
        member.echo_ns, member.echo_at_ns = message.sent_ns, self._ctx.now_ns
        self.roster.advance(member, message.counters.steps, waiting=False)
        new_steps = self.roster.reported(member, message.counters.steps)
        self.slots.tick(member, new_steps)
        self._write_report(member)
        remark_on_units(self._ctx, self.roster, member)

    def _write_report(self, member: Member) -> None:
        heard = member.account.heard
        self._ctx.write(
            ReportLine(
                self._ctx.now_ns,
                member.life.name,
                member.life.generation,
                heard.steps,
                heard.tokens,
                heard.loss_sum,
                member.clock,
            )
        )

    def _on_heartbeat(self, member: Member, message: Heartbeat) -> None:
        self.roster.advance(member, message.steps, message.waiting)

    def _on_declare(self, member: Member, message: Declare) -> None:
        member.declared = True

    def _on_leave(self, member: Member, message: Leave) -> None:
        if not self._hear(member, message.counters, leaving=True):
            return
        member.timings = message.timings
        for contribution in list(member.open.values()):
            if not contribution.complete:
                self._fates.settle(contribution, Verdict("missed", f"its learner left: {message.reason}"))
        stream = member.stream
        self.roster.end(member, message.reason)
        if stream is not None:
            self._ctx.act(CloseStream(stream))

    # ------------------------------------------------------------ contributions (R6)

    def _on_announce(self, member: Member, message: Announce) -> None:
        known = member.newest_seq.get(message.piece, 0)
        if message.seq <= known:
            self._repeat(member, message)
            return
        fault = self._announce_fault(member, message)
        if fault is not None:
            self._expel(member, fault)
            return
        if not self._hear(member, message.counters):
            return
        room = member.account.room(message.piece)
        if room < message.c_tokens <= message.counters.tokens:  # more than was computed is refused below
            self._expel(
                member, f"it sends {message.c_tokens} tokens on fragment {message.piece}, {room} have no fate yet"
            )
            return
        self.roster.adopt(member)
        self.roster.advance(member, message.own_step, waiting=False)
        member.newest_seq[message.piece] = message.seq
        refusal = self._announce_refusal(member, message)
        if refusal is not None:
            self._fates.tell(member, message, refusal)
            return
        now_ns = self._ctx.now_ns
        member.open[message.piece] = Contribution(member.life, message, now_ns, now_ns)
        self._ctx.act(Accept(member.life, message))

    def _announce_fault(self, member: Member, message: Announce) -> str | None:
        """What only a broken peer can send; None if it is well formed."""
        if not 0 <= message.piece < self._config.fragments:
            return f"fragment {message.piece} does not exist"
        expected = self._layout.pieces[message.piece].payload_bytes(self._config.payload)
        if message.size_bytes != expected:
            return f"fragment {message.piece} has {message.size_bytes} bytes instead of {expected}"
        if message.slot < 1 or self._config.piece_of(message.slot) != message.piece:
            return f"slot {message.slot} does not serve fragment {message.piece}"
        if not self.seeded or message.anchor > self.pieces[message.piece].version:
            return f"it holds version {tuple(message.anchor)} of fragment {message.piece}, which was never published"
        if message.piece in member.open:
            return f"it announced fragment {message.piece} twice at once"
        return None

    def _announce_refusal(self, member: Member, message: Announce) -> Verdict | None:
        """For a well-formed contribution that comes too late or weighs nothing."""
        if not weight_is_valid(message):
            return Verdict("refused", f"weight of {message.c_tokens} tokens in {message.c_steps} steps is not valid")
        slots = self.slots
        if message.slot > slots.last:
            slot = slots.live.get(message.slot)
            if slot is None or slot.state != "final" or not message.final:
                return ENDING
            return None
        if message.slot <= slots.closed:
            return had_closed(message.slot)
        if self.finish.phase not in ("waiting", "running"):
            return ENDING
        if not member.ready:
            return Verdict("missed", f"its learner is {member.state}, not ready")
        return None

    def _repeat(self, member: Member, message: Announce) -> None:
        """The same announcement again, after a reconnect: expect its bytes, or tell its fate once more."""
        current = member.open.get(message.piece)
        if current is not None and current.announce.seq == message.seq:
            if not current.complete:
                self._ctx.act(Accept(member.life, current.announce))
            return
        fate = member.last_fate.get(message.piece)
        if fate is not None and fate.seq == message.seq:
            self._ctx.send(member.stream, fate)

    def _on_contribution_arrived(self, event: ContributionArrived) -> None:
        member = self.roster.by_life(event.life)
        contribution = member.open.get(event.piece) if member is not None else None
        if member is None or contribution is None or contribution.announce.seq != event.seq:
            return
        if contribution.state != "announced":
            return
        if not event.hash_ok:
            self._fates.settle(contribution, DAMAGED)
        elif not event.finite:
            self._fates.settle(contribution, NOT_FINITE)
        else:
            contribution.hash, contribution.norm = event.hash, event.norm
            contribution.move("arrived")
            member.transfer_ns.add(self._ctx.now_ns - contribution.announced_at_ns)
            self.finish.moved()
