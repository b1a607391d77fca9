"""The shrinker, with outcomes that are known: it reaches a minimal plan, and never one that passes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from atoll.sim.plan import MS, Fault, LearnerSpec, Plan, S, Site
from atoll.sim.scenario import config_of, dumps, loads
from atoll.sim.search import Outcome
from atoll.sim.shrink import FOR_MIN_NS, shrink

LARGE = Plan(
    seed=7,
    settings={
        "mode": "decoupled",
        "steps": 960,
        "fragments": 8,
        "interval": 24,
        "overlap": 4,
        "take": "overwrite",
        "stale_max": 2,
        "grace_factor": 0.3,
        "quorum": 4,
        "learners": 5,
        "start_wait_ns": 5 * S,
    },
    learners=tuple(
        LearnerSpec(
            name=f"l{i}",
            step_ns=(150 + 13 * i) * MS,
            jitter=0.2,
            tail=0.01,
            latency_ns=20 * MS,
            up_bytes_per_s=1e5,
            site="home" if i < 2 else "",
        )
        for i in range(5)
    ),
    sites=(Site(name="home", up_bytes_per_s=1e6),),
    faults=(
        Fault(kind="hang", at_ns=1_234_567_890, for_ns=3 * S, learner="l0"),
        Fault(kind="crash", at_ns=2_345_678_901, for_ns=3_333_333_333, learner="l1", when="grace"),
        Fault(kind="disk full", at_ns=3 * S, for_ns=1 * S),
        Fault(kind="straggle", at_ns=4 * S, for_ns=1 * S, learner="l4", factor=9.0),
        Fault(kind="cut bulk", at_ns=5 * S, for_ns=1 * S, learner="l1"),
        Fault(kind="stop", at_ns=60 * S),
    ),
    piece_values=50_000,
    lossy=True,
    linger_ns=5 * MS,
    bad_share=0.2,
    merge_ns=40 * MS,
    commit_ns=30 * MS,
    learners_max=6,
    heal_at_ns=60 * S,
    limit_ns=1200 * S,
)


class Fake:
    """Fails as told, and keeps every plan that it was asked about."""

    def __init__(self, fails: Callable[[Plan], bool], kind: str = "safety") -> None:
        self._fails = fails
        self._kind = kind
        self.asked: list[Plan] = []
        self.now_s = 0.0

    def __call__(self, plan: Plan) -> Outcome:
        self.asked.append(plan)
        self.now_s += 1
        config_of(plan)
        return Outcome(plan.seed, self._kind if self._fails(plan) else "ok")

    def clock(self) -> float:
        return self.now_s


def crash_and_overlap(plan: Plan) -> bool:
    crashed = any(fault.kind == "crash" and fault.learner == "l1" for fault in plan.faults)
    return crashed and config_of(plan).overlap > 1


def test_a_minimal_plan_is_reached() -> None:
    small = shrink(LARGE, "safety", outcome=Fake(crash_and_overlap))
    assert small == Plan(
        seed=7,
        settings={"steps": 1, "fragments": 1, "interval": 1},
        learners=(LearnerSpec(name="l1", jitter=0.0),),
        faults=(Fault(kind="crash", at_ns=1 * S, learner="l1"),),
        heal_at_ns=60 * S,
        limit_ns=1200 * S,
    )


def test_what_matters_stays() -> None:
    def fails(plan: Plan) -> bool:
        kinds = [(fault.kind, fault.when) for fault in plan.faults]
        thin = any(spec.up_bytes_per_s and spec.site == "home" for spec in plan.learners)
        config = config_of(plan)
        return ("crash", "grace") in kinds and thin and config.fragments > 2 and config.steps > 100 and plan.lossy

    small = shrink(LARGE, "safety", outcome=Fake(fails))
    assert fails(small)
    assert [spec.name for spec in small.learners] == ["l1"], "the quorum of 4 is no obstacle"
    assert [fault.kind for fault in small.faults] == ["crash"]
    assert config_of(small).fragments == 3
    assert small.sites == LARGE.sites


def test_a_long_fault_is_halved_until_it_matters() -> None:
    def fails(plan: Plan) -> bool:
        return any(fault.kind == "hang" and fault.for_ns > 700 * MS for fault in plan.faults)

    [hang] = shrink(LARGE, "safety", outcome=Fake(fails)).faults
    assert hang.for_ns == 750 * MS
    [hang] = shrink(LARGE, "safety", outcome=Fake(lambda plan: any(f.kind == "hang" for f in plan.faults))).faults
    assert FOR_MIN_NS <= hang.for_ns < 2 * FOR_MIN_NS + MS


def test_another_kind_of_failure_is_not_followed() -> None:
    outcome = Fake(lambda plan: True, kind="crash")
    assert shrink(LARGE, "safety", outcome=outcome) == LARGE


@pytest.mark.parametrize("budget_s", [0, 1, 7])
def test_the_budget_is_kept_and_what_was_reached_is_returned(budget_s: int) -> None:
    outcome = Fake(crash_and_overlap)
    small = shrink(LARGE, "safety", outcome=outcome, budget_s=budget_s, clock=outcome.clock)
    assert len(outcome.asked) == budget_s
    assert crash_and_overlap(small)


@pytest.mark.parametrize("seed", range(20))
def test_never_one_that_passes_and_the_same_every_time(seed: int) -> None:
    """Failures that depend on anything: each plan fails or not by the chance of its own text."""

    def fails(plan: Plan) -> bool:
        return plan == LARGE or random.Random(f"{seed}/{plan}").random() < 0.3

    small = shrink(LARGE, "liveness", outcome=Fake(fails, "liveness"))
    assert fails(small)
    assert small == shrink(LARGE, "liveness", outcome=Fake(fails, "liveness"))
    assert loads(dumps(small), small.name) == small, "every candidate is a valid scenario"


def test_a_smaller_plan_that_fails_with_other_words_is_not_kept() -> None:
    """It would be another failure; names of lives and numbers may differ."""

    def outcome(plan: Plan) -> Outcome:
        words = "l0#1: clock 2, by R2 1" if len(plan.faults) > 1 else "two are unsettled (R6)"
        return Outcome(plan.seed, "safety", words)

    sort = Outcome(0, "safety", "rogue7#6: clock 7, by R2 3").sort
    assert len(shrink(LARGE, sort, outcome=outcome).faults) == 2
