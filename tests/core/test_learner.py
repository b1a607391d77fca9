"""The learner machine and its capture planner, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.core import events as ev
from atoll.core.capture import CapturePlanner, Horizon, PieceView
from atoll.core.config import RunConfig
from atoll.core.layout import TensorSpec, make_layout
from atoll.core.learner import Learner
from atoll.core.messages import (
    Announce,
    Fate,
    FinalRound,
    Finished,
    Finishing,
    Leave,
    Merged,
    Pace,
    Refuse,
    Report,
    Version,
    Welcome,
)

MS = 1_000_000
S = 1_000 * MS
P = 2


class Hand:
    """A learner with P = 2, s = 2, fed by hand; steps take 100 ms."""

    def __init__(
        self,
        *,
        adopt: bool = True,
        syncer_wait_ns: int = 10**18,
        in_place: bool = False,
        progress_steps: int = 0,
        **settings: Any,
    ) -> None:
        values: dict[str, Any] = {"run_id": "r", "steps": 40, "fragments": P, "interval": 4, **settings}
        self.config = RunConfig(**values)
        layout = make_layout([TensorSpec(f"t{i}", (10,), "float32") for i in range(P)], P)
        self.core = Learner(
            self.config,
            layout,
            "a",
            7,
            syncer_wait_ns=syncer_wait_ns,
            in_place=in_place,
            progress_steps=progress_steps,
        )
        self.now_ns = 1
        self.hear(Welcome(7, 1, False, (), 0, 0, "running", (Merged(), Merged())))
        self.hear(Pace(0, 200 * MS, 80 * MS))
        if adopt:
            for piece in range(P):
                self.update(piece, 0)

    def feed(self, event: Any) -> list[Any]:
        return self.core.handle(event, now_ns=self.now_ns)

    def hear(self, message: Any) -> list[Any]:
        return self.feed(ev.Heard(message, self.now_ns))

    def update(self, piece: int, n: int, seq: int = 0, slot: int = 0) -> list[Any]:
        merged = Merged(7, seq) if seq else Merged()
        return self.feed(ev.UpdateArrived(piece, Version(1, n), slot, n, merged))

    def step(self) -> list[Any]:
        self.now_ns += 100 * MS
        return self.feed(ev.Stepped(100, 2.0))


def only(actions: list[Any], kind: type) -> list[Any]:
    return [a for a in actions if isinstance(a, kind)]


def captures(actions: list[Any]) -> list[tuple[int, int]]:
    return [(a.announce.piece, a.announce.slot) for a in only(actions, ev.Capture)]


def test_birth__waits_for_all_pieces_then_reports_that_it_is_ready() -> None:
    hand = Hand(adopt=False)
    assert hand.core.waiting == "parameters"
    assert only(hand.update(0, 0), ev.Take) == [ev.Take(0, Version(1, 0), 0, "adopt", False)]
    assert hand.core.waiting == "parameters"
    actions = hand.update(1, 0)
    [tell] = only(actions, ev.Tell)
    assert isinstance(tell.message, Report)
    assert tell.message.counters.steps == 0
    assert hand.core.waiting is None


def test_report__every_s_steps_after_the_captures_of_that_boundary() -> None:
    hand = Hand()
    assert only(hand.step(), ev.Tell) == []
    actions = hand.step()
    assert [type(a) for a in actions] == [ev.Capture, ev.Tell], "announced before the clock moves"
    assert captures(actions) == [(1, 1)]


@pytest.mark.parametrize(("seq", "contains"), [(1, True), (0, False)])
def test_take__rebase_subtracts_what_was_sent_only_if_the_update_contains_it(seq: int, contains: bool) -> None:
    hand = Hand()
    hand.step()
    hand.step()
    hand.update(1, 1, seq=seq, slot=1)
    [take] = only(hand.step(), ev.Take)
    assert (take.how, take.subtract_sent) == ("rebase", contains)
    book = hand.core.book.pieces[1]
    assert (book.merged, book.in_flight_tokens) == ((200, 0) if contains else (0, 200))


def test_take__a_seq_of_another_life_is_not_mine() -> None:
    hand = Hand()
    hand.step()
    hand.step()
    hand.feed(ev.UpdateArrived(1, Version(1, 1), 1, 0, Merged(6, 99)))
    [take] = only(hand.step(), ev.Take)
    assert not take.subtract_sent


def test_take__what_is_not_newer_is_freed_and_updates_coalesce() -> None:
    hand = Hand()
    assert hand.update(0, 0) == []
    assert hand.step() == [ev.Free(0)]
    hand.update(0, 1)
    assert hand.update(0, 2) == [ev.Free(1)]
    assert [a.version.n for a in only(hand.step(), ev.Take)] == [2]


def test_unsettled__a_piece_is_not_captured_again_until_the_update_that_contains_it_is_taken() -> None:
    """Hazard 45: ending "unsettled" earlier merged 24,491 of 28,800 token-pieces twice."""
    hand = Hand()
    hand.step()
    hand.step()
    for slot in (1, 2, 3):
        hand.hear(Pace(slot, 200 * MS, 0))
        actions = [a for _ in range(2) for a in hand.step()]
        assert all(piece != 1 for piece, _ in captures(actions))
    hand.update(1, 1, seq=1, slot=1)
    actions = [a for _ in range(4) for a in hand.step()]
    assert 1 in [piece for piece, _ in captures(actions)]


def test_missed__the_work_is_local_again_and_goes_with_the_next_one() -> None:
    hand = Hand()
    hand.step()
    hand.step()
    hand.hear(Fate(1, 1, 1, "missed", "late"))
    hand.step()
    assert hand.core.book.pieces[1].pending == 300
    assert hand.core.pieces[1].unsettled is None


def test_refused__theta_goes_back_and_the_step_in_progress_is_booked_as_lost_too() -> None:
    hand = Hand()
    hand.step()
    hand.step()
    assert only(hand.hear(Fate(1, 1, 1, "refused", "nan")), ev.Revert) == [], "not in mid-step"
    actions = hand.step()
    assert only(actions, ev.Revert) == [ev.Revert(1)]
    assert hand.core.book.pieces[1].lost == 300


def test_without_a_syncer__it_trains_on_and_captures_nothing() -> None:
    hand = Hand()
    hand.feed(ev.StreamLost("reset"))
    actions = [a for _ in range(10) for a in hand.step()]
    assert captures(actions) == []
    assert hand.core.waiting is None
    again = Welcome(7, 1, True, (), 0, 0, "running", (Merged(), Merged()))
    hand.hear(again)
    assert captures(hand.step()) != []


def test_without_a_syncer__the_end_of_the_run_is_an_error_that_says_so() -> None:
    hand = Hand(steps=6)
    hand.feed(ev.StreamLost("reset"))
    actions = [a for _ in range(55) for a in hand.step()]
    assert only(actions, ev.End) == [], "a short cut is no reason"
    [end] = only(hand.step(), ev.End)
    assert not end.ok
    assert end.kind == "syncer lost"
    assert "at the end of the run; what it trained meanwhile (56 steps) is not merged" in end.reason


def test_without_a_syncer__nobody_waits_longer_than_told() -> None:
    hand = Hand(syncer_wait_ns=2 * S)
    hand.feed(ev.StreamLost("reset"))
    actions = [a for _ in range(19) for a in hand.step()]
    assert only(actions, ev.End) == []
    [end] = only(hand.step(), ev.End)
    assert "away for 2 s (syncer_wait)" in end.reason


def test_progress__goes_on_without_a_syncer_and_waits_for_the_slots_when_it_is_back() -> None:
    """R22: a schedule that follows it froze at its rate for the rest of the run."""
    hand = Hand()
    hand.step()
    hand.feed(ev.StreamLost("reset"))
    seen = []
    for _ in range(60):
        hand.step()
        seen.append(hand.core.progress)
    assert seen[20] == 2 / 40, "for a lease it stands at one slot"
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    hand = Hand()
    hand.feed(ev.StreamLost("reset"))
    for _ in range(51):
        hand.step()
    alone = hand.core.progress_steps
    assert alone == 51
    hand.hear(Welcome(7, 1, True, (), 3, 0, "running", (Merged(), Merged())))
    hand.step()
    assert hand.core.progress_steps == alone, "it never falls"
    hand.hear(Welcome(7, 1, True, (), 25, 0, "running", (Merged(), Merged())))
    hand.step()
    assert hand.core.progress_steps == min(51, 51)


def test_new_agent__is_told_what_is_unsettled_and_which_places_are_free() -> None:
    hand = Hand()
    told = [a for _ in range(3) for a in hand.step()]
    before = [a.announce for a in only(told, ev.Capture)]
    assert before
    hand.feed(ev.UpdateArrived(1, Version(1, 1), 1, 2, Merged()))
    past = hand.core.past()
    assert past.generation == 7
    assert dict(past.held) == {0: Version(1, 0), 1: Version(1, 1)}
    assert past.places == (0, 1, 3)
    hand.feed(ev.StreamLost("the agent ended"))
    hand.step()
    again = [a.message for a in only(hand.feed(ev.AgentRestarted()), ev.Tell)]
    announced = [m for m in again if isinstance(m, Announce)]
    assert [(m.seq, m.piece, m.c_tokens) for m in announced] == [(m.seq, m.piece, m.c_tokens) for m in before]
    assert all(m.counters.steps == 4 for m in announced), "older counters would run backwards"
    assert isinstance(again[-1], Report)


def test_life_in_place__trains_on_and_counts_from_its_first_parameters() -> None:
    """R28: the syncer did not know the life any more. Nobody waits, and no work is counted twice."""
    hand = Hand(adopt=False, in_place=True, progress_steps=9)
    assert hand.core.waiting is None
    assert not hand.core.counts
    hand.step()
    assert hand.core.book.steps == 0
    hand.feed(ev.UpdateArrived(0, Version(1, 3), 6, 0, Merged()))
    [take] = only(hand.step(), ev.Take)
    assert take.how == "adopt"
    hand.feed(ev.UpdateArrived(1, Version(1, 4), 7, 1, Merged()))
    told = hand.step()
    assert any(isinstance(a.message, Report) for a in only(told, ev.Tell))
    assert hand.core.counts
    hand.step()
    assert hand.core.book.steps == 1
    assert hand.core.progress_steps >= 9


def test_finish__takes_all_sends_each_piece_once_and_leaves_with_the_final_version() -> None:
    hand = Hand()
    hand.step()
    hand.hear(Finishing(1))
    hand.step()
    assert hand.core.waiting == "finish"
    actions = hand.hear(FinalRound((Version(1, 0), Version(1, 0))))
    assert captures(actions) == [(0, 2), (1, 3)], "slots N+1..N+P in this order"
    hand.hear(Finished((Version(1, 1), Version(1, 1))))
    hand.update(0, 1, seq=1, slot=2)
    actions = hand.update(1, 1, seq=2, slot=3)
    leave = only(actions, ev.Tell)[-1].message
    assert isinstance(leave, Leave)
    assert only(actions, ev.Revert) == [ev.Revert(0), ev.Revert(1)], "the codec's rounding goes too"
    assert hand.core.ended == ev.End(True, "finished", "finished")
    assert [b.merged for b in hand.core.book.pieces] == [200, 200]


def test_finish__missed_work_is_lost_and_said_to_the_syncer() -> None:
    hand = Hand()
    hand.step()
    hand.hear(Finishing(1))
    hand.step()
    hand.hear(FinalRound((Version(1, 0), Version(1, 0))))
    hand.hear(Fate(0, 1, 2, "missed", "late"))
    hand.hear(Fate(1, 2, 3, "missed", "late"))
    actions = hand.hear(Finished((Version(1, 0), Version(1, 0))))
    [leave] = [a.message for a in only(actions, ev.Tell)]
    assert leave.counters.lost == (200, 200)


def test_lock_mode__waits_at_capture_plus_overlap_and_no_longer_than_its_slot() -> None:
    hand = Hand(mode="streaming", overlap=1)
    hand.step()
    assert captures(hand.step()) == [(1, 1)]
    assert hand.core.waiting is None
    hand.update(1, 1, seq=1, slot=1)
    assert only(hand.step(), ev.Take) == [ev.Take(1, Version(1, 1), 1, "rebase", True)]
    hand.step()
    hand.step()
    assert hand.core.waiting == "lock"
    hand.hear(Fate(0, 2, 2, "missed", "x"))
    assert hand.core.waiting is None


def test_refusal_ends_it_with_the_syncers_words() -> None:
    hand = Hand(adopt=False)
    [end] = hand.hear(Refuse("replaced", "another learner joined as 'a'"))
    assert end == ev.End(False, "another learner joined as 'a'", "put out")
    [end] = Hand().hear(Refuse("finished", "the run is over"))
    assert end == ev.End(True, "the run is over", "run over")


def test_progress_is_global() -> None:
    """Hazard 48: a late learner trained at warm-up rates, or a whole interval at rate 0."""
    hand = Hand(adopt=False)
    hand.hear(Welcome(7, 1, True, (), 10, 0, "running", (Merged(), Merged())))
    for piece in range(P):
        hand.update(piece, 0)
    assert hand.core.progress == 0.5
    for expected in (21, 22, 22):
        hand.step()
        assert hand.core.progress == expected / 40


# ---------------------------------------------------------------- the planner


def view(**kw: Any) -> PieceView:
    base = {
        "size_bytes": 100,
        "settled": True,
        "worked": True,
        "anchor_n": 0,
        "newest_n": 0,
        "newest_slot": 0,
        "last_named_slot": 10**6,
        "last_merged_slot": 0,
        "passed_slot": 0,
    }
    return PieceView(**{**base, **kw})


def planner(pieces: list[PieceView], **kw: Any) -> CapturePlanner:
    config = RunConfig(run_id="r", steps=10_000, fragments=len(pieces), interval=3 * len(pieces))
    base = {
        "now_ns": 10_000 * MS,
        "step_ns": 100 * MS,
        "closed": 40,
        "closed_at_ns": 10_000 * MS,
        "slot_interval_ns": 300 * MS,
        "slack_ns": 0,
        "delay_ns": 2 * MS,
        "miss_ns": 0,
        "own_steps": 0,
        "last_slot": 3000,
        "joined_at": 0,
    }
    return CapturePlanner(config, Horizon(**{**base, **kw}), pieces)


def test_plan__nothing_is_captured_long_before_its_slot_closes() -> None:
    assert planner([view() for _ in range(8)]).plan([], None) == []


def test_plan__the_next_slot_is_captured_at_the_last_boundary_before_it_closes() -> None:
    late = planner([view() for _ in range(8)], now_ns=10_200 * MS, own_steps=2)
    assert late.plan([], None) == [(1, 41)]
    waits = planner([view() for _ in range(8)], now_ns=10_200 * MS, own_steps=2, slack_ns=80 * MS)
    assert waits.plan([], None) == [], "the slot will wait for the next boundary"


def test_plan__a_slow_step_covers_all_slots_that_close_within_it() -> None:
    plan = planner([view() for _ in range(8)], step_ns=1000 * MS).plan([], 1e9)
    assert plan == [(1, 41), (2, 42), (3, 43)]


def test_plan__a_piece_that_missed_its_turn_goes_first_longest_unmerged_first() -> None:
    pieces = [view() for _ in range(8)]
    pieces[3] = view(last_named_slot=0, last_merged_slot=20)
    pieces[5] = view(last_named_slot=0, last_merged_slot=10)
    assert planner(pieces).plan([], 1e9) == [(5, 45), (3, 43)]


def test_plan__the_uplink_is_kept_free_for_a_piece_that_waits_twice_as_long_as_any_other() -> None:
    """It was just overwritten and has nothing to send at this boundary; at the next it has."""
    others = [view(last_named_slot=0, last_merged_slot=20) for _ in range(7)]
    starved = view(worked=False, last_named_slot=0, last_merged_slot=-1)
    assert planner([*others, starved]).plan([], 100 / 0.3) == []
    assert planner([*others, view(worked=False, last_named_slot=0, last_merged_slot=1)]).plan([], 100 / 0.3) != []
    [first, *_] = planner([*others, view(last_named_slot=0, last_merged_slot=-1)]).plan([], 100 / 0.3)
    assert first[0] == 7


def test_plan__unsettled_or_too_old_anchors_are_left_alone() -> None:
    pieces = [view(settled=False), view(anchor_n=1, newest_n=3, newest_slot=33)]
    assert planner(pieces, step_ns=1000 * MS).plan([], 1e9) == []


def test_plan__rounds_that_made_no_version_do_not_make_an_anchor_old() -> None:
    pieces = [view(anchor_n=0, newest_n=0, newest_slot=0), view()]
    assert planner(pieces, closed=400, step_ns=1000 * MS).plan([], 1e9) != []


def test_plan__the_uplink_holds_at_most_one_more_at_the_next_boundary() -> None:
    pieces = [view(last_named_slot=0) for _ in range(8)]
    slow_link = planner(pieces).plan([], 100 / 0.3)
    assert len(slow_link) == 2
    assert planner(pieces).plan([100, 100], 100 / 0.3) == []
    assert len(planner(pieces).plan([], 1e9)) == 8


def test_plan__a_transfer_that_cannot_arrive_in_time_names_the_round_after() -> None:
    pieces = [view() for _ in range(8)]
    pieces[1] = view(last_named_slot=0, anchor_n=5, newest_n=5, newest_slot=33)
    [(piece, slot)] = planner(pieces).plan([], 100 / 1.5)
    assert (piece, slot) == (1, 49)


def test_plan__a_slot_that_closes_while_the_announcement_is_on_its_way_is_left_out() -> None:
    """80 ms away: the slot that closes in 50 ms is lost; one whose time is long past is late, and open."""
    pieces = [view() for _ in range(4)]
    pieces[1] = view(last_named_slot=0, newest_slot=37)
    far: dict[str, Any] = {"delay_ns": 160 * MS, "slot_interval_ns": 50 * MS, "closed_at_ns": 10_080 * MS}
    assert (1, 45) in planner(pieces, now_ns=10_000 * MS, **far).plan([], None)
    late = planner(pieces, now_ns=10_400 * MS, **far).plan([], None)
    assert (1, 41) in late


def test_plan__an_idle_link_that_looked_bad_is_tried_with_one_piece() -> None:
    pieces = [view(last_named_slot=0, newest_slot=40) for _ in range(8)]
    hopeless = 100 / 3600
    assert planner(pieces).plan([], hopeless) == []
    [(piece, slot)] = planner(pieces, probe=True).plan([], hopeless)
    assert slot == 40 + 8 + (piece - 40) % 8, "the round after next gives it the most time"
    assert planner([view(settled=False) for _ in range(8)], probe=True).plan([], hopeless) == []


def test_plan__bytes_are_waited_for_at_most_half_a_round() -> None:
    """overlap 2 of H = 3: collecting ends after 1.5 steps."""
    one = [view(last_named_slot=0, newest_slot=40)]
    assert planner(one, own_steps=0).plan([], 100 / 0.44) == [(0, 41)]
    assert planner(one, own_steps=0).plan([], 100 / 0.47) != [(0, 41)]


def test_plan__the_way_back_of_the_answer_is_no_part_of_a_transfer() -> None:
    """Of 400 ms that an upload was measured to take, 100 are the answer's way."""
    one = [view(last_named_slot=0, newest_slot=40)]
    assert planner(one, delay_ns=200 * MS, slack_ns=500 * MS).plan([], 100 / 0.44) == [(0, 41)]
    assert planner(one, delay_ns=200 * MS, slack_ns=500 * MS).plan([], 100 / 0.46) != [(0, 41)]


def test_delay__the_way_to_the_syncer_and_back_is_measured() -> None:
    """It stayed at the first guess of 2 ms: who was 80 ms away announced too late for slot after slot."""
    hand = Hand()
    hand.now_ns = 191_001_000
    hand.hear(Pace(1, 400 * MS, 0, echo_ns=1_000, echo_age_ns=30 * MS))
    assert hand.core._planner()._at.delay_ns == 161 * MS


def test_joining__parameters_that_come_in_the_finish_are_not_trained_on() -> None:
    hand = Hand(adopt=False)
    hand.hear(Finishing(4))
    for piece in range(P):
        hand.update(piece, 0)
    assert hand.core.waiting == "finish"
    assert hand.core.book.steps == 0


def test_lock__what_is_heard_in_the_middle_of_a_step_does_not_begin_the_finish() -> None:
    """The step in progress is booked first; an assert forbade it after the finish had begun."""
    hand = Hand(mode="streaming", interval=2, overlap=1)
    hand.step()
    assert hand.core.waiting is None
    hand.feed(ev.StreamLost("cut"))
    hand.step()
    assert hand.core.waiting is None, "without a stream it trains on"
    hand.hear(Finishing(1))
    hand.hear(Welcome(7, 1, True, (), 1, 0, "running", (Merged(), Merged())))
    assert hand.core.state == "training"
    hand.step()
    assert hand.core.state == "finishing"
