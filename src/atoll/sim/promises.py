"""What a scenario may promise of its run, and the figures that are held against it, recounted from the tape."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from typing import TYPE_CHECKING

from atoll.core.config import RunConfig
from atoll.core.records import ClosedLine, LifeEndLine, QuorumLine, SlotLine, StartLine
from atoll.sim.plan import Plan

if TYPE_CHECKING:
    from atoll.sim.world import World

EXPECT = {
    "yield_min": "share of the computed token-pieces that is merged when the run is over",
    "participation_min": "mean over slots of merged contributions / ready learners at closing",
    "gap_rounds_max": "longest time, in rounds of P slots, in which a piece had no merge of one of the learners that "
    "were there for the whole run",
    "lost_tokens_max": "token-pieces lost, of all lives together",
    "slots_min": "slots that reached their quorum",
    "slots_per_step_max": "most quorums within any s steps of the fastest learner: no burst of slots",
}
"""Promises. A slot here is a regular one: those of the finish have no quorum. Tokens are counted once per piece."""

SHARES = frozenset({"yield_min", "participation_min"})
"""Promises between 0 and 1."""


def figures(world: World) -> dict[str, float]:
    """What the run reached, under the key of the promise it is held against."""
    ends = world.records(LifeEndLine)
    quorums = world.records(QuorumLine)
    return {
        "yield_min": _yield(ends, world.config.fragments),
        "participation_min": _participation(world, len(quorums)),
        "gap_rounds_max": _gap_rounds(world, len(quorums)),
        "lost_tokens_max": float(sum(sum(end.lost) for end in ends)),
        "slots_min": float(len(quorums)),
        "slots_per_step_max": float(densest([q.now_ns for q in quorums], window_ns(world.plan, world.config))),
    }


def check_expectations(world: World) -> list[str]:
    """One message for each promise of the plan that the run missed."""
    reached = figures(world)
    missed = []
    for key, promised in world.plan.expect.items():
        figure = reached[key]
        kept = figure >= promised if key.endswith("_min") else figure <= promised
        if not kept:
            missed.append(f"{key}={promised:g} was promised, the run reached {figure:.6g} ({EXPECT[key]})")
    return missed


def window_ns(plan: Plan, config: RunConfig) -> int:
    """s steps of the fastest learner."""
    return config.slot_steps * min(spec.step_ns for spec in plan.learners)


def densest(times_ns: list[int], window_ns: int) -> int:
    """The largest number of times that lie within one window. `times_ns` is sorted."""
    return max((bisect_left(times_ns, at + window_ns) - i for i, at in enumerate(times_ns)), default=0)


def _yield(ends: list[LifeEndLine], pieces: int) -> float:
    computed = sum(end.tokens for end in ends) * pieces
    return sum(sum(end.merged) for end in ends) / computed if computed else 0.0


def _participation(world: World, last: int) -> float:
    merged = {slot.slot: len(slot.merged) for slot in world.records(SlotLine)}
    closed = [line for line in world.records(ClosedLine) if line.slot <= last and line.ready]
    shares = [min(1.0, merged.get(line.slot, 0) / line.ready) for line in closed]
    return sum(shares) / len(shares) if shares else 0.0


def _whole_run(world: World) -> list[str]:
    """Learners that were ready at the start and finished in the same life."""
    lives: dict[str, list[str]] = defaultdict(list)
    for end in world.records(LifeEndLine):
        lives[end.name].append(end.reason)
    started = [name for line in world.records(StartLine) for name in line.ready]
    return [name for name in started if lives[name] in (["finished"], ["finish"])]


def _gap_rounds(world: World, last: int) -> float:
    """The start and the end of the run count as merges, so a learner that was never merged shows."""
    rows: dict[tuple[str, int], list[int]] = defaultdict(list)
    for line in world.records(SlotLine):
        for merged in line.merged if line.slot <= last else ():
            rows[merged.name, line.piece].append(line.slot)
    pieces = world.config.fragments
    gaps = (
        after - before
        for name in _whole_run(world)
        for piece in range(pieces)
        for before, after in itertools.pairwise([0, *rows[name, piece], last])
    )
    return max(gaps, default=0) / pieces
