"""What happened when: slots, states of learners, losses, fates, notices, in the order of the tape.

Memory grows with slots, with changes of state and with notices; not with reports.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from atoll.core.records import ClosedLine, FateLine, MemberLine, Merge1, NoticeLine, QuorumLine, SlotLine
from atoll.watch.tallies import LossCurve, Share

NOTICES_MAX = 1000
LONG_RUN_NS = 600 * 10**9
"""From here on times are told in minutes."""
GOOD_ENDS = ("finished", "finish")
PRESENT = ("joining", "ready", "idle")
NUMBERS = re.compile(r"\d[\d.e+-]*")


class Part(NamedTuple):
    """One learner's contribution to a merge."""

    name: str
    c_tokens: int
    weight: float
    norm: float
    cosine: float | None


@dataclass(slots=True)
class SlotRow:
    """One slot, as far as it has come. Times are of the syncer's clock, 0 where that has not happened."""

    slot: int
    piece: int
    first_ns: int = 0
    """The first clock was there."""
    quorum_ns: int = 0
    needed: int = 0
    grace_ns: int = 0
    """Allowed; `waited_ns` was spent."""
    closed_ns: int = 0
    waited_ns: int = 0
    reason: str = ""
    """Why it closed."""
    ready: int = 0
    participants: tuple[str, ...] = ()
    collect_ns: int = 0
    merge_ns: int = 0
    settled_ns: int = 0
    published_ns: int = 0
    merged: tuple[Part, ...] = ()
    delta_norm: float = 0.0
    step_norm: float = 0.0
    follows: float | None = None

    @property
    def quorum_wait_ns(self) -> int:
        """From the first clock to the K-th."""
        return max(0, self.quorum_ns - self.first_ns) if self.first_ns else 0


@dataclass(slots=True)
class Span:
    """A learner was in one state, from `start_ns` to `stop_ns` (0: still)."""

    state: str
    start_ns: int
    stop_ns: int
    generation: int
    reason: str


@dataclass(slots=True)
class Absence:
    """A learner was lost, from `start_ns` to `stop_ns` (or to now)."""

    start_ns: int
    stop_ns: int
    generation: int
    """Its life that was lost."""
    reason: str
    back: int | None
    """The life that came back, the same or a new one; None: it did not."""


@dataclass(slots=True)
class History:
    """Fed by RunView; never by a tape itself."""

    slots: dict[int, SlotRow] = field(default_factory=dict)
    spans: dict[str, list[Span]] = field(default_factory=dict)
    loss_ns: array[int] = field(default_factory=lambda: array("q"))
    loss_tokens: array[int] = field(default_factory=lambda: array("q"))
    """Computed by all until then."""
    loss_sums: array[float] = field(default_factory=lambda: array("d"))
    curves: dict[str, LossCurve] = field(default_factory=lambda: defaultdict(LossCurve))
    """Losses of each learner, over all its lives."""
    pairs: dict[tuple[str, int], Share] = field(default_factory=lambda: defaultdict(Share))
    """Per learner and piece: merged, over the slots at whose closing it was ready."""
    fates: Counter[tuple[str, int, str, str]] = field(default_factory=Counter)
    """(name, piece, fate, reason without numbers) of contributions that were not merged."""
    notices: list[tuple[int, str]] = field(default_factory=list)

    def row(self, slot: int, piece: int) -> SlotRow:
        """The row of a slot, new where nothing was known of it."""
        found = self.slots.get(slot)
        if found is None:
            found = self.slots[slot] = SlotRow(slot, piece)
        return found

    def quorum(self, line: QuorumLine, piece: int) -> None:
        row = self.row(line.slot, piece)
        row.first_ns, row.quorum_ns = line.first_ns, line.now_ns
        row.needed, row.grace_ns, row.ready = line.needed, line.grace_ns, line.ready

    def closed(self, line: ClosedLine) -> None:
        row = self.row(line.slot, line.piece)
        row.closed_ns, row.waited_ns, row.reason, row.ready = line.now_ns, line.waited_ns, line.reason, line.ready
        row.participants = tuple(name for name, _, _ in line.participants)

    def settled(self, line: SlotLine) -> None:
        row = self.row(line.slot, line.piece)
        row.settled_ns, row.collect_ns, row.merge_ns = line.now_ns, line.collect_ns, line.merge_ns
        row.merged = tuple(_part(merge) for merge in line.merged)
        row.delta_norm, row.step_norm, row.follows = line.delta_norm, line.step_norm, line.follows

    def state(self, line: MemberLine) -> None:
        spans = self.spans.setdefault(line.name, [])
        if spans and not spans[-1].stop_ns:
            spans[-1].stop_ns = line.now_ns
        spans.append(Span(line.state, line.now_ns, 0, line.generation, line.reason))

    def loss(self, now_ns: int, tokens: int, loss_sum: float) -> None:
        if self.loss_tokens and tokens <= self.loss_tokens[-1]:
            return
        self.loss_ns.append(now_ns)
        self.loss_tokens.append(tokens)
        self.loss_sums.append(loss_sum)

    def missed(self, line: FateLine) -> None:
        self.fates[line.name, line.piece, line.fate, NUMBERS.sub("#", line.reason)] += 1

    def notice(self, line: NoticeLine) -> None:
        if len(self.notices) < NOTICES_MAX:
            self.notices.append((line.now_ns, line.text))

    def losses(self, points_max: int = 400) -> list[tuple[int, int, float]]:
        """(ns, tokens, mean loss since the point before), at most so many points, evenly spread."""
        step = max(1, len(self.loss_ns) // points_max)
        found, last = [], (0, 0.0)
        for index in range(step - 1, len(self.loss_ns), step):
            tokens, loss_sum = self.loss_tokens[index], self.loss_sums[index]
            found.append((self.loss_ns[index], tokens, (loss_sum - last[1]) / (tokens - last[0])))
            last = tokens, loss_sum
        return found

    def absences(self, name: str, now_ns: int) -> list[Absence]:
        """When it was away, or between two lives of it; not after its end, unless it was away when that came."""
        gone: list[Absence] = []
        open_ = False
        spans = self.spans.get(name, [])
        for span in spans:
            out = span.state == "away" or (span.state == "ended" and (open_ or span is not spans[-1]))
            if out and not open_:
                gone.append(Absence(span.start_ns, now_ns, span.generation, span.reason, back=None))
            elif open_ and not out:
                gone[-1].stop_ns, gone[-1].back = span.start_ns, span.generation
            open_ = out
        return gone

    def first_ready_ns(self, name: str) -> int | None:
        """When it was ready for the first time."""
        return next((span.start_ns for span in self.spans.get(name, []) if span.state == "ready"), None)

    def spent_ns(self, name: str, state: str, now_ns: int) -> int:
        """How long it was in this state, all in all."""
        return sum((span.stop_ns or now_ns) - span.start_ns for span in self.spans.get(name, []) if span.state == state)


def _part(merge: Merge1) -> Part:
    return Part(merge.name, merge.c_tokens, merge.weight, merge.norm, merge.cosine)
