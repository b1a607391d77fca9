from __future__ import annotations

from statistics import median

import hypothesis.strategies as st
from hypothesis import given

from atoll.core.contributions import Contribution, NormHistory
from atoll.core.messages import Announce, Counters, Life, Version


def contribution(norm: float, c_steps: int = 4) -> Contribution:
    announce = Announce(1, 0, 1, Version(1, 0), 4, c_steps, 400, Counters(4, 400), 20)
    return Contribution(Life("a", 1), announce, 0, 0, "complete", "h", norm)


def test_norms__without_16_seen_nothing_is_refused() -> None:
    history = NormHistory()
    for _ in range(15):
        assert history.judge([contribution(1.0)]) == ([], [], False, 0.0)
    assert history.judge([contribution(1000.0), contribution(1.0), contribution(1.0)]).refused == []


def test_norms__one_far_above_the_median_is_refused_small_ones_never() -> None:
    history = NormHistory()
    for _ in range(16):
        history.judge([contribution(1.0)])
    huge, tiny, usual = contribution(11.0), contribution(1e-9), contribution(9.0)
    assert history.judge([huge, tiny, usual]) == ([huge], [], False, 0.5)


def test_norms__more_than_half_means_the_history_is_wrong() -> None:
    """Hazard 46: a history of accepted norms refused every honest learner once the warm-up had raised them."""
    history = NormHistory()
    for _ in range(64):
        history.judge([contribution(1.0)])
    refused = 0
    for _ in range(200):
        judged = history.judge([contribution(50.0), contribution(50.0)])
        refused += len(judged.refused)
        assert judged.overruled or not judged.refused
    assert refused == 0
    assert not history.judge([contribution(50.0), contribution(1.0)]).refused, "the history has learned"


def test_norms__one_that_is_alone_in_its_slot_is_no_majority() -> None:
    """A learner that diverged, alone in a slot of K = 1, overruled the history and became the model."""
    history = NormHistory()
    for _ in range(64):
        history.judge([contribution(1.0)])
    outcomes = [history.judge([contribution(1e18)]) for _ in range(40)]
    assert not any(judged.overruled for judged in outcomes)
    assert len(outcomes[0].refused) == 1
    assert outcomes[-1].refused == [], "one learner alone is not locked out for ever"


def test_norms__one_honest_among_one_raised_is_not_locked_out_for_ever() -> None:
    history = NormHistory()
    for _ in range(64):
        history.judge([contribution(1.0)])
    outcomes = [len(history.judge([contribution(20.0), contribution(1.0)]).refused) for _ in range(100)]
    assert outcomes[0] == 1
    assert outcomes[-1] == 0, "seen norms count, refused ones too"


def test_norms_are_compared_per_root_step() -> None:
    history = NormHistory()
    for _ in range(16):
        history.judge([contribution(1.0, c_steps=1)])
    assert history.judge([contribution(30.0, c_steps=16), contribution(1.0)]).refused == []


def test_norms__as_large_as_was_usual_once__are_taken_and_told() -> None:
    """Late in training honest norms are small, and now and then as large as they all were once (docs/LOG.md)."""
    history = NormHistory()
    for _ in range(64):
        history.judge([contribution(1.0)])
    for _ in range(64):
        history.judge([contribution(0.001)])
    burst, broken = contribution(0.9), contribution(1.1)
    judged = history.judge([burst, broken, contribution(0.001)])
    assert (judged.refused, judged.raised, judged.overruled) == ([broken], [burst], False)


@given(st.lists(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=4), max_size=60))
def test_norms__what_is_refused_is_far_above_the_recent_and_above_all_that_was_usual(slots: list[list[float]]) -> None:
    history, medians = NormHistory(), [0.0]
    seen: list[float] = []
    for norms in slots:
        candidates = [contribution(norm, c_steps=1) for norm in norms]
        usual = median(seen[-64:]) if len(seen) >= 16 else 0.0
        medians.append(usual)
        judged = history.judge(candidates)
        assert judged.usual == usual
        for each in judged.refused:
            assert each.norm > max(10 * usual, *medians) > 0
        for each in judged.raised:
            assert 10 * usual < each.norm <= max(medians)
        seen += norms
