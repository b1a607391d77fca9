"""The real core in virtual time. Invariants are checked after every event (sim/checkers/); these tests look at what
a run as a whole must show."""

from __future__ import annotations

import itertools
from collections import defaultdict
from math import ceil

import pytest

from atoll.core.records import ClosedLine, FateLine, LifeEndLine, MemberLine, QuorumLine, SeedLine, SlotLine
from atoll.sim.world import MS, LearnerSpec, S, World

SLOT_NS = 300 * MS
PIECE_BYTES = 100_000
NEED = PIECE_BYTES / 0.3
"""Bytes per second that one piece per slot takes at 3 steps of 100 ms."""


def equal(count: int, **spec: float) -> list[LearnerSpec]:
    return [LearnerSpec(name=f"l{i}", **spec) for i in range(count)]  # type: ignore[arg-type]


def regular(world: World) -> list[SlotLine]:
    return [s for s in world.records(SlotLine) if s.slot <= world.config.slots]


def merged_slots(world: World) -> dict[tuple[str, int], list[int]]:
    """(name, piece) -> slots in which it was merged."""
    rows: dict[tuple[str, int], list[int]] = defaultdict(list)
    for slot in regular(world):
        for merged in slot.merged:
            rows[merged.name, slot.piece].append(slot.slot)
    return rows


def merges_of(world: World, name: str) -> int:
    return sum(len(slots) for (who, _), slots in merged_slots(world).items() if who == name)


def longest_gap_rounds(world: World, name: str, *, first: int = 1) -> float:
    """Longest time without a merge of any piece of `name`, in rounds of P slots, from slot `first` to the end."""
    rows, worst = merged_slots(world), 0
    for piece in range(world.config.fragments):
        marks = [first, *(s for s in rows[name, piece] if s >= first), world.config.slots]
        worst = max(worst, *(b - a for a, b in itertools.pairwise(marks)))
    return worst / world.config.fragments


def ends(world: World) -> list[LifeEndLine]:
    return world.records(LifeEndLine)


def yield_of(world: World) -> float:
    computed = sum(e.tokens * world.config.fragments for e in ends(world))
    return sum(sum(e.merged) for e in ends(world)) / computed


# ---------------------------------------------------------------- equal and unequal learners


@pytest.mark.parametrize("take", ["rebase", "overwrite"])
def test_equal_learners__everyone_is_in_every_slot(take: str) -> None:
    world = World(seed=1, learners=equal(4), take=take)
    world.run()
    assert all(len(slot.merged) == 4 for slot in regular(world))
    assert len(regular(world)) == world.config.slots
    assert yield_of(world) > (0.999 if take == "rebase" else 0.93)


def test_equal_learners__nobody_waits_after_the_first_parameters() -> None:
    world = World(seed=2, learners=equal(4))
    world.run()
    for learner in world.lives:
        assert "lock" not in learner.blocked_ns
        assert learner.blocked_ns["parameters"] < 1 * S


@pytest.mark.parametrize("seed", range(3))
def test_speeds_1_to_7__everyone_takes_part_in_every_fragment(seed: int) -> None:
    factors = (1, 2, 3, 4, 7)
    learners = [LearnerSpec(name=f"x{k}", step_ns=100 * MS * k) for k in factors]
    world = World(seed=seed, learners=learners)
    world.run()
    for k in factors:
        assert merges_of(world, f"x{k}") >= 0.95 * world.config.slots
        assert longest_gap_rounds(world, f"x{k}") <= 2
    assert yield_of(world) > 0.999


def test_a_step_that_spans_many_slots__its_learner_still_reaches_every_piece() -> None:
    """One step of the slow learner spans 8 slots: a cap on queued transfers would starve it (capture.py)."""
    slow = LearnerSpec(name="slow", step_ns=2400 * MS)
    world = World(seed=3, learners=[*equal(3), slow], steps=720)
    world.run()
    assert longest_gap_rounds(world, "slow", first=17) <= 2 + 1
    assert merges_of(world, "slow") >= 0.4 * world.config.slots


# ---------------------------------------------------------------- pace (R2)


@pytest.mark.parametrize("quorum", [1, 2, 4, 5])
def test_pace__slots_go_with_the_kth_fastest(quorum: int) -> None:
    factors = (1, 2, 3, 4, 7)
    learners = [LearnerSpec(name=f"x{k}", step_ns=100 * MS * k, jitter=0.1) for k in factors]
    world = World(seed=4, learners=learners, quorum=quorum, steps=360)
    world.run()
    quorums = [q.now_ns for q in world.records(QuorumLine)]
    steps = (quorums[-1] - quorums[10]) / (100 * MS * factors[quorum - 1])
    slots = len(quorums) - 11
    assert steps / slots == pytest.approx(world.config.slot_steps, rel=0.1), "one slot per s steps of the K-th fastest"


def test_pace__surplus_from_an_outage_is_forgotten() -> None:
    """Hazard 41: hundreds of slots ran in a second after an outage."""
    world = World(seed=5, learners=equal(4), steps=480)

    def cut(yes: bool) -> None:
        for agent in world.agents.values():
            (agent.cut_control if yes else agent.mend_control)()

    world.at(10 * S, lambda: cut(True))
    world.at(25 * S, lambda: cut(False))
    world.run()
    times = [q.now_ns for q in world.records(QuorumLine)]
    after = [t for t in times if t > 25 * S]
    assert not [t for t in times if 11 * S < t < 25 * S]
    for first, third in zip(after, after[2:], strict=False):
        assert third - first > 0.8 * SLOT_NS, "no burst of slots"


def test_pace__a_change_of_the_fastest_leaves_no_backlog() -> None:
    fast = LearnerSpec(name="fast", step_ns=25 * MS)
    world = World(seed=6, learners=[fast, *equal(2)], quorum=2, steps=360)
    world.at(12 * S, lambda: world.crash("fast"))
    world.run()
    times = [q.now_ns for q in world.records(QuorumLine)]
    late = [b - a for a, b in itertools.pairwise(times) if a > 13 * S]
    assert min(late) > 0.8 * SLOT_NS


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("seed", range(4))
def test_recovery__learner_dies_in_mid_upload__work_is_merged_once(seed: int) -> None:
    learners = equal(3, up_bytes_per_s=1.5 * NEED)
    world = World(seed=seed, learners=learners, steps=360)
    world.at(10 * S + seed * 37 * MS, lambda: world.crash("l1", back_after_ns=4 * S))
    world.run()
    lives = [e for e in ends(world) if e.name == "l1"]
    assert len(lives) == 2
    assert lives[0].generation < lives[1].generation
    assert sum(lives[0].lost) > 0
    assert sum(lives[0].merged) > 0
    assert longest_gap_rounds(world, "l0") <= 2, "the others do not notice"
    mine = [m for m in world.records(MemberLine) if m.generation == lives[1].generation]
    back = next(m.now_ns for m in mine if m.state == "ready")
    first = next(s.slot for s in regular(world) if s.now_ns > back)
    assert longest_gap_rounds(world, "l1", first=first) <= 3


def test_recovery__a_name_that_is_alive_is_refused_until_its_life_ends() -> None:
    world = World(seed=8, learners=equal(2), steps=240)
    original = world.agents["l1"]
    world.at(5 * S, lambda: world.join(LearnerSpec(name="l1")))
    world.at(9 * S, original.die)
    world.at(9 * S, lambda: original.learner.die())  # type: ignore[union-attr]
    world.run()
    lives = [e for e in ends(world) if e.name == "l1"]
    assert len(lives) == 2
    ready = [m for m in world.records(MemberLine) if m.name == "l1" and m.state == "ready"]
    assert ready[1].now_ns > 9 * S


def test_hang__a_learner_that_wakes_goes_on_and_loses_nothing() -> None:
    world = World(seed=9, learners=equal(3), steps=240)
    world.at(8 * S, lambda: world.hang("l1", 6 * S))
    world.run()
    states = [m.state for m in world.records(MemberLine) if m.name == "l1"]
    assert "idle" in states
    assert "away" not in states, "its agent lives"
    assert sum(sum(e.lost) for e in ends(world)) == 0
    assert yield_of(world) > 0.999


def test_link__control_cut_and_back__the_same_life_goes_on() -> None:
    world = World(seed=10, learners=equal(3), steps=240)
    world.at(8 * S, lambda: world.agents["l1"].cut_control())
    world.at(12 * S, lambda: world.agents["l1"].mend_control())
    world.run()
    assert len([e for e in ends(world) if e.name == "l1"]) == 1
    assert yield_of(world) > 0.999


@pytest.mark.parametrize("take", ["rebase", "overwrite"])
def test_link__bulk_cut_for_long__participation_falls_and_the_books_hold(take: str) -> None:
    world = World(seed=11, learners=equal(3), steps=480, take=take)

    def cut(yes: bool) -> None:
        bulk = world.agents["l1"].bulk
        (bulk.hold if yes else bulk.release)()

    world.at(8 * S, lambda: cut(True))
    world.at(28 * S, lambda: cut(False))
    world.run()
    assert merges_of(world, "l1") < merges_of(world, "l0") - 40
    assert any(f.reason.startswith(("its bytes", "stale")) for f in world.records(FateLine) if f.name == "l1")


def test_seeder_dies_before_version_0_is_whole__another_is_named() -> None:
    learners = equal(3, up_bytes_per_s=NEED / 10)
    world = World(seed=12, learners=learners, steps=60, start_wait_ns=5 * S)
    world.at(1 * S, lambda: world.crash("l0"))
    world.run()
    [seed] = world.records(SeedLine)
    assert seed.source == "l1"


def test_late_join__newcomer_takes_part_and_old_ones_do_not_slow_down() -> None:
    world = World(
        seed=13, learners=equal(2), steps=360
    )
    world.at(12 * S, lambda: world.join(LearnerSpec(name="late")))
    world.run()
    assert longest_gap_rounds(world, "late", first=55) <= 2
    assert sum(e.tokens for e in ends(world) if e.name == "late") > 0


def test_disk_full__merges_stop_learners_go_on_and_all_is_merged_later() -> None:
    world = World(seed=14, learners=equal(3), steps=240)

    def full(yes: bool) -> None:
        world.syncer.disk.full = yes

    world.at(8 * S, lambda: full(True))
    world.at(11 * S, lambda: full(False))
    world.run()
    assert any("could not be written" in n for n in world.syncer.notices)
    assert yield_of(world) > 0.999
    assert min(e.steps for e in ends(world)) >= 235


# ---------------------------------------------------------------- thin links (R4, hazards 42 and 45)


@pytest.mark.parametrize("share", [0.9, 0.4])
def test_thin_uplink__every_piece_is_merged_within_the_bound(share: float) -> None:
    thin = LearnerSpec(name="thin", up_bytes_per_s=share * NEED)
    world = World(seed=15, learners=[*equal(3), thin], steps=960)
    world.run()
    rows = merged_slots(world)
    counts = [len(rows["thin", piece]) for piece in range(world.config.fragments)]
    mean = sum(counts) / len(counts)
    assert longest_gap_rounds(world, "thin", first=33) <= 2 * ceil(1 / share) + 2
    assert min(counts) >= mean / 2, f"all pieces alike: {counts}"
    assert mean * world.config.fragments >= 0.7 * share * world.config.slots
    for name in ("l0", "l1", "l2"):
        assert merges_of(world, name) >= 0.95 * world.config.slots, "a thin link costs the others nothing"
    assert yield_of(world) > 0.999


@pytest.mark.parametrize("share", [0.9, 0.4])
@pytest.mark.parametrize("take", ["rebase", "overwrite"])
def test_thin_downlink__no_work_is_merged_twice_and_nobody_is_stuck(share: float, take: str) -> None:
    thin = LearnerSpec(name="thin", down_bytes_per_s=share * NEED)
    world = World(seed=16, learners=[*equal(3), thin], steps=960, take=take)
    world.run()
    assert longest_gap_rounds(world, "thin", first=33) <= 2 * ceil(1 / share) + 2


# ---------------------------------------------------------------- lock modes


def test_streaming__all_learners_are_in_every_slot_and_take_at_the_same_step() -> None:
    world = World(seed=17, learners=equal(3, jitter=0.2), mode="streaming", overlap=2)
    world.run()
    assert all(len(slot.merged) == 3 for slot in regular(world))
    for slot in regular(world):
        assert {m.own_step for m in slot.merged} == {slot.slot * world.config.slot_steps}


def test_diloco__one_fragment_all_learners_every_interval() -> None:
    world = World(seed=18, learners=equal(3), mode="diloco", fragments=1, overlap=0)
    world.run()
    assert [len(slot.merged) for slot in regular(world)] == [3] * 10
    assert all("lock" in learner.blocked_ns for learner in world.lives)


def test_lock_mode__a_dead_learner_does_not_stop_the_others() -> None:
    world = World(seed=19, learners=equal(3), mode="diloco", fragments=1, overlap=0, steps=360)
    world.at(10 * S, lambda: world.crash("l2"))
    world.run()
    assert len(regular(world)[-1].merged) == 2


def test_lock_mode__a_learner_comes_back() -> None:
    world = World(seed=20, learners=equal(3), mode="streaming", steps=360)
    world.at(10 * S, lambda: world.crash("l2", back_after_ns=3 * S))
    world.run()
    assert len(regular(world)[-1].merged) == 3


# ---------------------------------------------------------------- the finish (R22)


def test_finish__all_work_is_merged_and_all_hold_the_final_version() -> None:
    world = World(seed=21, learners=[*equal(2), LearnerSpec(name="slow", step_ns=700 * MS)])
    world.run()
    assert yield_of(world) == 1.0
    finals = [s for s in world.records(SlotLine) if s.slot > world.config.slots]
    assert [s.slot for s in sorted(finals, key=lambda s: s.slot)] == list(range(81, 89))
    assert all(e.reason == "finished" for e in ends(world))


def test_finish__one_that_dies_in_it_is_not_waited_for() -> None:
    world = World(seed=22, learners=equal(3, up_bytes_per_s=NEED * 1.2))
    world.run_until(lambda: world.syncer.core.finish.phase == "final", limit_s=600)
    begun = world.clock.now_ns
    world.crash("l1")
    world.run()
    assert world.clock.now_ns - begun < 20 * S
    assert {e.name for e in ends(world) if e.reason == "finished"} == {"l0", "l2"}


def test_finish__one_that_hangs_in_it_is_waited_for_only_for_the_bound() -> None:
    world = World(seed=23, learners=equal(3))
    world.at(23 * S + 700 * MS, lambda: world.hang("l1", 1000 * S))
    world.run()
    assert world.clock.now_ns < 60 * S
    assert sum(sum(e.lost) for e in ends(world) if e.name == "l1") >= 0


def test_finish__a_newcomer_in_it_is_told_so() -> None:
    world = World(seed=24, learners=equal(2, up_bytes_per_s=NEED / 2))
    world.run_until(lambda: world.syncer.core.finish.phase == "final", limit_s=600)
    world.join(LearnerSpec(name="late"))
    world.run()
    assert world.agents["late"].life is None
    assert {e.name for e in ends(world)} == {"l0", "l1"}


def test_stop__ctrl_c_makes_the_newest_slot_the_last_and_nothing_is_lost() -> None:
    from atoll.core.events import StopRequested

    world = World(seed=25, learners=equal(3))
    world.at(9 * S + 50 * MS, lambda: world.syncer.feed(StopRequested()))
    world.run()
    assert 20 < len(world.records(QuorumLine)) < 40
    assert yield_of(world) == 1.0


# ---------------------------------------------------------------- the whole


@pytest.mark.parametrize("seed", range(6))
def test_ten_equal_runs_of_a_seed_give_equal_tapes(seed: int) -> None:
    def tape() -> list[object]:
        learners = [LearnerSpec(name=f"x{k}", step_ns=100 * MS * k, jitter=0.3) for k in (1, 2, 3)]
        world = World(seed=seed, learners=learners, steps=90)
        world.at(3 * S, lambda: world.crash("x2", back_after_ns=2 * S))
        world.run()
        return list(world.syncer.tape)

    first = tape()
    assert all(tape() == first for _ in range(2 if seed else 9))


def test_quorum_counts_ready__participation_is_reported_apart() -> None:
    """Hazard 12: size, live and contributors are three numbers."""
    world = World(seed=26, learners=equal(4), steps=400)
    world.at(5 * S, lambda: world.hang("l3", 100 * S))
    world.run()
    hung_ns = 5 * S + world.config.lease_interval_ns + 3 * S
    late = [c for c in world.records(ClosedLine) if c.now_ns > hung_ns and c.slot <= world.config.slots]
    assert late
    assert all((c.ready, c.live, len(c.participants)) == (3, 4, 3) for c in late)


@pytest.mark.parametrize("mode", ["diloco", "streaming"])
def test_lock_mode__a_stream_that_comes_back_in_mid_step_does_not_begin_a_wait(mode: str) -> None:
    """The work of a contribution is unsettled when the stream is cut; Welcome comes while a step is being trained."""
    fragments, overlap = (1, 0) if mode == "diloco" else (8, 2)
    thin = equal(2, up_bytes_per_s=NEED / 4, latency_ns=20 * MS)
    for offset in range(0, 4000, 390):
        world = World(seed=27, learners=thin, mode=mode, fragments=fragments, overlap=overlap, steps=96)
        world.at(4 * S + offset * MS, lambda w=world: w.agents["l1"].cut_control())  # type: ignore[misc]
        world.at(5 * S + offset * MS, lambda w=world: w.agents["l1"].mend_control())  # type: ignore[misc]
        world.run()


@pytest.mark.parametrize("take", ["rebase", "overwrite"])
def test_link__a_short_cut_of_the_control_stream_costs_no_life(take: str) -> None:
    """Shorter than the time between two reports: what is told again must not look older than what was heard."""
    factors = (1, 2, 3)
    learners = [LearnerSpec(name=f"x{k}", step_ns=100 * MS * k) for k in factors]
    for offset in range(0, 1800, 130):
        world = World(seed=28, learners=learners, take=take, steps=60)
        for k in factors:
            agent = world.agents[f"x{k}"]
            world.at((2000 + offset) * MS, lambda a=agent: a.cut_control())  # type: ignore[misc]
            world.at((2050 + offset) * MS, lambda a=agent: a.mend_control())  # type: ignore[misc]
        world.run()
        assert {e.reason for e in ends(world)} == {"finished"}


def test_streaming__updates_that_are_held_back_leave_a_place_for_the_one_that_is_awaited() -> None:
    """overlap = 7 slots: as many updates may be held back at once; with 4 places the awaited one never came."""
    far = {"jitter": 0.5, "latency_ns": 300 * MS, "up_bytes_per_s": 500_000}
    learners = [
        LearnerSpec(name="l0", **far),  # type: ignore[arg-type]
        LearnerSpec(name="l1", step_ns=300 * MS, down_bytes_per_s=2e6, **far),  # type: ignore[arg-type]
        LearnerSpec(name="l2", step_ns=300 * MS, jitter=0.5),
    ]
    for at_ms in range(7096, 7200, 24):
        world = World(seed=162, learners=learners, mode="streaming", take="overwrite", overlap=7, interval=8, steps=60)
        world.at(at_ms * MS, lambda w=world: w.agents["l1"].cut_control())  # type: ignore[misc]
        world.at((at_ms + 1000) * MS, lambda w=world: w.agents["l1"].mend_control())  # type: ignore[misc]
        world.run(limit_s=300)


def test_finish__far_learners_whose_uploads_take_a_round_trip_each_lose_nothing() -> None:
    """8 uploads one after the other, 600 ms each: longer than a lease, and no average transfer shows it."""
    world = World(seed=30, learners=[*equal(1), LearnerSpec(name="far", latency_ns=300 * MS)], steps=60, interval=8)
    world.run()
    assert sum(sum(e.lost) for e in ends(world)) == 0


def test_link__a_cut_near_the_end_is_no_reason_to_give_up() -> None:
    world = World(seed=31, learners=equal(2), steps=60)
    for name in ("l0", "l1"):
        agent = world.agents[name]
        world.at(5000 * MS, lambda a=agent: a.cut_control())  # type: ignore[misc]
        world.at(7000 * MS, lambda a=agent: a.mend_control())  # type: ignore[misc]
    world.run()
    assert {e.reason for e in ends(world)} == {"finished"}
    assert yield_of(world) == 1.0
