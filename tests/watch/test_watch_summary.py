"""summary.json and the console lines against a small tape that was counted by hand."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.config import RunConfig
from atoll.core.records import (
    ClosedLine,
    FateLine,
    LifeEndLine,
    MemberLine,
    Merge1,
    NoticeLine,
    PhaseLine,
    PublishedLine,
    ReportLine,
    RunLine,
    SlotLine,
    StartLine,
)
from atoll.watch.lines import ConsoleLines
from atoll.watch.summary import fold, summarise
from atoll.watch.tallies import RecentLoss, Union
from atoll.watch.view import RunView

SECOND = 1_000_000_000
A, B = 1, 2


def merge1(name, generation, c_tokens):
    return Merge1(name, generation, 1, (0, 0), 2, c_tokens, 2, 1.0, "h", 1.0)


def slot_line(now, slot, piece, n, *merged):
    return SlotLine(now * SECOND, slot, piece, (0, n - 1), (0, n), merged, "t", "m", "u", 1.0, 0, 0)


def closed(now, slot, piece, ready):
    return ClosedLine(now * SECOND, slot, piece, "no grace", 0, ready, ready, ())


def report(now, name, generation, steps, tokens, loss_sum):
    return ReportLine(now * SECOND, name, generation, steps, tokens, loss_sum, 0)


def ready(now, name, generation, before="joining"):
    return MemberLine(now * SECOND, name, generation, before, "ready", "reported")


def end(now, name, generation, steps, tokens, loss_sum, merged, overwritten, lost, **timers):
    blocked = (("finish", SECOND // 2), ("capture", SECOND // 4))
    return LifeEndLine(
        now * SECOND, name, generation, "finished", steps, tokens, loss_sum, merged, overwritten, lost, blocked,
        0, timers.get("step_max", SECOND // 8), SECOND,
    )  # fmt: skip


def tape():
    """Two pieces of 30 and 10 values, 4 regular slots of one step, learners a and b; b goes idle after slot 2."""
    config = RunConfig(run_id="r", steps=4, fragments=2, interval=2, learners=2, seed=9)
    yield RunLine(1, 0, "now", config.to_dict(), "f", (30, 10), {"atoll": "0"}, ())
    yield ready(1, "a", A)
    yield report(1, "a", A, 0, 0, 0.0)
    yield ready(1, "b", B)
    yield report(1, "b", B, 0, 0, 0.0)
    yield StartLine(1 * SECOND, ("a", "b"), "all")
    yield PhaseLine(1 * SECOND, "running", 0, "all")
    yield report(2, "a", A, 1, 100, 300.0)
    yield report(2, "b", B, 1, 100, 500.0)
    yield closed(2, 1, 1, 2)
    yield slot_line(2, 1, 1, 1, merge1("a", A, 100), merge1("b", B, 100))
    yield PublishedLine(2 * SECOND, 1, 1, (0, 1))
    yield report(3, "a", A, 2, 200, 500.0)
    yield closed(3, 2, 0, 2)
    yield slot_line(3, 2, 0, 1, merge1("a", A, 200))
    yield PublishedLine(3 * SECOND, 2, 0, (0, 1))
    yield MemberLine(4 * SECOND, "b", B, "ready", "idle", "no step")
    yield FateLine(4 * SECOND, 3, 1, "b", B, 2, 100, "missed", "late")
    yield closed(4, 3, 1, 1)
    yield SlotLine(4 * SECOND, 3, 1, (0, 1), (0, 1), (), "", "", "", 0.0, 0, 0)
    yield report(5, "a", A, 3, 300, 600.0)
    yield closed(5, 4, 0, 1)
    yield slot_line(5, 4, 0, 2, merge1("a", A, 100), merge1("b", B, 100))
    yield PublishedLine(5 * SECOND, 4, 0, (0, 2))
    yield PhaseLine(5 * SECOND, "draining", 4, "done")
    yield closed(6, 5, 1, 1)
    yield slot_line(6, 5, 1, 2, merge1("a", A, 200))
    yield PublishedLine(6 * SECOND, 5, 1, (0, 2))
    yield end(7, "a", A, 3, 300, 600.0, (300, 300), (0, 0), (0, 0))
    yield end(7, "b", B, 1, 100, 500.0, (100, 100), (0, 0), (0, 0), step_max=SECOND)


def test_summary__equals_what_was_counted_by_hand():
    summary = summarise(fold(tape()), eval_loss=2.5, extra={"model": "tiny", "yield": "no"})
    assert (summary["mode"], summary["learners"], summary["seed"]) == ("decoupled", 2, 9)
    assert (summary["slots"], summary["steps"], summary["learner_steps"], summary["wall_s"]) == (4, 4, 4, 7.0)
    assert summary["tokens"] == {"computed": 400, "merged": 400.0, "overwritten": 0, "lost": 0, "pending": 0}
    assert summary["token_pieces"]["computed"] == 800
    assert summary["yield"] == 1.0
    assert summary["tokens_per_s"] == 400 / 4
    part = summary["participation"]
    assert part["mean"] == (1 + 0.5 + 0 + 1) / 4
    assert part["lowest_fragment"] == {"fragment": 1, "value": 0.5}
    # b was ready at slots 1 and 2 and merged, though idle, in 4: in 2 of 3. a: merged in 1, 2 and 4 of 4.
    assert part["lowest_learner"] == {"learner": "b", "value": 2 / 3}
    assert part["learners"]["a"] == 3 / 4
    assert summary["blocked_s"] == {"parameters": 0.0, "lock": 0.0, "finish": 1.0}
    assert summary["copy_s"] == {"capture": 0.5, "take": 0.0}
    assert summary["step_max_s"] == 1.0
    assert summary["training_uptime"] == 1.0
    assert summary["merge_uptime"] == 1.0
    # The last tenth of 400 tokens is 40 of a's last 100, at a mean loss of 1.
    assert summary["train_loss"] == pytest.approx(1.0)
    assert summary["eval_loss"] == 2.5
    assert summary["model"] == "tiny"
    assert summary["contributions"] == {"missed": 1, "refused": 0}
    assert summary["piece_versions"] == [[0, 2], [0, 2]]
    assert summary["versions"] == {"atoll": "0"}


def test_summary__is_the_same_from_jsonl_dicts_and_skips_unknown_kinds():
    lines = [{"kind": type(r).__name__.lower(), "i": i, **dataclasses.asdict(r)} for i, r in enumerate(tape())]
    lines = [msgspec.json.decode(msgspec.json.encode(line)) for line in lines]
    lines.insert(5, {"kind": "fromthefuture", "i": 5, "now_ns": 5})
    assert summarise(fold(lines)) == summarise(fold(tape()))
    json.dumps(summarise(fold(lines)))


def test_summary__of_a_run_whose_syncer_died_keeps_the_rest_pending():
    lines = [line for line in tape() if not isinstance(line, LifeEndLine)]
    tokens = summarise(fold(lines))["token_pieces"]
    assert tokens == {"computed": 800, "merged": 800, "overwritten": 0, "lost": 0, "pending": 0}
    shorter = [line for line in lines if line.now_ns < 5 * SECOND]
    books = summarise(fold(shorter))
    # a: 200 tokens, merged 200 of piece 0 and 100 of piece 1. b: 100, merged 0 and 100.
    assert books["token_pieces"] == {"computed": 600, "merged": 400, "overwritten": 0, "lost": 0, "pending": 200}
    assert books["tokens"]["pending"] == (30 * 100 + 10 * 100) / 40


@pytest.mark.parametrize("count", range(40))
def test_summary__of_any_beginning_of_a_tape_is_well_formed(count):
    summary = summarise(fold(list(tape())[:count]))
    pieces = summary["token_pieces"]
    assert pieces["computed"] == sum(pieces[fate] for fate in ("merged", "overwritten", "lost", "pending"))
    assert set(summary) == set(summarise(fold(tape())))
    json.dumps(summary, allow_nan=False)


def test_training_uptime__a_long_pause_is_not_stepping():
    view = RunView()
    lines = list(tape())[:7]
    lines += [report(1 + k, "a", A, k, 100 * k, 0.0) for k in range(1, 11)]
    lines += [report(111, "a", A, 11, 1100, 0.0)]
    for line in lines:
        view.feed(line)
    assert view.stepping.length == (10 + 5) * SECOND  # a lease is 5 s, 4 steps are 4
    assert summarise(view)["training_uptime"] == 15 / 110


def test_merge_uptime__a_gap_of_more_than_ten_slot_times_counts_whole():
    def run(gap):
        lines = list(tape())[:7]
        times = [*range(2, 42), 41 + gap, 42 + gap]
        for slot, now in enumerate(times, 1):
            lines.append(PublishedLine(now * SECOND, 1 + slot % 4, 0, (0, slot)))
        return summarise(fold([*lines, report(42 + gap, "a", A, 1, 1, 0.0)]))["merge_uptime"]

    assert run(5) == 1.0
    assert run(20) == pytest.approx(41 / 61)


def test_merge_uptime__nothing_published_is_zero():
    assert summarise(fold(list(tape())[:9]))["merge_uptime"] == 0.0


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 9)), min_size=1, max_size=60))
def test_recent_loss__equals_the_mean_of_the_last_tenth(samples):
    recent, single = RecentLoss(), []
    for tokens, loss in samples:
        recent.add(tokens, tokens * loss)
        single += [loss] * tokens
    wanted = 0.1 * len(single)
    total = sum(single[::-1][: int(wanted)])
    if int(wanted) < wanted:
        total += (wanted - int(wanted)) * single[::-1][int(wanted)]
    assert recent.mean == pytest.approx(total / wanted, rel=1e-6, abs=1e-9)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=40))
def test_union__equals_a_set_of_instants(spans):
    union, instants = Union(), set()
    for stop, length in sorted(spans):
        union.add(stop - length, stop)
        instants |= set(range(stop - length, stop))
    assert union.length == len(instants)


def test_console__one_line_per_interval_and_what_happens_to_members():
    console = ConsoleLines()
    said = [line for record in tape() for line in console.feed(record)]
    intervals = [line for line in said if "slot" in line and "%" in line[:5]]
    assert len(intervals) == 2
    assert intervals[0].startswith(" 50%  slot 2/4  loss 3.333  150 tokens/s  ready 2 of 2  participation 75%  merged")
    assert intervals[0].endswith("  merged 67%  grace 0 ms, merge 0 ms")
    assert "learner a is ready; waiting for 1 more learner" in said
    assert "learner b is ready" in said
    assert "slots begin with 2 learners ready" in said
    assert any("b is idle (no step)" in line for line in said)
    assert any("last slot, 4, has closed" in line for line in said)


def test_console__a_lost_learner_and_its_return_are_said():
    console = ConsoleLines()
    for record in list(tape())[:9]:
        console.feed(record)
    lost = console.feed(MemberLine(3 * SECOND, "b", B, "ready", "away", "stream closed"))
    assert lost == ["learner b is lost (stream closed)"]
    over = LifeEndLine(3 * SECOND, "b", B, "replaced", 1, 100, 1.0, (0, 100), (0, 0), (100, 0), (), 0, 0, 0)
    assert console.feed(over) == [
        "learner b did 1 step in this life (replaced); 75 of its 100 tokens are lost"  # three quarters of the model
    ]
    assert console.feed(ready(4, "b", 3)) == ["learner b is back"]
    assert console.feed(NoticeLine(4 * SECOND, "look")) == ["notice: look"]


def test_console__a_life_that_ends_is_said_at_once_and_that_nobody_is_left():
    console = ConsoleLines()
    for record in list(tape())[:9]:
        console.feed(record)
    left = MemberLine(3 * SECOND, "a", A, "ready", "ended", "interrupted: KeyboardInterrupt")
    assert console.feed(left) == ["learner a has left (interrupted: KeyboardInterrupt)"]
    assert console.feed(MemberLine(4 * SECOND, "b", B, "ready", "away", "silent")) == [
        "learner b is lost (silent)",
        "no learner is left; waiting for one to join",
    ]
    assert console.feed(MemberLine(5 * SECOND, "b", B, "away", "ended", "lease")) == ["learner b has left (lease)"]


def test_console__learners_that_nobody_expected_count_and_an_empty_interval_has_no_loss():
    config = RunConfig(run_id="r", steps=2, fragments=1, interval=1, learners=1)
    console = ConsoleLines()
    lines = [
        RunLine(1, 0, "now", config.to_dict(), "f", (30,), {}, ()),
        ready(1, "a", A),
        StartLine(1 * SECOND, ("a",), "all expected learners are ready"),
        PhaseLine(1 * SECOND, "running", 0, "all"),
        ready(1, "b", B),
        closed(2, 1, 0, 2),
        SlotLine(2 * SECOND, 1, 0, (0, 0), (0, 0), (), "", "", "", 0.0, 0, 0),
    ]
    said = [line for record in lines for line in console.feed(record)]
    assert "slots begin with 1 learner ready" in said
    assert said[-1] == (
        " 50%  slot 1/2  no new steps  ready 2 of 2  participation 0%  merged 0%  grace 0 ms, merge 0 ms"
    )
