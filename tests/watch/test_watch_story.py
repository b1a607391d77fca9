"""What a reader is told in words of a run with faults: each one, of the right learner, and nothing that was not."""

from __future__ import annotations

import pytest

from atoll.core.records import MemberLine, Record
from atoll.sim.plan import LearnerSpec, S
from atoll.sim.world import World
from atoll.watch.story import Story, story
from atoll.watch.summary import fold
from tests.watch.worlds import equal, tape_of, world


def told(tape: list[Record]) -> tuple[Story, dict[str, str]]:
    """The story, and the sentence of each learner."""
    found = story(fold(tape))
    return found, {sentence.split(":")[0]: sentence for sentence in found.learners}


@pytest.fixture(scope="module")
def tape() -> list[Record]:
    """l0 works; l1 dies and comes back; l2 hangs; l3 is slow; late joins late and dies for good."""
    made = World(
        seed=5,
        learners=[*equal(3), LearnerSpec(name="l3", step_ns=3 * equal(1)[0].step_ns)],
        fragments=4,
        interval=8,
        steps=600,
    )
    made.at(12 * S, lambda: made.crash("l1", back_after_ns=7 * S))
    made.at(20 * S, lambda: made.hang("l2", 15 * S))
    made.at(24 * S, lambda: made.join(LearnerSpec(name="late")))
    made.at(45 * S, lambda: made.crash("late"))
    made.run()
    return tape_of(made)


def test_story__each_fault_is_told_of_its_learner(tape: list[Record]) -> None:
    found, of = told(tape)
    assert list(of) == ["l0", "l1", "l2", "l3", "late"]
    assert "and was back after" in of["l1"]
    assert "as a new process" in of["l1"]
    assert "did not come back" not in of["l1"]
    assert "Stood still (connected, no step) for 9.5 s" in of["l2"], "15 s, less the lease before it counts (R10)"
    assert "Lost" not in of["l2"]
    assert "Its steps took 3.0 times as long as those of l" in of["l3"]
    assert "Joined 24 s into the run." in of["late"]
    assert "and did not come back." in of["late"]
    assert "was back" not in of["late"]
    assert "It left" not in of["late"], "one end is told once"
    assert found.headline.endswith(
        "Lost for good: late; lost and back: l1; stood still for a while: l2; joined late: late; "
        "much slower than the fastest: l3."
    )


def test_story__of_a_good_learner_has_its_work_and_nothing_else(tape: list[Record]) -> None:
    _, of = told(tape)
    assert of["l0"].count(". ") == 0, of["l0"]
    quiet, _ = told(tape_of(world(equal(2))))
    assert quiet.headline.endswith("No learner was lost.")
    assert all(sentence.count(". ") == 0 for sentence in quiet.learners)


def test_story__while_a_learner_is_away_it_has_not_come_back(tape: list[Record]) -> None:
    until = next(i for i, r in enumerate(tape) if isinstance(r, MemberLine) and (r.name, r.state) == ("l1", "away"))
    _, of = told(tape[: until + 1])
    assert "and has not come back" in of["l1"]


def test_story__of_many_losses_names_some_and_counts_the_rest() -> None:
    names = [f"l{i}" for i in range(9)]
    made = World(seed=5, learners=equal(9), fragments=4, interval=8, steps=200)
    for name in names[1:]:
        made.at(10 * S, lambda name=name: made.crash(name, back_after_ns=2 * S))
    made.run()
    found, _ = told(tape_of(made))
    assert "Lost and back: l1, l2, l3, l4, l5 and 3 more" in found.headline
