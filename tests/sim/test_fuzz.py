"""A short search in random worlds; `atoll sim fuzz` is the long one."""

from __future__ import annotations

from atoll.sim.draw import draw
from atoll.sim.search import run_plan


def test_short_search() -> None:
    for seed in range(100_000, 100_024):
        plan = draw(seed)
        try:
            run_plan(plan)
        except BaseException:
            print("\n".join(plan.describe()))
            raise


def test_a_seed_draws_the_same_again() -> None:
    assert draw(5) == draw(5)
    assert draw(5) != draw(6)


def test_ten_runs_of_a_seed_give_equal_traces() -> None:
    def trace() -> list[object]:
        return list(run_plan(draw(12)).syncer.tape)

    first = trace()
    assert all(trace() == first for _ in range(9))
