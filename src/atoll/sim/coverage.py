"""What a search has met: faults by the state of a slot, reasons of refusal, rows of the transition tables.

Counted per seed and added up; `gaps` names what was met too rarely for a clean search to mean much.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from atoll.core.contributions import CONTRIBUTION
from atoll.core.finish import PHASE
from atoll.core.learner import LEARNER
from atoll.core.machine import Table
from atoll.core.members import MEMBER
from atoll.core.records import FateLine, MemberLine
from atoll.core.slot import SLOT
from atoll.sim.plan import FAULTS, SLOT_STATES
from atoll.sim.rogue import LIES, STRANGERS

if TYPE_CHECKING:
    from atoll.sim.faults import FaultWorld

TABLES = (PHASE, MEMBER, SLOT, CONTRIBUTION, LEARNER)
LEAST_PER_1000 = 20
REFUSALS = ("name", "settings", "finished", *STRANGERS)
"""Kinds of `Refuse`; `token` is said by the wire, which no world has."""
FATES = (
    "its bytes were not in when collecting ended",
    "stale: its anchor is # versions old",
    "norm # is far above all that is usual on this fragment",
    "the merge was not finite",
    "its bytes do not match their hash",
    "it is not finite",
    "weight of # tokens in # steps is not valid",
    "the run is ending",
    "slot # had closed",
    "its learner is idle, not ready",
    "its learner is gone",
    "its learner left",
)
"""Why a contribution is not merged, numbers left out."""

TOO_EARLY = "before version 0"
"""A rogue is put out for this too, when it joins before the first parameters are there."""

FAULT, ROW, REFUSAL, FATE, EXPELLED = "fault x slot", "row", "refusal", "fate", "put out"


class Coverage:
    """What one run has met."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def struck(self, kind: str, states: set[str]) -> None:
        """A fault struck while slots were in these states."""
        for state in states:
            self.counts[FAULT, f"{kind} x {state}"] += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count the rows of the tables that are walked meanwhile. One world at a time per process."""
        original, counts = Table.move, self.counts

        def move(table: Table, state: str, cause: str) -> str:
            counts[ROW, _row(table, state, cause)] += 1
            return original(table, state, cause)

        Table.move = move  # type: ignore[method-assign]
        try:
            yield
        finally:
            Table.move = original  # type: ignore[method-assign]

    def ended(self, world: FaultWorld) -> None:
        """Read from the tape what was refused, and why."""
        for agent in world.processes:
            for kind in agent.refusals:
                self.counts[REFUSAL, kind] += 1
        for stranger in world.strangers:
            self.counts[REFUSAL, stranger.answer] += 1
        for record in world.syncer.tape:
            if isinstance(record, FateLine):
                self.counts[FATE, _plain(record.reason)] += 1
            elif isinstance(record, MemberLine) and record.reason.startswith("expelled"):
                lie = next((lie for lie in (*LIES, TOO_EARLY) if lie in record.reason), record.reason)
                self.counts[EXPELLED, lie] += 1


def _row(table: Table, state: str, cause: str) -> str:
    return f"{table.name}: {state} --{cause}--> {table.rows.get((state, cause), '?')}"


def _plain(reason: str) -> str:
    """A reason without its numbers, and without the reason of that."""
    short = re.sub(r"^(its learner (?:is gone|left)): .*", r"\1", reason)
    return re.sub(r"\b\d[\d.e+-]*", "#", short)


def universe() -> Iterator[tuple[str, str]]:
    """All that a search should meet."""
    for kind in FAULTS:
        for state in SLOT_STATES:
            yield FAULT, f"{kind} x {state}"
    for table in TABLES:
        for state, cause in table.rows:
            yield ROW, _row(table, state, cause)
    for refusal in REFUSALS:
        yield REFUSAL, refusal
    for fate in FATES:
        yield FATE, fate
    for lie in (*LIES[1:-1], TOO_EARLY):
        yield EXPELLED, lie


def gaps(total: Counter[tuple[str, str]], seeds: int) -> list[str]:
    """What was met fewer than 20 times per 1,000 seeds, with its count."""
    least = LEAST_PER_1000 * seeds / 1000
    return [f"{kind}: {thing} ({total[kind, thing]})" for kind, thing in universe() if total[kind, thing] < least]


def report(total: Counter[tuple[str, str]], seeds: int) -> Iterator[str]:
    """The table of a search: faults by slot state, then the rest by rarity."""
    width = max(len(kind) for kind in FAULTS)
    yield f"met in {seeds} seeds (at least {LEAST_PER_1000} per 1,000 seeds are wanted of each)"
    yield f"  {'fault x slot':{width}} " + " ".join(f"{state:>10}" for state in SLOT_STATES)
    for kind in FAULTS:
        row = " ".join(f"{total[FAULT, f'{kind} x {state}']:>10}" for state in SLOT_STATES)
        yield f"  {kind:{width}} {row}"
    for kind in (ROW, REFUSAL, EXPELLED, FATE):
        things = {thing for k, thing in universe() if k == kind} | {thing for k, thing in total if k == kind}
        yield f"  {kind}:"
        for thing in sorted(things, key=lambda thing: (total[kind, thing], thing)):
            yield f"    {total[kind, thing]:>8}  {thing}"
