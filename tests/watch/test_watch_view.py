"""The read model, what it warns of and what it tells, against tapes of virtual worlds."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from atoll.core.causes import _CAUSES, with_cause
from atoll.core.records import FateLine, Record, SlotLine
from atoll.sim.draw import draw
from atoll.sim.faults import FaultWorld
from atoll.sim.plan import MS, LearnerSpec, S
from atoll.sim.world import World
from atoll.watch.history import Part, SlotRow
from atoll.watch.judge import NOTHING_CAME, advice, findings, reason_of
from atoll.watch.live import LiveView
from atoll.watch.live import draw as draw_picture
from atoll.watch.status import status
from atoll.watch.story import story
from atoll.watch.summary import fold, summarise
from atoll.watch.view import RunView
from atoll.watch.window import agreement, window
from tests.watch.worlds import equal, tape_of, world


def text_of(view: RunView, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(draw_picture(status(view), "", width))
    return console.export_text()


# ------------------------------------------------------------ any run


@pytest.mark.parametrize("seed", range(12))
def test_view__is_never_at_a_loss(seed: int) -> None:
    """Any faults, any moment: status, findings and story can be told, and nothing is out of range."""
    found = FaultWorld(draw(seed))
    found.run_plan()
    view = RunView()
    for index, line in enumerate(tape_of(found)):
        view.feed(line)
        if index % 37 == 0:
            check(view)
    check(view)
    assert text_of(view, 80)


def check(view: RunView) -> None:
    now = status(view)
    assert 0 <= now.progress <= 1
    assert now.kept is None or 0 <= now.kept <= 1
    assert all(row.merged is None or 0 <= row.merged <= 1 for row in now.learners)
    assert all(row.lag_slots is None or 0 <= row.lag_slots <= now.slot for row in now.learners)
    assert all(finding.text for finding in findings(view))
    assert story(view).headline
    assert 1 <= len(advice(view)) <= 3


def test_view__incremental_and_whole_are_the_same() -> None:
    lines = tape_of(world(equal(3)))
    view = RunView()
    for line in lines:
        view.feed(line)
    assert status(view) == status(fold(lines))
    assert summarise(view) == summarise(fold(lines))


def test_history__adds_up_to_the_tape() -> None:
    found = world([*equal(2), LearnerSpec(name="slow", step_ns=400 * MS)])
    view = fold(tape_of(found))
    slots = [line for line in found.records(SlotLine) if line.slot <= found.config.slots]
    rows = [row for row in view.history.slots.values() if view.regular(row.slot)]
    assert len(rows) == len(slots)
    assert sum(len(row.merged) for row in rows) == sum(len(line.merged) for line in slots)
    for name in ("l0", "l1", "slow"):
        share = view.by_learner[name]
        pairs = [view.history.pairs[name, piece] for piece in range(4)]
        assert sum(pair.total for pair in pairs) == share.total
        assert sum(pair.slots for pair in pairs) == share.slots


def test_losses__are_means_between_points() -> None:
    view = fold(tape_of(world(equal(2))))
    points = view.history.losses(10)
    assert 10 <= len(points) <= 20
    assert all(loss == pytest.approx(1.0 / view_tokens(view), rel=1e-6) for _, _, loss in points)


def view_tokens(view: RunView) -> float:
    """Stand-ins have a loss of 1.0 per step."""
    return view.tokens / view.loss_sum


# ------------------------------------------------------------ words


def test_story__says_who_was_lost_when_and_how_it_came_back() -> None:
    made = World(seed=5, learners=equal(3), fragments=4, interval=8, steps=160)
    made.at(6 * S, lambda: made.crash("l1", back_after_ns=3 * S))
    made.run()
    told = story(fold(tape_of(made)))
    assert told.headline.endswith("Lost and back: l1.")
    mine = next(line for line in told.learners if line.startswith("l1:"))
    assert re.search(r"Lost 6 s into the run \(stream closed\) and was back after 3\.\d s as a new process\.", mine)
    assert all("Lost" not in line for line in told.learners if not line.startswith("l1:"))


def test_status__tells_what_the_slot_in_progress_waits_for() -> None:
    lines = tape_of(world([*equal(2), LearnerSpec(name="slow", step_ns=900 * MS)], quorum=3))
    view, seen = RunView(), set()
    for line in lines:
        view.feed(line)
        seen |= set(status(view).slots_now)
    waits = re.compile(r"slot \d+ \(fragment \d\) is open: 2 of 3 there; steps to go: slow \d")
    assert any(map(waits.fullmatch, seen))
    assert any("collected and merged" in said for said in seen)
    assert any("waits up to" in said or "slots begin when" in said for said in seen)


# ------------------------------------------------------------ warnings


def test_status__of_a_run_that_is_over_has_its_mean_speed_and_each_learners_last() -> None:
    found = world([*equal(2), LearnerSpec(name="slow", step_ns=400 * MS)])
    view = fold(tape_of(found))
    now, summary = status(view), summarise(view)
    assert now.phase == "over"
    assert now.tokens_per_s == pytest.approx(summary["tokens_per_s"])
    quick, _, slow = now.learners
    assert quick.step_s is not None
    assert slow.step_s == pytest.approx(4 * quick.step_s, rel=0.1)


def test_finding__a_learner_unmerged_for_long_with_its_reason() -> None:
    thin = LearnerSpec(name="thin", up_bytes_per_s=20_000)
    made = world([*equal(2), thin], piece_values=10_000, overlap=1, steps=400)
    view, kinds = RunView(), set()
    texts = []
    for line in tape_of(made):
        view.feed(line)
        for finding in findings(view):
            kinds.add(finding.kind)
            texts.append(finding.text)
    assert "unmerged" in kinds
    assert any(text.startswith("thin was not merged for") and "uplink is too slow" in text for text in texts), texts[:3]


HEALTHY = {
    "two": equal(2),
    "four": equal(4),
    "one is slow": [*equal(2), LearnerSpec(name="slow", step_ns=400 * MS)],
    "one is late": [*equal(2), LearnerSpec(name="late", joins_at_ns=5 * S)],
    "all but one are late": [*equal(1), *(LearnerSpec(name=f"late{i}", joins_at_ns=(3 + i) * S) for i in range(3))],
}


@pytest.mark.parametrize("fragments", [1, 4, 8])
@pytest.mark.parametrize("who", HEALTHY)
def test_finding__work_that_is_on_its_way_is_no_waste(who: str, fragments: int) -> None:
    """At no moment: not at the start, not when one has joined."""
    view = RunView()
    for line in tape_of(world(HEALTHY[who], fragments=fragments, interval=24, steps=240)):
        view.feed(line)
        if isinstance(line, SlotLine):
            wasted = [finding.text for finding in findings(view) if finding.kind == "yield"]
            assert not wasted, (view.slots_closed, wasted)


def test_finding__waste() -> None:
    thin = [LearnerSpec(name=name, up_bytes_per_s=20_000) for name in ("a", "b")]
    view, texts = RunView(), []
    for line in tape_of(world([*equal(1), *thin], piece_values=10_000, overlap=1, steps=400)):
        view.feed(line)
        texts += [finding.text for finding in findings(view) if finding.kind == "yield"]
    assert any(re.match(r"only \d+% of what was computed in the last \d+ slots was merged; ", text) for text in texts)


def test_finding__the_same_single_learner_fills_slot_after_slot() -> None:
    slow = [LearnerSpec(name=name, step_ns=8000 * MS) for name in ("a", "b")]
    made = world([*equal(1), *slow], quorum=1, grace_factor=0.0, steps=400)
    view, texts = RunView(), []
    for line in tape_of(made):
        view.feed(line)
        texts += [finding.text for finding in findings(view) if finding.kind == "alone"]
    assert any(re.match(r"only l0 is merged in the last \d+ slots, with [23] ready; ", text) for text in texts)


def outer(step_norm: float) -> RunView:
    """A run whose outer steps are so many times the merged delta."""
    lines: list[Record] = []
    for line in tape_of(world(equal(3))):
        if isinstance(line, SlotLine) and line.merged:
            line = replace(line, delta_norm=1.0, step_norm=step_norm, follows=0.5)
        lines.append(line)
    return fold(lines)


def test_finding__effective_outer_step_high() -> None:
    assert not [f for f in findings(outer(1.4)) if f.kind == "outer step"]
    (found,) = [f for f in findings(outer(4.0)) if f.kind == "outer step"]
    assert found.text.startswith("the outer step is 4.0 times the merged delta")
    assert advice(outer(4.0))[0].kind == "outer step"


def test_advice__where_nothing_is_wrong_it_says_so_with_figures() -> None:
    (found,) = advice(outer(1.4))
    assert found.kind == "good"
    assert found.text.startswith("no setting to change: participation ")
    assert "outer step over merged delta 1.40 (good up to 2.5)" in found.text


@pytest.mark.parametrize(
    ("merge", "agrees", "kind"),
    [("rda", 0.1, "rda"), ("rda", 0.5, "good"), ("average", 0.1, "good"), ("rda", 0.01, "agreement")],
)
def test_advice__rda_of_learners_that_hardly_agree(merge: str, agrees: float, kind: str) -> None:
    cosine = ((1 + 2 * agrees) / 3) ** 0.5
    lines = [
        replace(line, merged=tuple(replace(part, cosine=cosine) for part in line.merged))
        if isinstance(line, SlotLine)
        else line
        for line in tape_of(world(equal(3), merge=merge))
    ]
    (found,) = advice(fold(lines))
    assert found.kind == kind
    assert kind != "rda" or "have a cosine of 0.10; RDA keeps their full length" in found.text


def test_reason__that_a_run_ends_is_none_that_a_setting_could_change() -> None:
    lines = tape_of(world(equal(3)))
    fate = next(line for line in lines if isinstance(line, SlotLine))
    ends = [FateLine(fate.now_ns, 9, 1, "l0", 1, seq, 100, "missed", "the run is ending") for seq in range(9)]
    assert reason_of(fold([*lines, *ends]), "l0") == NOTHING_CAME
    closed = FateLine(fate.now_ns, 9, 1, "l0", 1, 9, 100, "missed", "slot 9 had closed")
    assert reason_of(fold([*lines, *ends, closed]), "l0") == f"mostly because {with_cause('slot # had closed')}"


@pytest.mark.parametrize("seed", range(12))
def test_advice__what_is_called_well_is_within_its_bounds(seed: int) -> None:
    """At any moment of any run."""
    fault_world = FaultWorld(draw(seed))
    fault_world.run_plan()
    view = RunView()
    for line in tape_of(fault_world):
        view.feed(line)
        for found in advice(view) if isinstance(line, SlotLine) else ():
            if found.kind == "good":
                for value, words, bound in re.findall(r"(-?[\d.]+) \(good (from|up to) ([\d.]+)", found.text):
                    low, high = (bound, value) if words == "from" else (value, bound)
                    assert float(low) <= float(high), found.text


def test_advice__too_early() -> None:
    (found,) = advice(RunView())
    assert found.kind == "early"


@pytest.mark.parametrize("merge", ["rda", "average"])
@pytest.mark.parametrize("seed", range(8))
def test_agreement__is_that_of_the_contributions_themselves(merge: str, seed: int) -> None:
    """Of very unequal weights and lengths, in one tensor, where it is exact."""
    chance = torch.Generator().manual_seed(seed)
    common, rows, pairs = torch.randn(200, generator=chance), [], []
    for slot in range(4):
        count = 2 + slot % 3
        weights = 10 ** (2 * torch.rand(count, generator=chance, dtype=torch.float64))
        deltas = (common + 2 * torch.randn(count, 200, generator=chance)).double()
        deltas *= 10 ** torch.rand(count, 1, generator=chance, dtype=torch.float64)
        units = deltas / deltas.norm(dim=1, keepdim=True)
        merged = (weights[:, None] * (units if merge == "rda" else deltas)).sum(0)
        cosines = torch.nn.functional.cosine_similarity(deltas, merged[None], dim=1)
        row = SlotRow(slot + 1, 0)
        row.merged = tuple(
            Part(f"l{i}", 1, float(weights[i]), float(deltas[i].norm()), float(cosines[i])) for i in range(count)
        )
        rows.append(row)
        share = weights * (1 if merge == "rda" else deltas.norm(dim=1))
        share /= share.sum()
        pairs += [(float(share[i] * share[j]), float(units[i] @ units[j])) for i in range(count) for j in range(i)]
    true = sum(weight * cosine for weight, cosine in pairs) / sum(weight for weight, _ in pairs)
    assert agreement(rows, merge) == pytest.approx(true, abs=1e-9)


def test_agreement__of_single_contributions_is_none() -> None:
    row = SlotRow(1, 0)
    row.merged = (Part("a", 1, 1.0, 1.0, 1.0),)
    assert agreement([row], "rda") is None


def test_window__of_no_slots_is_all_none() -> None:
    found = window(RunView())
    assert found.rows == []
    assert found.participation is None
    assert found.slot_ns is None


def test_remedies__are_for_reasons_that_the_core_gives() -> None:
    """A reason that is worded anew in the core would lose its remedy without a word."""
    given: set[str] = set()
    for seed in range(60):
        found = FaultWorld(draw(seed))
        found.run_plan()
        given |= {words for line in found.records(FateLine) for words in _CAUSES if words in line.reason}
        if given == _CAUSES.keys():
            return
    raise AssertionError(_CAUSES.keys() - given)


# ------------------------------------------------------------ pictures


@pytest.mark.parametrize("width", [40, 80, 200])
def test_live__every_line_fits(width: int) -> None:
    view = fold(tape_of(world([*equal(3), LearnerSpec(name="a-learner-with-a-long-name", step_ns=400 * MS)]))[:900])
    text = text_of(view, width)
    assert max(map(len, text.splitlines())) <= width
    assert "l0" in text


def test_live__redraws_now_and_then_and_says_lines_above() -> None:
    now = [0.0]
    console = Console(width=100, record=True, force_terminal=True, file=io.StringIO())
    live = LiveView(console, clock=lambda: now[0])
    with live:
        for line in tape_of(world(equal(2))):
            now[0] += 0.01
            live.feed(line)
    assert "learner l0 is ready" in console.export_text()
    assert live.view.phase == "over"
