"""Plain lines for a console: one per slot interval (H steps, P slots), members that come and go, and notices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.core.records import (
    LifeEndLine,
    MemberLine,
    NoticeLine,
    PhaseLine,
    Record,
    SeedLine,
    StartLine,
)
from atoll.watch.history import GOOD_ENDS, PRESENT
from atoll.watch.summary import weighted
from atoll.watch.tallies import Settled
from atoll.watch.view import RunView

LEGEND = (
    "(loss: mean since the line before; participation: merged of the ready learners; merged: of all tokens so far; "
    "grace: wait for slower learners; merge: from closed to published)"
)


def count(number: int, what: str) -> str:
    """`1 learner`, `2 learners`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


@dataclass(slots=True)
class Mark:
    """Where the view stood when the last interval line was printed."""

    now_ns: int
    tokens: int
    loss_sum: float


class ConsoleLines:
    """Feed it tape lines in order; it answers with the lines to print."""

    def __init__(self, view: RunView | None = None, *, intervals: bool = True) -> None:
        """intervals: say one line per slot interval too."""
        self.view = view or RunView()
        self._intervals = intervals
        self._mark: Mark | None = None
        self._settled: list[Settled] = []
        self._seen: set[str] = set()
        self._alone = False

    def feed(self, line: Record | Mapping[str, Any]) -> list[str]:
        """Fold one tape line into the view; zero or more lines for people."""
        settled = self.view.settled_slots
        record = self.view.feed(line)
        if record is None:
            return []
        out = self._say(record)
        if self.view.settled_slots != settled and self.view.last_settled is not None:
            self._settled.append(self.view.last_settled)
            if self._intervals and len(self._settled) >= self.view.pieces:
                out.append(self._interval(record.now_ns))
        return out

    def _say(self, record: Record) -> list[str]:
        if isinstance(record, NoticeLine):
            return [f"notice: {record.text}"]
        if isinstance(record, MemberLine):
            return self._member(record)
        if isinstance(record, LifeEndLine):
            return self._life_end(record)
        if isinstance(record, SeedLine):
            return [f"version 0 of the model comes from {record.source}"]
        if isinstance(record, StartLine):
            self._mark = Mark(record.now_ns, self.view.tokens, self.view.loss_sum)
            ready, expected = len(record.ready), self.view.config.learners if self.view.config else 0
            few = f" of {expected} ({record.reason})" if ready < expected else ""
            said = [f"slots begin with {count(ready, 'learner')} ready{few}"]
            return [*said, LEGEND] if self._intervals else said
        if isinstance(record, PhaseLine):
            return self._phase(record)
        return []

    def _phase(self, record: PhaseLine) -> list[str]:
        if record.phase == "draining":
            return [f"the last slot, {record.slot}, has closed ({record.reason}); learners hand in their last work"]
        return []

    def _member(self, record: MemberLine) -> list[str]:
        out = self._member_line(record)
        nobody = not any(life.state in PRESENT for life in self.view.lives.values())
        if nobody and not self._alone and self.view.phase == "running":
            out.append("no learner is left; waiting for one to join")
        self._alone = nobody
        return out

    def _missing(self) -> str:
        missing = self.view.config.learners - len(self.view.ready()) if self.view.config else 0
        waits = self.view.phase == "waiting" and missing > 0
        return f"; waiting for {count(missing, 'more learner')}" if waits else ""

    def _member_line(self, record: MemberLine) -> list[str]:
        name = record.name
        if record.state == "ready" and record.before == "joining":
            back = name in self._seen
            self._seen.add(name)
            return [f"learner {name} is {'back' if back else 'ready'}{self._missing()}"]
        if self.view.phase not in ("waiting", "running"):
            return []
        if record.state == "away":
            return [f"learner {name} is lost ({record.reason})"]
        if record.state == "idle" and record.before == "ready":
            return [f"learner {name} is idle ({record.reason})"]
        if record.state == "ready":
            return [f"learner {name} is back ({record.reason})"]
        if record.state == "ended" and record.reason not in GOOD_ENDS:
            return [f"learner {name} has left ({record.reason}){self._missing()}"]
        return []

    def _life_end(self, record: LifeEndLine) -> list[str]:
        if record.reason in GOOD_ENDS:
            return []
        lost = weighted(self.view, record.lost)
        return [
            f"learner {record.name} did {count(record.steps, 'step')} in this life ({record.reason}); "
            f"{lost:,.0f} of its {record.tokens:,} tokens are lost"
        ]

    def _interval(self, now_ns: int) -> str:
        view, mark, slots = self.view, self._mark, self._settled
        self._settled = []
        self._mark = Mark(now_ns, view.tokens, view.loss_sum)
        assert view.config is not None
        new = view.tokens - mark.tokens if mark else 0
        work = "no new steps"
        if mark and new:
            speed = new / max(1, now_ns - mark.now_ns) * 1e9
            work = f"loss {(view.loss_sum - mark.loss_sum) / new:.3f}  {speed:,.0f} tokens/s"
        shares = [slot.share for slot in slots if slot.share is not None]
        part = f"{100 * sum(shares) / len(shares):.0f}%" if shares else "none"
        kept = min(1.0, view.merged_pieces / max(1, view.pieces * view.tokens))  # merges may be heard before reports
        last, total = slots[-1].slot, view.config.slots
        waits = ", ".join(
            f"{name} {sum(values) / len(values) / 1e6:.0f} ms"
            for name, values in (
                ("grace", [slot.grace_ns for slot in slots]),
                ("merge", [slot.sync_ns for slot in slots]),
            )
        )
        ready = f"{len(view.ready())} of {view.learners}"
        return (
            f"{100 * last / total:3.0f}%  slot {last}/{total}  {work}  ready {ready}  "
            f"participation {part}  merged {100 * kept:.0f}%  {waits}"
        )
