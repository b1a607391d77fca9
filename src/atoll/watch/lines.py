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
from atoll.watch.view import RunView, Settled

GOOD_ENDS = ("finished", "finish")


@dataclass(slots=True)
class Mark:
    """Where the view stood when the last interval line was printed."""

    now_ns: int
    tokens: int
    loss_sum: float


class ConsoleLines:
    """Feed it tape lines in order; it answers with the lines to print."""

    def __init__(self, view: RunView | None = None) -> None:
        self.view = view or RunView()
        self._mark: Mark | None = None
        self._settled: list[Settled] = []
        self._seen: set[str] = set()

    def feed(self, line: Record | Mapping[str, Any]) -> list[str]:
        """Fold one tape line into the view; zero or more lines for people."""
        settled = self.view.settled_slots
        record = self.view.feed(line)
        if record is None:
            return []
        out = self._say(record)
        if self.view.settled_slots != settled and self.view.last_settled is not None:
            self._settled.append(self.view.last_settled)
            if len(self._settled) >= self.view.pieces:
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
            return [f"slots begin with {len(record.ready)} learners ready ({record.reason})"]
        if isinstance(record, PhaseLine):
            return self._phase(record)
        return []

    def _phase(self, record: PhaseLine) -> list[str]:
        if record.phase == "draining":
            return [f"the last slot, {record.slot}, has closed ({record.reason}); learners hand in their last work"]
        return []

    def _member(self, record: MemberLine) -> list[str]:
        name = record.name
        if record.state == "ready" and record.before == "joining":
            back = name in self._seen
            self._seen.add(name)
            return [f"learner {name} is {'back' if back else 'ready'}"]
        if self.view.phase not in ("waiting", "running"):
            return []
        if record.state == "away":
            return [f"learner {name} is lost ({record.reason})"]
        if record.state == "idle" and record.before == "ready":
            return [f"learner {name} is idle ({record.reason})"]
        if record.state == "ready":
            return [f"learner {name} is back ({record.reason})"]
        return []

    def _life_end(self, record: LifeEndLine) -> list[str]:
        if record.reason in GOOD_ENDS:
            return []
        lost = sum(record.lost) / max(1, len(record.lost))
        return [
            f"learner {record.name}: this life ends ({record.reason}) after {record.steps} steps; "
            f"{lost:,.0f} of its {record.tokens:,} tokens are lost"
        ]

    def _interval(self, now_ns: int) -> str:
        view, mark, slots = self.view, self._mark, self._settled
        self._settled = []
        self._mark = Mark(now_ns, view.tokens, view.loss_sum)
        assert view.config is not None
        new = view.tokens - mark.tokens if mark else 0
        loss = f"{(view.loss_sum - mark.loss_sum) / new:.3f}" if mark and new else "-"
        speed = new / max(1, now_ns - mark.now_ns) * 1e9 if mark else 0.0
        shares = [slot.share for slot in slots if slot.share is not None]
        part = f"{100 * sum(shares) / len(shares):.0f}%" if shares else "-"
        kept = view.merged_pieces / max(1, view.pieces * view.tokens)
        last, total = slots[-1].slot, view.config.slots
        waits = ", ".join(
            f"{name} {sum(values) / len(values) / 1e6:.0f}"
            for name, values in (
                ("grace", [slot.grace_ns for slot in slots]),
                ("merge", [slot.sync_ns for slot in slots]),
            )
        )
        ready = f"{len(view.ready())}/{view.config.learners}"
        return (
            f"{100 * last / total:3.0f}%  slot {last}/{total}  loss {loss}  {speed:,.0f} tokens/s  ready {ready}  "
            f"participation {part}  merged {100 * kept:.0f}%  waits {waits} ms"
        )
