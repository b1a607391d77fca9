"""Run one plan and say how it ended: ok, a crash, a broken safety rule, or no progress."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.sim.coverage import Coverage
from atoll.sim.draw import draw
from atoll.sim.faults import FaultWorld, NoProgress
from atoll.sim.plan import Plan

LIFE = re.compile(r"[\w.-]+#\d+")
"""How a life is written: name#generation."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a plan ended. kind: ok | crash | safety | liveness."""

    seed: int
    kind: str
    text: str = ""
    slots: int = 0
    coverage: Counter[tuple[str, str]] = field(default_factory=Counter)
    """What was met, by (class of things, thing): see coverage.py."""

    @property
    def said(self) -> str:
        """What went wrong, in one line. Of a traceback: the error itself."""
        return self.text.strip().rpartition("\n")[2]

    @property
    def sort(self) -> str:
        """Failures that read alike but for lives and numbers are of one sort; all without progress are."""
        if self.kind == "liveness":
            return self.kind
        text = re.sub(r"\d+", "#", LIFE.sub("somebody", self.said))
        return f"{self.kind} {text[:80]}".strip()


def run_plan(plan: Plan) -> FaultWorld:
    """Run it to its end. AssertionError: safety. NoProgress: liveness. Anything else: a crash."""
    world = FaultWorld(plan)
    world.run_plan()
    return world


def watched(
    plan: Plan, on_start: Callable[[FaultWorld], None] = lambda world: None
) -> tuple[Outcome, FaultWorld | None]:
    """Run a plan and catch what it does; the world as it was then, None where it could not be made."""
    world, coverage = None, Coverage()
    try:
        with coverage.watching():
            world = FaultWorld(plan, coverage)
            on_start(world)
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
