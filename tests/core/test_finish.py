"""The run as a whole: stops before the first slot and after it, and the last round (R22)."""

from __future__ import annotations

import pytest

from atoll.core import events as ev
from atoll.core.messages import Declare, Fate, FinalRound, Leave, Timings
from atoll.core.records import FateLine, LifeEndLine
from tests.core.helpers import Bench, S


def in_the_last_round() -> Bench:
    """Two learners; the only regular slot is merged, and both are asked for what they have left."""
    bench = Bench(learners=2, steps=2)
    bench.join("a")
    bench.join("b")
    for name in ("a", "b"):
        bench.arrive(name, bench.announce(name, 1, 1, steps=2))
        bench.report(name, 2)
    return bench


def test_overslept__a_syncer_that_stood_still_in_the_finish_gives_everyone_the_time_that_it_took() -> None:
    bench = in_the_last_round()
    assert bench.told("a", FinalRound)
    bench.now_ns += 60 * S
    bench.feed(ev.Overslept(60 * S))
    bench.pass_ns(1 * S)
    assert len(bench.core.roster.present()) == 2
    assert bench.core.finish.phase == "final"
    bench.now_ns += 60 * S
    bench.feed(ev.Wake())
    assert bench.core.finish.phase == "over"


def test_stop__a_regular_announcement_that_comes_late_is_not_taken_for_one_of_the_last_round() -> None:
    """A stop makes slots N+1..N+P the last round; learners name them as regular ones until they hear of it."""
    bench = Bench(learners=2, fragments=2, interval=4, grace_factor=0.0)
    bench.join("a")
    bench.join("b")
    bench.report("a", 2)
    bench.report("b", 2)
    bench.feed(ev.StopRequested())
    assert bench.core.finish.phase == "final"
    late = bench.announce("a", 1, 2, steps=3)
    assert late.slot > bench.core.slots.last
    assert [f.reason for f in bench.told("a", Fate)] == ["the run is ending"]


def test_stop__before_the_first_slot_the_books_of_all_are_closed__of_those_away_too() -> None:
    bench = Bench(learners=3)
    bench.join("a")
    bench.join("b")
    bench.report("b", 5)
    bench.feed(ev.StreamClosed(bench.streams["b"]))
    bench.feed(ev.StopRequested())
    assert {e.name for e in bench.written(LifeEndLine)} == {"a", "b"}


@pytest.mark.parametrize("how", ["left", "here", "away"])
@pytest.mark.parametrize("complete", [False, True])
def test_stop__before_the_first_slot_what_was_announced_gets_its_fate_too(how: str, complete: bool) -> None:
    """Books close only once nothing is on its way: a learner that had left had no end on the tape."""
    bench = Bench(learners=3)
    bench.join("a")
    message = bench.announce("a", 1, 1, steps=2)
    if complete:
        bench.arrive("a", message)
    if how == "left":
        bench.say("a", Leave("interrupted", bench.counters(2), Timings()))
    if how == "away":
        bench.feed(ev.StreamClosed(bench.streams["a"]))
    bench.feed(ev.StopRequested())
    assert [(f.seq, f.fate) for f in bench.written(FateLine)] == [(1, "missed")]
    (end,) = bench.written(LifeEndLine)
    assert end.lost == (200, 200), "a token-piece of each piece"
    assert any(isinstance(a, ev.Discard) for a in bench.actions), "its bytes are freed"


def test_finish__a_short_cut_in_the_last_round_is_no_death() -> None:
    bench = in_the_last_round()
    assert bench.told("b", FinalRound)
    bench.feed(ev.StreamClosed(bench.streams["b"]))
    bench.feed(ev.Received(bench.streams["a"], Declare()))
    assert bench.core.finish.phase == "final", "b may yet come back"
    bench.now_ns += 6 * S
    bench.feed(ev.Wake())
    assert bench.core.finish.phase in ("finished", "over")
    assert any("did not wait longer for b" in a.text for a in bench.actions if isinstance(a, ev.Notice))
