"""The syncer's entrance: who may join, what is refused, what a broken peer can do."""

from __future__ import annotations

import math

import pytest

from atoll.core import events as ev
from atoll.core import members
from atoll.core.layout import TensorSpec
from atoll.core.machine import Average
from atoll.core.messages import (
    Counters,
    Fate,
    FinalRound,
    Leave,
    Pace,
    Refuse,
    Replaced,
    Report,
    SeedRequest,
    Timings,
    UpdateReady,
    Version,
    Welcome,
)
from atoll.core.records import ClosedLine, FateLine, GrantLine, LifeEndLine, MemberLine, QuorumLine, SlotLine
from atoll.core.syncer import Syncer
from tests.core.helpers import MS, Bench, S

# ---------------------------------------------------------------- joining (R13, hazards 9, 15)


def test_hello__generation_is_epoch_times_2_to_32_plus_n_and_on_the_tape_before_it_is_sent() -> None:
    bench = Bench()
    answer = bench.hello("a")
    assert isinstance(answer, Welcome)
    assert answer.generation == 2**32 + 1
    grant = next(i for i, a in enumerate(bench.actions) if isinstance(a, ev.Write) and isinstance(a.record, GrantLine))
    sent = next(i for i, a in enumerate(bench.actions) if isinstance(a, ev.Send) and isinstance(a.message, Welcome))
    write = bench.actions[grant]
    assert grant < sent
    assert write.sync


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"protocol": 99}, "protocol", "protocol 99"),
        ({"run_id": "other"}, "run", "'other'"),
        ({"fingerprint": "x", "tensors": (TensorSpec("t0", (11,), "float32"),)}, "layout", "t0 float32[10]"),
        ({"fingerprint": "x", "tensors": ()}, "layout", "join with the model of the run"),
    ],
)
def test_hello__mismatch_is_refused_in_words(fields: dict[str, object], kind: str, words: str) -> None:
    bench = Bench()
    answer = bench.hello("a", **fields)
    assert isinstance(answer, Refuse)
    assert answer.kind == kind
    assert words in answer.message
    assert "\n" not in answer.message


def test_hello__a_name_in_use_is_refused_and_a_closed_one_replaced() -> None:
    bench = Bench()
    bench.join("a")
    first = bench.lives["a"]
    stream = bench.streams["a"]
    refusal = bench.hello("a")
    assert isinstance(refusal, Refuse)
    assert refusal.kind == "name"
    bench.feed(ev.StreamClosed(stream))
    assert isinstance(bench.hello("a"), Welcome)
    assert bench.lives["a"].generation > first.generation
    assert [e.generation for e in bench.written(LifeEndLine)] == [first.generation]


def test_hello__a_name_past_its_lease_is_replaced_and_the_old_life_is_told_when_it_wakes() -> None:
    """Hazards 14 and 47: liveness belongs to a life; two lives of a name never throw each other out for ever."""
    bench = Bench()
    bench.join("a")
    old = bench.lives["a"]
    old_stream = bench.streams["a"]
    bench.pass_ns(6 * S)
    assert isinstance(bench.hello("a"), Welcome)
    assert any(isinstance(m, Replaced) for m in bench.sent[old_stream])
    bench.join("b")
    answer = bench.hello("a", generation=old.generation)
    assert isinstance(answer, Refuse)
    assert answer.kind == "replaced"


def test_reconnect__same_life_new_stream_gets_its_newest_merged_seq() -> None:
    bench = Bench()
    bench.join("a")
    message = bench.announce("a", 1, 1, steps=2)
    bench.arrive("a", message)
    bench.report("a", 2)
    life, old = bench.lives["a"], bench.streams["a"]
    bench.feed(ev.StreamClosed(old))
    answer = bench.hello("a", generation=life.generation)
    assert isinstance(answer, Welcome)
    assert answer.resumed
    assert (answer.merged[1].generation, answer.merged[1].seq) == (life.generation, 1)
    updates = bench.told("a", UpdateReady)
    assert {(u.piece, u.version, u.merged.seq) for u in updates} == {(0, Version(1, 0), 0), (1, Version(1, 1), 1)}


# ---------------------------------------------------------------- contributions (R6, R25)


def test_contribution__is_merged_in_the_slot_that_it_names_and_told_by_the_update_alone() -> None:
    bench = Bench()
    bench.join("a")
    message = bench.announce("a", 1, 1, steps=2)
    bench.arrive("a", message)
    bench.report("a", 2)
    [slot] = bench.written(SlotLine)
    assert (slot.slot, slot.piece, slot.version, slot.merged[0].seq) == (1, 1, (1, 1), 1)
    assert bench.told("a", Fate) == []
    assert bench.told("a", UpdateReady)[-1].merged.seq == 1


def test_contribution__for_a_closed_slot_is_missed() -> None:
    bench = Bench()
    bench.join("a")
    bench.report("a", 2)
    bench.announce("a", 1, 1, steps=2)
    assert [f.fate for f in bench.told("a", Fate)] == ["missed"]


def test_contribution__announced_twice_counts_once_and_a_lost_fate_is_told_again() -> None:
    bench = Bench()
    bench.join("a")
    bench.report("a", 2)
    bench.announce("a", 1, 1, steps=2)
    bench.announce("a", 1, 1, steps=2)
    assert len(bench.told("a", Fate)) == 2
    assert len(bench.written(FateLine)) == 1


@pytest.mark.parametrize(
    ("arrival", "reason"),
    [({"hash_ok": False}, "hash"), ({"finite": False}, "not finite")],
)
def test_contribution__damaged_or_not_finite_is_refused_and_the_others_go_on(
    arrival: dict[str, object], reason: str
) -> None:
    bench = Bench(learners=2)
    bench.join("a")
    bench.join("b")
    bad = bench.announce("a", 1, 1, steps=2)
    good = bench.announce("b", 1, 1, steps=2)
    bench.arrive("a", bad, **arrival)
    bench.arrive("b", good)
    bench.report("a", 2)
    bench.report("b", 2)
    [slot] = bench.written(SlotLine)
    assert [m.name for m in slot.merged] == ["b"]
    [fate] = bench.told("a", Fate)
    assert fate.fate == "refused"
    assert reason in fate.reason


@pytest.mark.parametrize(("c_steps", "c_tokens"), [(0, 100), (2, 0), (2, -5), (-1, 10), (3, 10**9)])
def test_contribution__weight_must_be_finite_positive_and_earned(c_steps: int, c_tokens: int) -> None:
    """Hazard 7: one negative, NaN or huge token count spoilt the mean."""
    bench = Bench()
    bench.join("a")
    bench.announce("a", 1, 1, steps=2, c_steps=c_steps, c_tokens=c_tokens)
    assert [f.fate for f in bench.told("a", Fate)] == ["refused"]


@pytest.mark.parametrize(
    "fields",
    [
        {"piece": 7},
        {"piece": 0},
        {"size_bytes": 21},
        {"anchor": Version(1, 5)},
        {"anchor": Version(2, 0)},
    ],
)
def test_contribution__what_only_a_broken_peer_sends_puts_it_out(fields: dict[str, object]) -> None:
    bench = Bench(learners=2)
    bench.join("a")
    bench.join("b")
    bench.announce("a", 1, 1, steps=2, **fields)
    assert [m.kind for m in bench.told("a", Refuse)] == ["put out"]
    assert [m.life.name for m in bench.core.roster] == ["b"]


def test_counters__that_run_backwards_put_the_peer_out() -> None:
    bench = Bench(learners=2)
    bench.join("a")
    bench.join("b")
    bench.report("a", 4)
    bench.report("a", 2)
    assert [m.kind for m in bench.told("a", Refuse)] == ["put out"]


def test_counters__that_claim_more_fates_than_tokens_put_the_peer_out() -> None:
    bench = Bench()
    bench.join("a")
    bench.say("a", Report(Counters(2, 200, 200.0, (5000, 0), (7000, 0))))
    [refused] = bench.told("a", Refuse)
    assert "of 200 tokens on fragment 0 it says that 5000 were overwritten and 7000 lost" in refused.message
    [end] = bench.written(LifeEndLine)
    assert end.tokens == 0
    assert min(end.lost) >= 0


def test_contribution__of_tokens_that_were_merged_already_puts_the_peer_out() -> None:
    bench = Bench(fragments=1, interval=2)
    bench.join("a")
    bench.arrive("a", bench.announce("a", 1, 1, steps=2, c_steps=2))
    bench.report("a", 2)
    bench.pass_ns(1 * S)
    bench.announce("a", 2, 2, steps=3, c_steps=3, anchor=Version(1, 1))
    [refused] = bench.told("a", Refuse)
    assert "it sends 300 tokens on fragment 0, 100 have no fate yet" in refused.message


def unseeded(*names: str) -> Bench:
    bench = Bench(learners=2)
    bench.core = Syncer(bench.config, bench.layout)
    bench.feed(ev.Started(1, has_init=False))
    for name in names:
        bench.hello(name)
    return bench


def test_version_0__a_seeder_that_only_beats_gives_way_to_another() -> None:
    bench = unseeded("a", "b")
    assert bench.told("a", SeedRequest)
    for now_ns in (bench.config.lease_interval_ns - 1, bench.config.lease_interval_ns):
        assert not bench.told("b", SeedRequest)
        bench.now_ns = now_ns
        for name in ("a", "b"):
            bench.beat(name, 0, waiting=True)
    assert len(bench.told("b", SeedRequest)) == 1
    [notice] = [a.text for a in bench.actions if isinstance(a, ev.Notice)]
    assert "first parameters are awaited from a" in notice
    assert "now b is asked" in notice
    for piece in range(bench.config.fragments):
        bench.feed(ev.SeedArrived(bench.lives["b"], piece, True, True))
    assert bench.core.seeded


def test_version_0__bytes_that_move_keep_the_seeder() -> None:
    bench = unseeded("a", "b")
    for _ in range(5 * bench.config.lease_interval_ns // S):
        bench.now_ns += 1 * S
        bench.feed(ev.BulkProgress(bench.lives["a"]))
        bench.beat("b", 0, waiting=True)
    assert not bench.told("b", SeedRequest)


def test_contribution__anchor_older_than_stale_max_is_missed() -> None:
    bench = Bench(stale_max=0, learners=2)
    bench.join("a")
    bench.join("b")
    first = bench.announce("b", 1, 1, steps=2)
    bench.arrive("b", first)
    bench.report("a", 2)
    bench.report("b", 2)
    stale = bench.announce("a", 1, 3, steps=4, anchor=Version(1, 0))
    bench.arrive("a", stale)
    for name in ("a", "b"):
        bench.report(name, 4)
        bench.report(name, 6)
    bench.pass_ns(5 * S)
    assert any("stale" in f.reason for f in bench.told("a", Fate)), bench.told("a", Fate)


def test_contribution__complete_one_outlives_its_learner_incomplete_one_does_not() -> None:
    bench = Bench(learners=2)
    bench.join("a")
    bench.join("b")
    whole = bench.announce("a", 1, 1, steps=2)
    bench.announce("a", 2, 2, steps=2)
    bench.arrive("a", whole)
    bench.feed(ev.StreamClosed(bench.streams["a"]))
    old = bench.lives["a"]
    bench.hello("a")
    assert [f.seq for f in bench.written(FateLine)] == [2]
    assert not bench.written(LifeEndLine), "the books of the old life wait for what is on its way"
    bench.report("b", 2)
    bench.pass_ns(1 * S)
    [slot] = bench.written(SlotLine)
    assert [(m.name, m.generation) for m in slot.merged] == [("a", old.generation)]
    [end] = bench.written(LifeEndLine)
    assert end.merged == (0, 200)


def test_refused_work__is_said_at_the_first_and_at_each_doubling() -> None:
    bench = Bench(fragments=1, interval=2, learners=2, steps=200)
    bench.join("a")
    bench.join("b")
    for seq in range(1, 10):
        bench.arrive("a", bench.announce("a", seq, 1, steps=2), finite=False)
    said = [a.text for a in bench.actions if isinstance(a, ev.Notice)]
    assert [text.split(" so far")[0].split()[-1] for text in said] == ["1", "2", "4", "8"]
    assert "it is not finite (its training diverges" in said[0]


def test_missed_work__of_a_whole_round_is_said_once_until_something_is_merged() -> None:
    bench = Bench(learners=2)
    bench.join("a")
    bench.join("b")
    for steps in range(2, 14, 2):
        bench.report("b", steps)
        bench.pass_ns(100 * MS)
    closed = bench.core.slots.closed
    for seq, slot in enumerate(range(closed, closed - 4, -1), start=1):
        bench.announce("a", seq, slot, steps=2)
    said = [a.text for a in bench.actions if isinstance(a, ev.Notice) and "whole round" in a.text]
    assert len(said) == 1
    assert "learner a missed a whole round" in said[0]


@pytest.mark.parametrize(("tokens", "told"), [(64, 0), (100 * 8, 1), (100 * 7, 0), (13, 0), (12, 1)])
def test_units__a_learner_that_counts_others_than_the_rest_is_named_once(tokens: int, told: int) -> None:
    bench = Bench(learners=3)
    for name in ("a", "b", "c"):
        bench.join(name)
    for steps in (8, 10, 12):
        bench.report("a", steps)
        bench.report("b", steps)
        zeros = (0,) * bench.config.fragments
        bench.say("c", Report(Counters(steps, steps * tokens, 0.0, zeros, zeros)))
    said = [a.text for a in bench.actions if isinstance(a, ev.Notice) and "tokens per step" in a.text]
    assert len(said) == told
    assert all(f"learner c counts {tokens} tokens per step, the others 100" in text for text in said)


@pytest.mark.parametrize(("order", "words"), [
    ((("c", 25_600), ("a", 100), ("b", 100)), "learner a counts 100 tokens per step, learner c 25600: tokens are the"),
    ((("a", 100), ("b", 100), ("c", 25_600)), "learner c counts 25600 tokens per step, the others 100: tokens are the"),
])  # fmt: skip
def test_units__one_of_three_that_is_wrong_does_not_accuse_the_others(order, words) -> None:
    bench = Bench(learners=3)
    for name in ("a", "b", "c"):
        bench.join(name)
    zeros = (0,) * bench.config.fragments
    for steps in (8, 10, 12):
        for name, tokens in order:
            bench.say(name, Report(Counters(steps, steps * tokens, 0.0, zeros, zeros)))
    said = [a.text for a in bench.actions if isinstance(a, ev.Notice) and "tokens per step" in a.text]
    assert len(said) == 1
    assert words in said[0]


def test_leaving__says_how_much_of_its_work_is_not_merged() -> None:
    bench = Bench(fragments=1, interval=2)
    bench.join("a")
    bench.arrive("a", bench.announce("a", 1, 1, steps=2, c_steps=2))
    bench.report("a", 2)
    bench.pass_ns(1 * S)
    bench.say("a", Leave("interrupted", Counters(5, 500, 0.0, (0,), (300,)), Timings()))
    said = [a.text for a in bench.actions if isinstance(a, ev.Notice) and "not merged" in a.text]
    assert said == ["learner a ended (interrupted) with 60.0% of its work not merged: 300 of 500 tokens are lost"]


def test_norms__a_huge_one_is_refused_once_there_is_a_history() -> None:
    bench = Bench(fragments=1, interval=2, learners=2, steps=200)
    bench.join("a")
    bench.join("b")
    for slot in range(1, 31):
        for name in ("a", "b"):
            huge = slot == 30 and name == "b"
            message = bench.announce(name, slot, slot, steps=2 * slot, anchor=Version(1, slot - 1))
            bench.arrive(name, message, norm=100.0 if huge else 1.0)
        for name in ("a", "b"):
            bench.report(name, 2 * slot)
        bench.now_ns += 100 * MS
    assert [f.reason.split()[0] for f in bench.told("b", Fate)] == ["norm"]
    [notice] = [a.text for a in bench.actions if isinstance(a, ev.Notice)]
    assert "work of learner b was refused: 200 tokens on fragment 0, 1 so far: norm 100" in notice
    assert "another learning rate than the others': let schedules follow `learner.progress`" in notice
    assert len(bench.written(SlotLine)) == 30


def test_norms__raised_ones_are_taken_and_said_at_each_doubling() -> None:
    bench = Bench(fragments=1, interval=2, learners=2, steps=400)
    bench.join("a")
    bench.join("b")
    for slot in range(1, 101):
        for name in ("a", "b"):
            usual = 1.0 if slot <= 40 else 0.01
            message = bench.announce(name, slot, slot, steps=2 * slot, anchor=Version(1, slot - 1))
            bench.arrive(name, message, norm=0.9 if slot > 97 and name == "b" else usual)
        for name in ("a", "b"):
            bench.report(name, 2 * slot)
        bench.now_ns += 100 * MS
    assert not bench.told("b", Fate)
    first, second = [a.text for a in bench.actions if isinstance(a, ev.Notice)]
    assert "work of learner b on fragment 0 is 90 times as large as is usual now, and taken" in first
    assert "1 so far (bursts of its gradients" in first
    assert "2 so far" in second


# ---------------------------------------------------------------- slots


def test_slot__empty_is_recorded_and_makes_no_version() -> None:
    """Hazard 27: a counter advanced on empty merges."""
    bench = Bench()
    bench.join("a")
    bench.report("a", 2)
    [slot] = bench.written(SlotLine)
    assert slot.merged == ()
    assert slot.version == slot.base == (1, 0)


def test_slot__commits_of_one_piece_happen_in_slot_order() -> None:
    bench = Bench(auto=False, fragments=1, interval=2)
    bench.join("a")
    for slot in (1, 2):
        message = bench.announce("a", slot, slot, steps=2 * slot)
        bench.arrive("a", message)
        bench.report("a", 2 * slot)
        if slot == 1:
            merges = [a for a in bench.actions if isinstance(a, ev.Merge)]
            assert [m.slot for m in merges] == [1]
            bench.feed(ev.MergeDone(1, True, "t", "m", "u", 20, 1.0))
            bench.core.roster.by_name("a").open.clear()  # type: ignore[union-attr]
    assert [m.slot for m in (a for a in bench.actions if isinstance(a, ev.Merge))] == [1]


def test_slot__a_merge_that_is_not_finite_changes_nothing() -> None:
    bench = Bench(auto=False)
    bench.join("a")
    message = bench.announce("a", 1, 1, steps=2)
    bench.arrive("a", message)
    bench.report("a", 2)
    bench.feed(ev.MergeDone(1, False, "", "", "", 0, math.inf))
    [slot] = bench.written(SlotLine)
    assert slot.merged == ()
    assert [f.fate for f in bench.told("a", Fate)] == ["refused"], "sent again it would be so again, for ever"


def test_grace__waits_for_late_ones_but_never_a_whole_step_and_is_cut_short() -> None:
    bench = Bench(learners=2, quorum=1, interval=8, steps=400)
    bench.join("a")
    bench.join("b")
    for turn in range(1, 6):
        for name in ("a", "b"):
            message = bench.announce(name, turn, turn, steps=4 * turn, anchor=Version(1, (turn - 1) // 2))
            bench.arrive(name, message)
        bench.now_ns += 400 * MS
        bench.report("a", 4 * turn)
        bench.now_ns += 1 * MS
        bench.report("b", 4 * turn)
    closed = bench.written(ClosedLine)
    quorums = bench.written(QuorumLine)
    assert all(c.reason == "all ready learners announced" for c in closed)
    assert any(q.grace_ns > 0 for q in quorums)
    assert all(q.grace_ns < 101 * MS for q in quorums)


def test_collecting__ends_when_a_participant_is_gone() -> None:
    bench = Bench(learners=2, quorum=1)
    bench.join("a")
    bench.join("b")
    whole = bench.announce("a", 1, 1, steps=2)
    bench.announce("b", 1, 1, steps=2)
    bench.arrive("a", whole)
    bench.now_ns += 200 * MS
    bench.report("a", 2)
    assert not bench.written(SlotLine)
    bench.feed(ev.StreamClosed(bench.streams["b"]))
    [slot] = bench.written(SlotLine)
    assert [m.name for m in slot.merged] == ["a"]


def test_liveness__bulk_progress_counts_as_life_and_a_hang_is_idle_not_away() -> None:
    """Hazards 30 and 43."""
    bench = Bench()
    bench.join("a")
    for _ in range(20):
        bench.now_ns += 1 * S
        bench.feed(ev.BulkProgress(bench.lives["a"]))
    states = [m.state for m in bench.written(MemberLine)]
    assert states == ["ready", "idle"]
    bench.beat("a", 5)
    assert bench.core.roster.by_name("a").ready  # type: ignore[union-attr]


def test_liveness__a_short_pause_of_fast_steps_is_no_hang() -> None:
    """R10's floor: 4 steps of 10 ms are over sooner than a busy machine gives the processor back."""
    bench = Bench()
    bench.join("a")
    for steps in range(2, 40, 2):
        bench.now_ns += 20 * MS
        bench.report("a", steps)
    lease_ns, member = bench.config.lease_interval_ns, bench.core.roster.by_name("a")
    assert member is not None
    paused_ns = bench.now_ns
    while bench.now_ns < paused_ns + lease_ns - 100 * MS:
        bench.now_ns += 100 * MS
        bench.beat("a", 38)
    assert member.ready
    bench.now_ns += 200 * MS
    bench.beat("a", 38)
    assert member.state == "idle"


def test_liveness__one_that_waits_by_r9_is_ready() -> None:
    bench = Bench()
    bench.join("a")
    for _ in range(20):
        bench.now_ns += 1 * S
        bench.beat("a", 0, waiting=True)
    assert [m.state for m in bench.written(MemberLine)] == ["ready"]


def test_a_message_that_does_not_belong_puts_the_peer_out() -> None:
    bench = Bench(learners=2)
    bench.join("a")
    bench.say("a", Welcome(1, 1, False, (), 0, 0, "running", ()))
    assert [m.kind for m in bench.told("a", Refuse)] == ["put out"]


def test_warning__the_same_single_learner_fills_slot_after_slot() -> None:
    """Hazard 11."""
    bench = Bench(learners=2, quorum=1)
    bench.join("a")
    bench.join("b")
    for slot in range(1, 8):
        message = bench.announce("a", slot, slot, steps=2 * slot, anchor=bench.core.pieces[slot % 2].version)
        bench.arrive("a", message)
        bench.now_ns += 100 * MS
        bench.report("a", 2 * slot)
        bench.beat("b", slot)
        bench.pass_ns(200 * MS)
    assert any("alone filled" in a.text for a in bench.actions if isinstance(a, ev.Notice))


def test_timings_travel_to_the_books() -> None:
    bench = Bench()
    bench.join("a")

    timings = Timings((("parameters", 5),), 10, 3, 4)
    bench.say("a", Report(bench.counters(2)))
    bench.say("a", Leave("interrupted", bench.counters(3), timings))
    [end] = bench.written(LifeEndLine)
    assert (end.steps, end.step_ns, end.step_ns_max, end.gap_ns_max) == (3, 10, 3, 4)
    assert end.blocked_ns == (("parameters", 5),)


def test_step_average__a_tiny_first_sample_does_not_hold_it_down() -> None:
    """A learner of 2 s steps whose first sample was 0 was taken for idle at every step."""
    bench = Bench(learners=1, fragments=1, interval=1)
    bench.join("a")
    bench.report("a", 1)
    for step in range(2, 12):
        for _ in range(4):
            bench.now_ns += S // 2
            bench.beat("a", step - 1)
        bench.report("a", step)
    assert [m.state for m in bench.written(MemberLine)] == ["ready"]
    assert bench.core.roster.by_name("a").step_ns.get() > 1 * S  # type: ignore[union-attr]


def test_reconnect__an_announcement_in_place_of_a_lost_first_report_says_that_the_learner_is_ready() -> None:
    """After a reconnect announcements come before the report; the first report went down with the old stream."""
    bench = Bench(learners=2)
    bench.join("b")
    bench.hello("a")
    bench.hello("a", generation=bench.lives["a"].generation)
    bench.announce("a", 1, 1, steps=2)
    assert not bench.told("a", Refuse)
    assert not bench.told("a", Fate)
    bench.report("a", 2)
    assert all(member.ready for member in bench.core.roster)


def test_liveness__one_that_was_silent_on_an_open_stream_is_told_what_it_missed() -> None:
    """Messages go to those who are present; without this a learner that woke in the finish never heard of it."""
    bench = Bench(learners=2, fragments=1, interval=1, steps=1, grace_factor=0.0)
    bench.join("a")
    bench.join("b")
    for _ in range(12):
        bench.now_ns += S // 2
        bench.beat("b", 0)
    assert bench.core.roster.by_name("a").state == "away"  # type: ignore[union-attr]
    bench.report("b", 1)
    assert bench.told("a", FinalRound) == []
    bench.beat("a", 0)
    assert bench.told("a", Pace)[-1].slot == 1
    assert bench.told("a", FinalRound)
    assert bench.told("a", UpdateReady)


def test_liveness__one_that_was_silent_on_a_stream_that_holds_is_told_what_it_missed() -> None:
    """Packets were lost for a lease: nothing closes, and nobody says Welcome."""
    bench = Bench(auto=False, learners=2)
    bench.join("a")
    bench.join("b")
    for name in ("a", "b"):
        bench.arrive(name, bench.announce(name, 1, 1, steps=2))
        bench.report(name, 2)
    bench.feed(ev.MergeDone(1, True, "t", "m", "u", 20, 1.0))
    bench.pass_ns(9 * S)
    assert not bench.core.roster.present()
    bench.feed(ev.CommitDone(1))
    bench.sent.clear()
    bench.beat("a", 2, waiting=True)
    assert Version(1, 1) in {m.version for m in bench.told("a", UpdateReady)}
    assert bench.told("a", Pace)[-1].slot == 1


@pytest.mark.parametrize("gap_ns", [3 * S, 9 * S])
def test_pace__reports_that_queued_up_while_the_syncer_stood_still_make_no_burst_of_slots(gap_ns: int) -> None:
    """Hazard 41 with open streams: all that was said in the outage arrives within a millisecond."""
    bench = Bench(learners=2, steps=400)
    bench.join("a")
    bench.join("b")
    for steps in range(2, 22, 2):
        bench.now_ns += 200 * MS
        for name in ("a", "b"):
            bench.report(name, steps)
    before = len(bench.written(QuorumLine))
    assert before == 10
    step_ns = bench.written(QuorumLine)[-1].step_ns
    bench.now_ns += gap_ns
    bench.feed(ev.Overslept(gap_ns))
    for steps in range(22, 102, 2):
        for name in ("a", "b"):
            bench.report(name, steps)
    assert len(bench.written(QuorumLine)) == before
    for steps in range(102, 122, 2):
        bench.now_ns += 200 * MS
        for name in ("a", "b"):
            bench.report(name, steps)
    after = bench.written(QuorumLine)[before:]
    assert 6 <= len(after) <= 9
    assert after[-1].step_ns == pytest.approx(step_ns, rel=0.05), "the burst says nothing of anybody's speed"


def test_unknown_life__is_granted_another_one_in_place() -> None:
    """R28: a name that was evicted, a grant that was lost, a life that was put out: none of these ends training."""
    bench = Bench()
    bench.join("b")
    welcome = bench.hello("a", generation=77)
    assert isinstance(welcome, Welcome)
    assert not welcome.resumed
    assert welcome.generation == bench.lives["a"].generation != 77
    bench.report("a", 4)
    bench.report("a", 2)
    assert [m.kind for m in bench.told("a", Refuse)] == ["put out"]
    again = bench.hello("a", generation=welcome.generation)
    assert isinstance(again, Welcome)
    assert again.generation > welcome.generation


def test_older_life__is_told_of_the_newer_one_even_when_that_has_ended() -> None:
    bench = Bench()
    bench.join("b")
    bench.join("a")
    old = bench.lives["a"]
    bench.feed(ev.StreamClosed(bench.streams["a"]))
    bench.join("a")
    bench.say("a", Leave("interrupted", bench.counters(0), Timings()))
    answer = bench.hello("a", generation=old.generation)
    assert isinstance(answer, Refuse)
    assert answer.kind == "replaced"


def test_names__whose_newest_life_is_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "NAMES_MAX", 3)
    bench = Bench()
    for name in ("a", "b", "c", "d"):
        bench.join(name)
    generations = [bench.core.roster.newest_generation(name) for name in ("a", "b", "c", "d")]
    assert generations[0] == 0
    assert all(generations[1:])


def test_roster__those_long_away_make_room_for_newcomers() -> None:
    """Names of hosts and processes never come back; with a run of weeks they filled the syncer."""
    bench = Bench(learners=1)
    bench.core._learners_max = 2
    for name in ("a", "b"):
        bench.join(name)
    assert bench.hello("c").kind == "settings"
    bench.feed(ev.StreamClosed(bench.streams["a"]))
    bench.join("d")
    assert bench.core.roster.by_name("a") is None
    assert bench.core.roster.by_name("d") is not None


def test_pace__an_outage_is_not_taken_for_a_new_pace() -> None:
    """A full disk for minutes held the grace at 0 and predicted closings far too late for 80 slots."""
    average = Average(0.1)
    for _ in range(20):
        average.add_steady(500.0)
    average.add_steady(120_000.0)
    assert average.get() < 700
    average = Average(0.1)
    for _ in range(20):
        average.add_steady(0.0, 100.0)
    average.add_steady(1000.0, 100.0)
    assert average.get() == pytest.approx(10.0), "an average of zero can grow"
