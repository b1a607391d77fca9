"""RunView: one read model of a run, folded from its tape line by line. Everything that shows a run reads it.

It keeps sums and a history (watch.history), not lines: memory grows with lives and slots, never with reports.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import Any, get_args

import msgspec

from atoll.core.config import RunConfig
from atoll.core.records import (
    ClosedLine,
    FateLine,
    GrantLine,
    LifeEndLine,
    MemberLine,
    NoticeLine,
    PhaseLine,
    PublishedLine,
    QuorumLine,
    Record,
    ReportLine,
    RunLine,
    SeedLine,
    SlotLine,
    StartLine,
)
from atoll.watch.history import History
from atoll.watch.tallies import LifeView, RecentLoss, Settled, Share, Union

BROKEN_OFF = "broken off"
"""The phase of a run whose syncer is gone and has not said that it is over."""
ENDED = ("over", BROKEN_OFF)
KINDS: dict[str, type] = {kind.__name__.lower(): kind for kind in get_args(Record)}
STEPPING_LIMIT = 4
"""A pause of more than so many of a life's own steps (per step of the report), and a lease, is not stepping."""

LifeKey = tuple[str, int]


class RunView:
    """Feed it tape lines in order, as records or as dicts of the JSONL. Unknown kinds are skipped."""

    def __init__(self) -> None:
        self.run: RunLine | None = None
        self.config: RunConfig | None = None
        self.run_id = ""
        self.loss_unit = ""
        """For people, where it is known (watch.read): a tape does not tell it."""
        self.mode = ""
        self.phase = "waiting"
        self.end_reason = ""
        self.stopped = False
        """It was ended before all its slots were done."""
        self.first_ns: int | None = None
        self.last_ns: int | None = None
        self.first_report_ns: int | None = None
        self.last_report_ns: int | None = None
        self.seeded = False
        """Version 0 is there."""
        self.granted: set[LifeKey] = set()
        """Lives that were let in, until version 0 is there: most are no members before."""
        self.start_ns: int | None = None
        self.drain_ns: int | None = None
        self.slots_last: int | None = None
        self.slots_closed = 0
        self.lives: dict[LifeKey, LifeView] = {}
        self.published_ns = array("q")
        self.versions: dict[int, tuple[int, int]] = {}
        self.stepping = Union()
        self.recent = RecentLoss()
        self.history = History()
        self.tokens = 0
        """Computed so far: the newest that was heard of every life."""
        self.loss_sum = 0.0
        self.steps = 0
        self.reached = 0
        """T: newest slot whose quorum was reached."""
        self.participation = Share()
        self.by_piece: dict[int, Share] = {}
        self.by_learner: dict[str, Share] = {}
        self.settled_slots = 0
        self.last_settled: Settled | None = None
        self.notices = 0
        self.silent_s = 0.0
        """So long its tape had not grown when it was read."""
        self.fates = {"missed": 0, "refused": 0}
        self._closed: dict[int, tuple[ClosedLine, frozenset[str]]] = {}
        self._slots: dict[int, SlotLine] = {}
        self._handlers: dict[type, Callable[[Any], None]] = {
            RunLine: self._on_run,
            MemberLine: self._on_member,
            GrantLine: self._on_grant,
            SeedLine: self._on_seed,
            StartLine: self._on_start,
            ReportLine: self._on_report,
            QuorumLine: self._on_quorum,
            ClosedLine: self._on_closed,
            SlotLine: self._on_slot,
            PublishedLine: self._on_published,
            PhaseLine: self._on_phase,
            LifeEndLine: self._on_life_end,
            NoticeLine: self._on_notice,
            FateLine: self._on_fate,
        }

    def feed(self, line: Record | Mapping[str, Any]) -> Record | None:
        """Fold one line in; the record, or None where this version does not know its kind."""
        record = line if type(line) in self._handlers else as_record(line)
        if record is None:
            return None
        if self.first_ns is None:
            self.first_ns = record.now_ns
        self.last_ns = record.now_ns
        handler = self._handlers.get(type(record))
        if handler is not None:
            handler(record)
        return record

    def break_off(self) -> None:
        """Nobody writes the tape any more: nothing will come, unless it is over already."""
        if self.phase != "over":
            self.phase = BROKEN_OFF
            self.end_reason = "its syncer was killed, or its machine; `atoll pull RUN --to DIR` saves what was merged"

    # ------------------------------------------------------------ sums

    @property
    def pieces(self) -> int:
        return len(self.run.piece_sizes) if self.run is not None else 0

    @property
    def merged_pieces(self) -> int:
        """Merged token-pieces so far."""
        return sum(sum(life.merged) for life in self.lives.values())

    @property
    def learners(self) -> int:
        """Seen so far, by name; not fewer than were expected."""
        expected = self.config.learners if self.config is not None else 0
        return max(expected, len({name for name, _ in self.lives}))

    def ready(self) -> list[str]:
        """Names of the learners that are ready now."""
        return sorted(name for (name, _), life in self.lives.items() if life.state == "ready")

    def unsettled(self) -> list[int]:
        """Regular slots that are closed and not merged yet."""
        return sorted(slot for slot in self._closed if self.regular(slot))

    def regular(self, slot: int) -> bool:
        """False for the slots of the finish."""
        last = self.slots_last if self.slots_last is not None else self.config.slots if self.config else 0
        return 1 <= slot <= last

    def _life(self, name: str, generation: int) -> LifeView:
        life = self.lives.get((name, generation))
        if life is None:
            life = self.lives[name, generation] = LifeView(self.pieces)
        return life

    # ------------------------------------------------------------ lines

    def _on_run(self, line: RunLine) -> None:
        self.run = line
        known = RunConfig.__dataclass_fields__
        self.config = RunConfig.from_dict({k: v for k, v in line.settings.items() if k in known})
        self.run_id, self.mode = self.config.run_id, self.config.mode

    def _on_member(self, line: MemberLine) -> None:
        life = self._life(line.name, line.generation)
        if line.state == "ready" and life.state == "joining":
            life.ready_since = self.slots_closed
        life.state = line.state
        self.history.state(line)

    def _on_seed(self, line: SeedLine) -> None:
        self.seeded = True
        self.granted.clear()

    def _on_grant(self, line: GrantLine) -> None:
        if not self.seeded:
            self.granted.add((line.name, line.generation))

    def _on_start(self, line: StartLine) -> None:
        self.start_ns = line.now_ns

    def _on_report(self, line: ReportLine) -> None:
        life = self._life(line.name, line.generation)
        if self.first_report_ns is None:
            self.first_report_ns = line.now_ns
        self.last_report_ns = line.now_ns
        self._count_stepping(life, line)
        self._hear(life, line)
        life.reported_ns, life.clock = line.now_ns, line.clock

    def _count_stepping(self, life: LifeView, line: ReportLine) -> None:
        new = line.steps - life.steps
        if new <= 0 or life.reported_ns is None:
            return
        span_ns = line.now_ns - life.reported_ns
        life.pace(span_ns, new, line.tokens - life.tokens)
        if life.stepping_steps:
            lease_ns = self.config.lease_interval_ns if self.config is not None else 0
            limit_ns = STEPPING_LIMIT * new * life.stepping_ns // life.stepping_steps
            span_ns = min(span_ns, max(lease_ns, limit_ns))
        life.stepping_ns += span_ns
        life.stepping_steps += new
        self.stepping.add(line.now_ns - span_ns, line.now_ns)

    def _hear(self, life: LifeView, line: ReportLine | LifeEndLine) -> None:
        tokens, loss_sum = line.tokens - life.tokens, line.loss_sum - life.loss_sum
        self.recent.add(tokens, loss_sum)
        self.history.curves[line.name].add(line.now_ns, tokens, loss_sum)
        self.steps += line.steps - life.steps
        self.tokens += tokens
        self.loss_sum += loss_sum
        life.steps, life.tokens, life.loss_sum = line.steps, line.tokens, line.loss_sum

    def _on_life_end(self, line: LifeEndLine) -> None:
        life = self._life(line.name, line.generation)
        self._hear(life, line)
        life.end = line

    def _on_quorum(self, line: QuorumLine) -> None:
        assert self.config is not None
        self.reached = line.slot
        self.history.quorum(line, self.config.piece_of(line.slot))
        self.history.loss(line.now_ns, self.tokens, self.loss_sum)

    def _on_closed(self, line: ClosedLine) -> None:
        self.history.closed(line)
        self._closed[line.slot] = (line, frozenset(self.ready()))
        if self.regular(line.slot):
            self.slots_closed = max(self.slots_closed, line.slot)

    def _on_slot(self, line: SlotLine) -> None:
        self.history.settled(line)
        if line.merged:
            self._slots[line.slot] = line
        else:
            self._settle(line, ())

    def _on_published(self, line: PublishedLine) -> None:
        self.versions[line.piece] = (line.version[0], line.version[1])
        self.history.row(line.slot, line.piece).published_ns = line.now_ns
        if self.regular(line.slot):
            self.published_ns.append(line.now_ns)
        slot = self._slots.pop(line.slot, None)
        if slot is None:
            return
        for merge in slot.merged:
            self._life(merge.name, merge.generation).take(slot.slot, slot.piece, merge.c_tokens)
        self._settle(slot, tuple(merge.name for merge in slot.merged))

    def _settle(self, line: SlotLine, names: tuple[str, ...]) -> None:
        closed, ready = self._closed.pop(line.slot, (None, frozenset[str]()))
        if closed is None or not self.regular(line.slot):
            return
        share = min(1.0, len(names) / closed.ready) if closed.ready else None
        if share is not None:
            self.participation.add(share)
            self.by_piece.setdefault(line.piece, Share()).add(share)
        for name in ready.union(names):
            self.by_learner.setdefault(name, Share()).add(float(name in names))
            self.history.pairs[name, line.piece].add(float(name in names))
        self.settled_slots += 1
        sync_ns = line.now_ns - closed.now_ns
        self.last_settled = Settled(
            line.slot, line.piece, closed.ready, len(names), share, closed.waited_ns, sync_ns
        )

    def _on_phase(self, line: PhaseLine) -> None:
        self.phase = line.phase
        self.end_reason = line.reason
        self.stopped |= line.phase in ("draining", "over") and line.reason.startswith("stopped")
        if line.phase == "draining":
            self.drain_ns, self.slots_last = line.now_ns, line.slot

    def _on_fate(self, line: FateLine) -> None:
        self.history.missed(line)
        self._life(line.name, line.generation).fate(line.fate, line.piece, line.c_tokens, line.reason)
        self.fates[line.fate] = self.fates.get(line.fate, 0) + 1

    def _on_notice(self, line: NoticeLine) -> None:
        self.notices += 1
        self.history.notice(line)


def as_record(line: Record | Mapping[str, Any]) -> Record | None:
    """A record as it is; a dict of the JSONL by its `kind`, None where that is unknown."""
    if not isinstance(line, Mapping):
        return line
    kind = KINDS.get(str(line.get("kind")))
    if kind is None:
        return None
    fields = {name: value for name, value in line.items() if name not in ("i", "kind")}
    record: Record = msgspec.convert(fields, kind)
    return record
