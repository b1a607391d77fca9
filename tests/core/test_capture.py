"""The planner of captures over all that a learner may know of time (R4)."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from atoll.core.capture import CapturePlanner, PieceView
from atoll.core.config import RunConfig
from atoll.core.forecast import Horizon

MS = 1_000_000
P, T = 8, 80
"""Pieces; slots that have closed."""
CONFIG = RunConfig(run_id="r", steps=2400, fragments=P, interval=24)


def ms(most: int, least: float = 0.0) -> st.SearchStrategy[int]:
    return st.floats(least, most).map(lambda value: int(value * MS))


@st.composite
def horizons(draw: st.DrawFn) -> Horizon:
    """The boundary at which T was heard to have closed, in the middle of a run."""
    interval_ns = draw(ms(20_000, least=1.0))
    heard_ns = 1000 * MS
    return Horizon(
        now_ns=heard_ns,
        step_ns=draw(ms(10_000, least=0.1)),
        closed=T,
        closed_at_ns=heard_ns,
        slot_interval_ns=interval_ns,
        slack_ns=draw(ms(3000)),
        delay_ns=draw(ms(4000)),
        miss_ns=draw(ms(3000)),
        own_steps=0,
        last_slot=CONFIG.slots,
        joined_at=0,
        announce_late_ns=draw(st.floats(0, 0.5)) * P * interval_ns,
        bytes_late_ns=draw(st.floats(0, 0.5)) * P * interval_ns,
    )


def named(at: Horizon) -> set[int]:
    """What is captured at this boundary where the link is idle and each piece was merged in its last turn."""
    pieces = [PieceView(1000, True, True, 10, 10, *(CONFIG.next_slot_of(p, T) - P,) * 4) for p in range(P)]
    return {slot for _, slot in CapturePlanner(CONFIG, at, pieces).plan([], None)}


def early_enough_ns(at: Horizon, slot: int) -> float:
    """Until when announcement and bytes of `slot` are in time by all that is known and by experience."""
    closing_ns = at.closed_at_ns + (slot - T) * at.slot_interval_ns - at.delay_ns
    overlap_ns = CONFIG.overlap * at.slot_interval_ns / CONFIG.slot_steps
    return min(closing_ns - at.announce_late_ns, closing_ns + overlap_ns - at.bytes_late_ns)


@given(horizons())
def test_each_coming_slot_is_named_at_the_last_boundary_that_is_early_enough(at: Horizon) -> None:
    """Of a round of which nothing is heard meanwhile. What is late at one boundary had its chance at the one before."""
    in_time = {slot for slot in range(T + 1, T + P + 1) if early_enough_ns(at, slot) > at.now_ns}
    seen: set[int] = set()
    for step in range(3 * CONFIG.interval):
        seen |= named(replace(at, now_ns=at.now_ns + step * at.step_ns, own_steps=step))
    assert in_time <= seen
