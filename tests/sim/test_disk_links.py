"""The simulated disk and links themselves: what a crash leaves, what a cut breaks, how rates are shared."""

from __future__ import annotations

import random

import pytest

from atoll.sim.clock import Clock
from atoll.sim.disk import TORN, Disk
from atoll.sim.links import Bulk, Line, Rate, Transfer
from atoll.sim.plan import MS


def run(clock: Clock, until_ns: int = 10**15) -> None:
    while clock.now_ns < until_ns and clock.run_next():
        pass


class TestDisk:
    def test_what_is_synced_outlives_a_crash(self) -> None:
        for seed in range(50):
            clock = Clock()
            disk, done = Disk(clock, MS), []
            disk.append("tape", 1)
            disk.append("tape", 2)
            disk.sync("tape", done.append)
            run(clock)
            disk.append("tape", 3)
            disk.crash(random.Random(seed))
            assert done == [True]
            assert disk.read("tape")[:2] == [1, 2]
            assert disk.read("tape")[2:] in ([], [3], [TORN])

    def test_every_kind_of_loss_happens(self) -> None:
        found = set()
        for seed in range(200):
            disk = Disk(Clock(), MS)
            for block in "abc":
                disk.append("f", block)
            disk.crash(random.Random(seed))
            found.add("".join("?" if block is TORN else block for block in disk.read("f")))
        assert found == {"", "a", "?", "ab", "a?", "abc", "ab?"}

    def test_a_sync_covers_what_was_appended_when_it_began(self) -> None:
        clock = Clock()
        disk, done = Disk(clock, MS), []
        disk.append("f", 1)
        disk.sync("f", done.append)
        disk.append("f", 2)
        run(clock)
        assert (done, disk.safe("f"), disk.read("f")) == ([True], [1], [1, 2])

    def test_a_replaced_file_is_the_old_or_the_new_one(self) -> None:
        clock = Clock()
        disk, done = Disk(clock, MS), []
        disk.replace("f", "old", done.append)
        run(clock)
        disk.replace("f", "new", done.append)
        assert disk.safe("f") == ["old"]
        disk.crash(random.Random(1))
        run(clock)
        assert (disk.read("f"), done) == (["old"], [True]), "a write that was under way at the crash never answers"

    def test_full_and_slow(self) -> None:
        clock = Clock()
        disk, done = Disk(clock, MS), []
        disk.full = True
        disk.replace("f", 1, done.append)
        run(clock)
        disk.full, disk.slow = False, 7.0
        begun_ns = clock.now_ns
        disk.replace("f", 2, done.append)
        run(clock)
        assert (done, disk.read("f"), clock.now_ns - begun_ns) == ([False, True], [2], 7 * MS)


class TestLinks:
    def test_a_held_line_keeps_the_order_and_loses_nothing(self) -> None:
        clock, heard = Clock(), []
        line = Line(clock, 5 * MS)
        line.send(lambda: heard.append(1))
        run(clock)
        line.hold()
        line.send(lambda: heard.append(2))
        line.send(lambda: heard.append(3))
        run(clock)
        assert heard == [1]
        line.release()
        assert heard == [1, 2, 3]

    def test_two_transfers_share_a_link(self) -> None:
        clock, ended = Clock(), []
        rate, bulk = Rate(1000.0), Bulk(clock, lambda: None)
        for _ in range(2):
            bulk.start(Transfer(1000, [rate], lambda t: ended.append(clock.now_ns / 1e9)))
        run(clock)
        assert ended[1] == pytest.approx(2.0, rel=0.2), "2,000 bytes at 1,000 a second"
        assert rate.active == 0

    def test_the_narrowest_link_on_the_way_decides(self) -> None:
        clock, ended = Clock(), []
        bulk = Bulk(clock, lambda: None)
        bulk.start(Transfer(1000, [Rate(10_000.0), Rate(500.0), Rate(0.0)], lambda t: ended.append(clock.now_ns / 1e9)))
        run(clock)
        assert ended == [pytest.approx(2.0)]

    def test_a_cut_breaks_what_is_under_way__a_hold_does_not(self) -> None:
        clock, ended = Clock(), []
        bulk = Bulk(clock, lambda: None)

        def start() -> None:
            bulk.start(Transfer(1000, [Rate(1000.0)], ended.append))

        start()
        run(clock, 300 * MS)
        bulk.hold()
        run(clock)
        assert ended == []
        bulk.release()
        run(clock)
        assert [(t.whole, t.broken) for t in ended] == [(True, False)]
        start()
        run(clock, clock.now_ns + 300 * MS)
        bulk.cut()
        start()
        run(clock)
        assert [(t.whole, t.broken) for t in ended[1:]] == [(False, True), (False, True)]
        assert 0 < ended[1].moved_bytes < 1000
        bulk.mend()
        start()
        run(clock)
        assert ended[3].whole
