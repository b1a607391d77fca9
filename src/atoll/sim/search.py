"""Run one plan and say how it ended: ok, a crash, a broken safety rule, or no progress."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field

from atoll.sim.coverage import Coverage
from atoll.sim.draw import draw
from atoll.sim.faults import FaultWorld, NoProgress
from atoll.sim.plan import Plan


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a plan ended. kind: ok | crash | safety | liveness."""

    seed: int
    kind: str
    text: str = ""
    slots: int = 0
    coverage: Counter[tuple[str, str]] = field(default_factory=Counter)
    """What was met, by (class of things, thing): see coverage.py."""


def run_plan(plan: Plan) -> FaultWorld:
    """Run it to its end. AssertionError: safety. NoProgress: liveness. Anything else: a crash."""
    world = FaultWorld(plan)
    world.run_plan()
    return world


def watched(plan: Plan) -> tuple[Outcome, FaultWorld | None]:
    """Run a plan and catch what it does; the world as it was then, None where it could not be made."""
    world, coverage = None, Coverage()
    try:
        with coverage.watching():
            world = FaultWorld(plan, coverage)
            world.run_plan()
    except NoProgress as error:
        kind, text = "liveness", str(error)
    except AssertionError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        kind, text = "safety", f"{error} ({frame.filename.rpartition('/')[2]}:{frame.lineno})"
    except Exception:
        kind, text = "crash", traceback.format_exc().strip()
    else:
        kind, text = "ok", ""
    slots = world.syncer.core.slots.reached if world is not None else 0
    return Outcome(plan.seed, kind, text, slots, coverage.counts), world


def outcome_of(plan: Plan) -> Outcome:
    """Run a plan and catch what it does."""
    return watched(plan)[0]


def outcome(seed: int) -> Outcome:
    """Draw the plan of a seed and run it."""
    return outcome_of(draw(seed))
