"""A short search in random worlds; `atoll sim fuzz` is the long one. Seeds that found bugs stay here for good."""

from __future__ import annotations

import pytest

from atoll.sim.draw import draw
from atoll.sim.search import run_plan

FOUND = {
    6: "a reconnect put a learner of a lock mode into a wait just before its step",
    19: "a lock mode waited for a slot that a learner had skipped after its contribution was refused",
    28: "slots piled up behind a full disk",
    1188: "held-back updates filled all staging places of a lock mode while the one that was due had none",
    103: "a lock mode waited for its first slot for ever",
}


@pytest.mark.parametrize("seed", FOUND)
def test_seeds_that_found_bugs(seed: int) -> None:
    run_plan(draw(seed))


def test_short_search() -> None:
    for seed in range(100_000, 100_016):
        plan = draw(seed)
        try:
            run_plan(plan)
        except BaseException:
            print("\n".join(plan.describe()))
            raise


def test_a_seed_draws_the_same_again() -> None:
    assert draw(5) == draw(5)
    assert draw(5) != draw(6)
