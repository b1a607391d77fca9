"""Random worlds: set-up and faults drawn from one seed, a safety phase, then healing and a demand for progress.

    python -m atoll sim fuzz --seeds 500 --seed 1

A seed prints everything that it drew before it runs. A failure ends with the one line that reproduces it. Crash, safety
and liveness have exit codes of their own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from atoll.core.events import StopRequested
from atoll.core.messages import Life
from atoll.sim.learner import LearnerSpec
from atoll.sim.world import MS, S, World

PIECE_VALUES = 10_000
HEAL_AT = 0.6
"""Share of the run's expected time after which nothing breaks any more."""
LIMIT_FACTOR = 12
"""A healed run that is not over after so many times its expected time makes no progress."""
FAULTS = ("crash", "return", "cut control", "cut bulk", "pause", "join", "same name", "disk full", "stop")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong at a time, for a time."""

    kind: str
    at_ns: int
    for_ns: int
    learner: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a seed draws."""

    seed: int
    settings: dict[str, Any]
    learners: tuple[LearnerSpec, ...]
    faults: tuple[Fault, ...]
    lossy: bool
    bad_share: float
    """Share of contributions that arrive damaged, not finite or huge."""
    expected_ns: int
    timing: dict[str, int] = field(default_factory=dict)

    def describe(self) -> Iterator[str]:
        """What was drawn, line by line."""
        yield f"seed {self.seed}: expected {self.expected_ns / S:.1f} s, lossy {self.lossy}, bad {self.bad_share:.2f}"
        yield f"  settings {self.settings} {self.timing}"
        for spec in self.learners:
            yield f"  learner {spec}"
        for fault in self.faults:
            yield f"  fault {fault}"


class NoProgress(Exception):
    """Liveness: a healed run does not end."""


def draw(seed: int) -> Plan:
    """Everything, from the seed."""
    chance = random.Random(seed)
    settings = _draw_settings(chance)
    slot_steps = settings["interval"] // settings["fragments"]
    learners = tuple(_draw_learner(chance, f"l{i}", slot_steps) for i in range(chance.randint(1, 5)))
    settings["quorum"] = chance.choice((0, 0, 1, len(learners)))
    pace_ns = sorted(spec.step_ns for spec in learners)[-1]
    expected_ns = settings["steps"] * pace_ns + 2 * S
    count = chance.choice((0, 1, 2, 4, 8))
    drawn = [_draw_fault(chance, len(learners), expected_ns) for _ in range(count)]
    faults = tuple(sorted(drawn, key=lambda fault: fault.at_ns))
    timing = {"merge_ns": chance.choice((1, 2, 40)) * MS, "commit_ns": chance.choice((1, 30)) * MS}
    bad_share = chance.choice((0.0, 0.0, 0.02, 0.2))
    return Plan(seed, settings, learners, faults, chance.random() < 0.5, bad_share, expected_ns, timing)


def _draw_settings(chance: random.Random) -> dict[str, Any]:
    mode = chance.choice(("decoupled",) * 4 + ("streaming", "diloco"))
    fragments = 1 if mode == "diloco" else chance.choice((1, 2, 3, 4, 8))
    slot_steps = chance.choice((1, 2, 3, 6))
    overlap = 0 if mode == "diloco" else chance.choice((0, 1, 2, 4))
    if mode == "streaming":
        overlap = min(overlap, fragments * slot_steps - 1)
    return {
        "mode": mode,
        "fragments": fragments,
        "interval": fragments * slot_steps,
        "overlap": overlap,
        "steps": chance.randint(40, 110) * slot_steps,
        "take": chance.choice(("rebase", "overwrite")),
        "stale_max": chance.choice((0, 1, 1, 2)),
        "grace_factor": chance.choice((0.0, 0.8, 0.8)),
        "start_wait_ns": 5 * S,
    }


def _draw_learner(chance: random.Random, name: str, slot_steps: int) -> LearnerSpec:
    step_ns = chance.choice((20, 50, 100, 100, 100, 250, 900)) * MS
    need = 2 * PIECE_VALUES / (slot_steps * step_ns / S)
    return LearnerSpec(
        name=name,
        step_ns=step_ns,
        jitter=chance.choice((0.0, 0.02, 0.2, 0.6)),
        tokens=chance.randint(1, 2000),
        latency_ns=chance.choice((0, 1, 20, 80)) * MS,
        up_bytes_per_s=chance.choice((0.0, 0.0, need * chance.uniform(0.15, 3))),
        down_bytes_per_s=chance.choice((0.0, 0.0, need * chance.uniform(0.15, 3))),
    )


def _draw_fault(chance: random.Random, learners: int, expected_ns: int) -> Fault:
    kind = chance.choices(FAULTS, weights=(4, 4, 4, 3, 3, 2, 1, 1, 0.3))[0]
    at_ns = int(chance.uniform(0, HEAL_AT) * expected_ns)
    return Fault(kind, at_ns, int(chance.choice((0.05, 0.3, 2, 12)) * S), chance.randrange(learners))


class FuzzWorld(World):
    """A world whose faults come from a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._chance = random.Random(f"faults/{plan.seed}")
        self._joined = 0
        super().__init__(
            seed=plan.seed, learners=plan.learners, piece_values=PIECE_VALUES, **plan.timing, **plan.settings
        )
        for agent in self.agents.values():
            agent.lossy = plan.lossy
        for fault in plan.faults:
            self.at(fault.at_ns, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
        self.at(int(HEAL_AT * plan.expected_ns), self._heal)

    def fault_of(self, life: Life) -> tuple[bool, bool, float]:
        if self._chance.random() >= self._plan.bad_share:
            return True, True, self._chance.uniform(0.5, 2.0)
        return self._chance.choice(((False, False, 0.0), (True, False, 0.0), (True, True, 1e6)))

    def _strike(self, fault: Fault) -> None:
        spec = self._plan.learners[fault.learner]
        agent = self.agents[spec.name]
        match fault.kind:
            case "crash":
                self.crash(spec.name)
            case "return":
                self.crash(spec.name, back_after_ns=fault.for_ns)
            case "cut control" if not agent.cut:
                agent.cut_control(cut=True)
                self.at(self.clock.now_ns + fault.for_ns, lambda: agent.cut_control(cut=False))
            case "cut bulk":
                agent.bulk_cut = True
                self.at(self.clock.now_ns + fault.for_ns, lambda: setattr(agent, "bulk_cut", False))
            case "pause" if agent.learner is not None:
                self.pause(spec.name, fault.for_ns)
            case "join":
                self._join_new(spec)
            case "same name":
                self.join_beside(spec)
            case "disk full":
                self.syncer.disk_full = True
                self.at(self.clock.now_ns + fault.for_ns, lambda: setattr(self.syncer, "disk_full", False))
            case "stop":
                self.syncer.feed(StopRequested())

    def _join_new(self, spec: LearnerSpec) -> None:
        self._joined += 1
        fields = {name: getattr(spec, name) for name in spec.__slots__}
        self.join(LearnerSpec(**{**fields, "name": f"n{self._joined}"}))

    def _heal(self) -> None:
        """From now on nothing breaks, and at least one learner is there."""
        self.syncer.disk_full = False
        for agent in self.agents.values():
            agent.bulk_cut = False
            if agent.cut:
                agent.cut_control(cut=False)
        self._keep_alive()

    def _keep_alive(self) -> None:
        """As a launcher does: somebody is there to finish the run."""
        if self.syncer.over:
            return
        if not any(agent.alive for agent in self.agents.values()):
            self._join_new(self._plan.learners[0])
        self.clock.call_after(5 * S, self._keep_alive)


def run_plan(plan: Plan) -> FuzzWorld:
    """Run it. AssertionError: safety. NoProgress: liveness. Anything else: a crash."""
    world = FuzzWorld(plan)
    limit_ns = LIMIT_FACTOR * plan.expected_ns + 600 * S
    while not world.syncer.over:
        if world.clock.now_ns > limit_ns or not world.clock.run_next():
            raise NoProgress(world.why_pending())
    world.checkers.check_end()
    return world
