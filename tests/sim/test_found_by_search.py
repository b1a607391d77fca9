"""What random worlds found in the core (docs/LOG.md tells the seeds), each as a small scenario of its own."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from atoll.core.messages import Announce
from atoll.core.records import FateLine, LifeEndLine, SlotLine
from atoll.sim.plan import MS, Fault, LearnerSpec, Plan, S
from atoll.sim.rogue import LIES, Rogue
from atoll.sim.search import run_plan
from atoll.sim.world import World


def equal(count: int, **spec: Any) -> list[LearnerSpec]:
    return [LearnerSpec(name=f"l{i}", **spec) for i in range(count)]


def merged_slots(world: World, name: str, piece: int | None = None) -> list[int]:
    return [
        s.slot
        for s in world.records(SlotLine)
        if s.slot <= world.config.slots and piece in (None, s.piece) and name in {m.name for m in s.merged}
    ]


class Spoilt(World):
    """A world in which some contributions are not what they should be."""

    spoil: Any = None

    def fault_of(self, announce: Announce) -> tuple[bool, bool, float]:
        return self.spoil(announce) if self.spoil is not None else (True, True, 1.0)


def test_lock_mode__one_whose_contribution_was_refused_before_its_slot_closed_names_the_slot_again() -> None:
    """Else it names the next one, and the others wait for the skipped one for ever."""
    world = Spoilt(seed=1, learners=equal(3, up_bytes_per_s=2e6), mode="diloco", fragments=1, overlap=0, steps=240)
    seen: list[int] = []

    def spoil(announce: Announce) -> tuple[bool, bool, float]:
        seen.append(announce.seq)
        return (len(seen) % 7 != 0, True, 1.0)

    world.spoil = spoil
    world.run()
    assert any(f.fate == "refused" for f in world.records(FateLine))


@pytest.mark.parametrize("fragments", [1, 2])
def test_full_disk__slots_of_a_piece_do_not_pile_up(fragments: int) -> None:
    world = World(seed=2, learners=equal(2), fragments=fragments, interval=2 * fragments, steps=400)
    world.at(5 * S, lambda: setattr(world.syncer.disk, "full", True))
    most: list[int] = []
    for tick in range(5, 30):
        world.at(tick * S, lambda: most.append(len(world.syncer.core.slots.live)))
    world.at(25 * S, lambda: setattr(world.syncer.disk, "full", False))
    world.run()
    assert max(most) <= 2 * fragments + 1


def test_empty_slots__with_stale_max_0_an_outage_does_not_end_all_merging() -> None:
    """Each waited for the version of a slot that had been empty, so that every later slot was empty too."""
    world = World(seed=3, learners=equal(3), stale_max=0, take="overwrite", fragments=2, interval=12, steps=720)
    for agent in world.processes:
        world.at(10 * S, agent.bulk.cut)
        world.at(16 * S, agent.bulk.mend)
    world.run()
    late = [s for s in world.records(SlotLine) if s.now_ns > 20 * S and s.slot <= world.config.slots]
    assert sum(bool(s.merged) for s in late) > 0.9 * len(late)


def test_far_away__the_control_delay_is_measured_and_announcements_come_in_time() -> None:
    """80 ms one way; the first guess of 2 ms for both ways was never replaced."""
    far = LearnerSpec(name="far", step_ns=200 * MS, jitter=0.2, latency_ns=80 * MS)
    world = World(seed=4, learners=[*equal(2), far], fragments=2, interval=12, steps=600)
    world.run()
    assert len(merged_slots(world, "far")) > 0.8 * world.config.slots


def fates(world: World, name: str, words: str) -> int:
    return sum(words in f.reason for f in world.records(FateLine) if f.name == name)


def test_far_away__a_slot_that_is_about_to_close_is_left_for_the_next() -> None:
    """105 ms one way, rounds of 400 ms: a slot whose time was past by the way and 4 ms was taken for late, and open."""
    near = equal(2, step_ns=100 * MS, jitter=0.2)
    far = replace(near[0], name="far", latency_ns=105 * MS)
    settings: dict[str, Any] = {"fragments": 4, "interval": 4, "take": "overwrite"}
    world = World(seed=5, learners=[*near, far], steps=312, piece_values=10_000, **settings)
    world.run()
    in_vain, merged = fates(world, "far", "had closed"), len(merged_slots(world, "far"))
    assert in_vain < 0.15 * (in_vain + merged), (in_vain, merged)


def longest_gap_rounds(world: World, name: str, piece: int) -> float:
    slots = [world.config.fragments * 4, *merged_slots(world, name, piece), world.config.slots]
    return max(b - a for a, b in pairwise(slots)) / world.config.fragments


@pytest.mark.parametrize(("latency_ms", "interval", "overlap"), [(101, 8, 2), (150, 12, 1)])
@pytest.mark.parametrize("take", ["overwrite", "rebase"])
@pytest.mark.parametrize("jitter", [0.0, 0.02])
def test_far_away__no_piece_is_passed_by_in_each_round(
    latency_ms: int, interval: int, overlap: int, take: str, jitter: float
) -> None:
    """Its slot had just closed each time, or the uplink was free only while its anchor was too old."""
    near = equal(3, step_ns=50 * MS, jitter=jitter, latency_ns=MS)
    far = replace(near[0], name="far", latency_ns=latency_ms * MS)
    settings: dict[str, Any] = {"fragments": 4, "interval": interval, "overlap": overlap, "take": take}
    for seed in (9, 11):
        world = World(seed=seed, learners=[*near, far], steps=70 * interval, piece_values=10_000, **settings)
        world.run()
        gaps = [longest_gap_rounds(world, "far", piece) for piece in range(4)]
        assert max(gaps) <= 13, (seed, gaps)
        in_vain, merged = fates(world, "far", "had closed"), len(merged_slots(world, "far"))
        assert in_vain < 0.15 * (in_vain + merged), (seed, in_vain, merged)


@pytest.mark.parametrize(
    ("paces_ms", "latency_ms", "slow_at_ms"), [((300, 600), 1, 4600), ((300, 600), 40, 6100), ((300,) * 3, 40, 6300)]
)
def test_one_slow_step__a_slot_that_was_missed_by_a_moment_costs_no_round(
    paces_ms: tuple[int, ...], latency_ms: int, slow_at_ms: int
) -> None:
    """The margin that it taught forbade both boundaries before each closing, and no earlier one was used: 8 slots."""
    learners = [
        LearnerSpec(name=f"l{i}", step_ns=pace * MS, jitter=0.05, latency_ns=latency_ms * MS)
        for i, pace in enumerate(paces_ms)
    ]
    slow = Fault(kind="straggle", learner="l0", at_ns=slow_at_ms * MS, for_ns=300 * MS, factor=2.0)
    settings = {"steps": 120, "fragments": 8, "interval": 24}
    world = run_plan(Plan(seed=slow_at_ms, settings=settings, learners=tuple(learners), faults=(slow,)))
    assert fates(world, "l0", "had closed") == 1, "the step was slow at another time than when it matters"
    merged = [0, *merged_slots(world, "l0"), world.config.slots + 1]
    assert max(b - a for a, b in pairwise(merged)) <= 2


def test_slow_checks__the_margin_of_a_thin_uplink_grows_by_what_the_syncer_needs_too() -> None:
    """Bytes that were answered for are not in yet: the syncer checks them for 100 ms. 43% of all came too late."""
    thin = LearnerSpec(name="thin", step_ns=100 * MS, up_bytes_per_s=85_544, down_bytes_per_s=62_125)
    learners = [LearnerSpec(name="l0", step_ns=200 * MS), thin, LearnerSpec(name="l2", step_ns=400 * MS, jitter=0.6)]
    settings: dict[str, Any] = {"fragments": 3, "interval": 18, "overlap": 1, "take": "overwrite", "quorum": 1}
    world = World(seed=6, learners=learners, steps=690, piece_values=10_000, merge_ns=200 * MS, **settings)
    world.run()
    in_vain, merged = fates(world, "thin", "bytes"), len(merged_slots(world, "thin"))
    assert in_vain < 0.3 * (in_vain + merged), (in_vain, merged)


def test_end_of_grace__one_that_gives_the_quorum_itself_does_not_come_too_late_in_every_slot() -> None:
    """Grace is a step less 1 ns: its next announcement came 1 ns after it; in seed 631 in 63 slots of 64."""
    slow = LearnerSpec(name="slow", step_ns=400 * MS, jitter=0.0, latency_ns=80 * MS, up_bytes_per_s=86_463)
    fast = LearnerSpec(name="l1", step_ns=50 * MS, jitter=0.0, latency_ns=80 * MS)
    settings: dict[str, Any] = {"fragments": 2, "interval": 2, "overlap": 4, "take": "overwrite", "quorum": 3}
    learners = [slow, fast, replace(fast, name="l2", step_ns=75 * MS, jitter=0.2, latency_ns=MS)]
    world = World(seed=8, learners=learners, steps=139, piece_values=10_000, merge_ns=40 * MS, **settings)
    world.run()
    in_vain, merged = fates(world, "slow", "had closed"), len(merged_slots(world, "slow"))
    assert in_vain < 0.25 * (in_vain + merged), (in_vain, merged)


def test_thin_link__nothing_is_tried_that_cannot_arrive_while_the_link_is_known_to_be_thin() -> None:
    """With one piece "nothing captured for a round" was true at once after each merge: every second try was in vain."""
    slow: dict[str, Any] = {"step_ns": 500 * MS, "up_bytes_per_s": 3_795, "down_bytes_per_s": 12_176, "jitter": 0.02}
    learners = [LearnerSpec(name="l0", step_ns=500 * MS, jitter=0.6), LearnerSpec(name="thin", **slow)]
    settings: dict[str, Any] = {"fragments": 1, "interval": 6, "overlap": 4, "stale_max": 2, "grace_factor": 0.0}
    world = World(seed=7, learners=learners, steps=700, piece_values=10_000, **settings)
    world.run()
    in_vain, merged = fates(world, "thin", "bytes"), len(merged_slots(world, "thin"))
    assert in_vain < 0.2 * merged, (in_vain, merged)


def test_thin_uplink__no_piece_misses_its_chance_for_ever_because_it_was_just_overwritten() -> None:
    """Its update came whenever the uplink was free; a step later another piece had taken the uplink: never merged."""
    spec = LearnerSpec(name="l0", step_ns=100 * MS, jitter=0.02, latency_ns=MS)
    thin = replace(spec, name="thin", latency_ns=20 * MS, up_bytes_per_s=60_054)
    settings: dict[str, Any] = {"fragments": 4, "interval": 4, "overlap": 1, "take": "overwrite"}
    for seed in range(1201, 1209):
        world = World(seed=seed, learners=[spec, thin], steps=234, piece_values=10_000, **settings)
        world.run()
        counts = [len(merged_slots(world, "thin", piece)) for piece in range(4)]
        assert min(counts) >= 5, (seed, counts)


def test_short_rounds__bytes_are_waited_for_at_most_half_a_round() -> None:
    """H = 3 and overlap 4: collecting ends after 1.5 steps, and a learner that counted on 4 was always too late."""
    thin = LearnerSpec(name="thin", up_bytes_per_s=50_000 * 2 / 0.265)
    world = World(seed=5, learners=[*equal(2), thin], fragments=1, interval=3, overlap=4, steps=360)
    world.run()
    assert len(merged_slots(world, "thin")) > 0.3 * world.config.slots


def test_thin_downlink__no_piece_is_fetched_again_and_again_while_others_wait() -> None:
    """A download takes 2.5 slots of 2: the piece at the head of the queue was newer again each time it had come."""
    thin = LearnerSpec(name="thin", down_bytes_per_s=50_000 * 2 / 0.75)
    world = World(seed=6, learners=[*equal(2), thin], fragments=2, interval=6, overlap=2, steps=600)
    world.run()
    counts = [len(merged_slots(world, "thin", piece)) for piece in range(2)]
    assert min(counts) > 0.5 * max(counts), counts


def test_thin_downlink__the_finish_waits_for_updates_that_still_come_down() -> None:
    thin = LearnerSpec(name="thin", down_bytes_per_s=0.2 * 100_000 / 0.3)
    world = World(seed=7, learners=[*equal(2), thin], steps=240)
    world.run()
    assert sum(sum(e.lost) for e in world.records(LifeEndLine)) == 0


def test_seed__one_that_slept_through_it_does_not_send_a_whole_model() -> None:
    slow = LearnerSpec(name="l0", up_bytes_per_s=200_000)
    world = World(seed=8, learners=[slow, *equal(2)[1:]], steps=120, start_wait_ns=1 * S)
    world.at(100 * MS, world.agents["l0"].sleep)
    world.at(8 * S, world.agents["l0"].wake)
    world.run()
    first = min(s.now_ns for s in world.records(SlotLine) if "l0" in {m.name for m in s.merged})
    assert first < 15 * S


def test_mad_learner__alone_in_its_slots_it_does_not_become_the_model() -> None:
    """K = 1 of 2: "more than half of the slot's contributions" was one."""
    world = Spoilt(seed=9, learners=equal(2), quorum=1, steps=240)
    world.spoil = lambda a: (True, True, 1e30 if a.own_step > 100 and a.c_tokens % 2000 else 1.0)
    world.run()


def test_cut_in_the_last_round__it_is_no_death() -> None:
    world = World(seed=10, learners=equal(3, up_bytes_per_s=1e6))
    world.run_until(lambda: world.syncer.core.finish.phase == "final", limit_s=600)
    world.agents["l1"].cut_control()
    world.clock.call_after(1 * S, world.agents["l1"].mend_control)
    world.run()
    assert sum(sum(e.lost) for e in world.records(LifeEndLine)) == 0
    assert {e.reason for e in world.records(LifeEndLine)} == {"finished"}


@pytest.mark.parametrize("lie", LIES)
def test_rogues_are_put_out_and_the_others_go_on(lie: str) -> None:
    world = World(seed=11, learners=equal(2), steps=120)
    rogues: list[Rogue] = []
    world.at(4 * S, lambda: rogues.append(Rogue(world, lie)))
    world.at(20 * S, lambda: rogues[0].hang_up())
    world.run()
    assert sum(sum(e.lost) for e in world.records(LifeEndLine) if not e.name.startswith("rogue")) == 0


def test_rogue__nobody_is_ready_before_version_0_exists() -> None:
    """A report without parameters made a ready learner, and with start_wait = 0 slots began without a model."""
    world = World(seed=12, learners=equal(2, up_bytes_per_s=100_000), steps=60, start_wait_ns=0)
    world.at(1 * S, lambda: Rogue(world, LIES[-1]) and None)
    world.run()
    assert any("before version 0" in notice for notice in world.syncer.notices)
