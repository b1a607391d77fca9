"""Refused, missed, lost and oddly counted work is seen in status, report and advise, with reason and likely cause."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from atoll.cli.main import main
from atoll.core import events as ev
from atoll.core.causes import _CAUSES, FAR_NORM, FIRST_AWAITED, larger_quorum
from atoll.core.config import RunConfig
from atoll.core.layout import TensorSpec, make_layout
from atoll.core.messages import PROTOCOL_VERSION, Heartbeat, Hello
from atoll.core.records import FateLine, GrantLine, LifeEndLine, NoticeLine, Record, ReportLine, SeedLine, SlotLine
from atoll.core.syncer import Syncer
from atoll.errors import ConfigError
from atoll.launch.plan import Method, method_settings
from atoll.sim.plan import S
from atoll.sim.world import World
from atoll.watch import judge
from atoll.watch.judge import advice, findings
from atoll.watch.status import status
from atoll.watch.summary import fold
from tests.watch.worlds import equal, tape_of, world, write_tape

FAR = f"norm 31 {FAR_NORM}"


@pytest.fixture(scope="module")
def tape() -> list[Record]:
    return tape_of(world(equal(3)))


def generation_of(tape: list[Record], name: str) -> int:
    return next(line.generation for line in tape if isinstance(line, ReportLine) and line.name == name)


def with_fates(tape: list[Record], count: int, fate: str, reason: str, c_tokens: int = 1000) -> list[Record]:
    """The same with so many fates of l1, each of another piece, in the middle of it."""
    half = len(tape) // 2
    now_ns, life = tape[half].now_ns, generation_of(tape, "l1")
    fates = [FateLine(now_ns, 9, i % 4, "l1", life, 900 + i, c_tokens, fate, reason) for i in range(count)]
    return [*tape[:half], *fates, *tape[half:]]


def refused(tape: list[Record]) -> list[Record]:
    return with_fates(tape, 4, "refused", FAR)


def missed_round(tape: list[Record]) -> list[Record]:
    return with_fates(tape, 4, "missed", "slot 9 had closed")


def other_units(tape: list[Record]) -> list[Record]:
    def more(line: Record) -> Record:
        mine = isinstance(line, ReportLine | LifeEndLine) and line.name == "l1"
        return replace(line, tokens=64 * line.tokens) if mine else line

    return [more(line) for line in tape]


def left(tape: list[Record]) -> list[Record]:
    def gone(line: Record) -> Record:
        if not (isinstance(line, LifeEndLine) and line.name == "l1"):
            return line
        lost = tuple(tokens // 2 for tokens in line.merged)
        kept = tuple(tokens - gone for tokens, gone in zip(line.merged, lost, strict=True))
        return replace(line, reason="closed by its script", lost=lost, merged=kept)

    return [gone(line) for line in tape]


TOLD = {
    refused: r"4 contributions of l1 refused, \d\.\d% of what these lives computed; the last: norm 31 is far above "
    r"all that is usual on this fragment \(bursts of its gradients: clip them; or another learning rate than ",
    missed_round: r"l1 missed a whole round: each fragment once, and nothing was merged meanwhile; the last: slot 9 "
    r"had closed \(its link or its steps are too slow for the run's pace: raise `interval`\)",
    other_units: r"l1 counts 64000 tokens per step, the others 1000: tokens are the weight in the merge, so if",
    left: r"l1 ended before the run \(closed by its script\) with 50\.0% of its work not merged: [\d,]+ of [\d,]+ ",
}


@pytest.mark.parametrize("trouble", TOLD, ids=lambda trouble: trouble.__name__)
def test_trouble__is_in_status_report_and_advise(tape: list[Record], tmp_path: Path, trouble, capsys) -> None:
    lines = trouble(tape)
    told = re.compile(TOLD[trouble])
    view = fold(lines)
    assert any(map(told.search, status(view).warnings)), status(view).warnings
    assert any(told.search(found.text) for found in advice(view))
    run = write_tape(tmp_path / "run", lines)
    assert main(["advise", str(run)]) == 0
    assert told.search(capsys.readouterr().out)
    assert main(["status", str(run), "--json"]) == 0
    assert main(["report", str(run)]) == 0
    assert told.search((run / "report.html").read_text().replace("&#x27;", "'"))


def test_trouble__of_a_good_run_there_is_none(tape: list[Record]) -> None:
    assert {found.kind for found in findings(fold(tape))} & {"refused", "units", "missed round", "left"} == set()


def test_left__by_a_learner_that_is_back_is_of_an_earlier_life_and_needs_no_setting() -> None:
    made = World(seed=5, learners=equal(3), fragments=4, interval=8, steps=160)
    made.at(6 * S, lambda: made.crash("l1", back_after_ns=3 * S))
    made.run()
    kinds = {found.kind: found.text for found in advice(fold(tape_of(made)))}
    assert set(kinds) == {"left", "good"}
    assert kinds["left"].startswith("an earlier life of l1 ended before the run (replaced) with ")


@pytest.mark.parametrize("count", [1, 3])
def test_missed__is_told_only_of_a_whole_round(tape: list[Record], count: int) -> None:
    lines = with_fates(tape, count, "missed", "slot 9 had closed")
    assert "missed round" not in {found.kind for found in findings(fold(lines))}


def test_missed__a_merge_in_between_begins_the_round_anew(tape: list[Record]) -> None:
    lines, life = list(tape), generation_of(tape, "l1")
    for where, pieces in ((len(tape) // 2, (2, 3)), (len(tape) // 4, (0, 1))):  # l1 is merged in each slot between
        now_ns = lines[where].now_ns
        missed = (FateLine(now_ns, 9, p, "l1", life, 900 + p, 100, "missed", "slot 9 had closed") for p in pieces)
        lines[where:where] = missed
    assert "missed round" not in {found.kind for found in findings(fold(lines))}


def test_missed__at_the_end_of_a_run_is_no_trouble(tape: list[Record]) -> None:
    assert "missed round" not in {f.kind for f in findings(fold(with_fates(tape, 4, "missed", "the run is ending")))}


def test_trouble__is_told_before_there_is_enough_to_judge_settings(tape: list[Record]) -> None:
    first = next(i for i, line in enumerate(tape) if isinstance(line, ReportLine) and line.name == "l1")
    now_ns = tape[first].now_ns
    life = generation_of(tape, "l1")
    view = fold([*tape[: first + 1], FateLine(now_ns, 1, 1, "l1", life, 1, 100, "refused", "it is not finite")])
    assert [found.kind for found in findings(view)] == ["refused"]
    assert "look at its data" in advice(view)[0].text


def test_troubles__of_many_learners_are_counted() -> None:
    lines = tape_of(world(equal(9)))
    now_ns, life = lines[-1].now_ns, 7
    fates = [FateLine(now_ns, 9, 1, f"l{i}", life, 900, 100, "refused", FAR) for i in range(9)]
    told = [found.text for found in findings(fold([*lines, *fates])) if found.kind == "refused"]
    assert len(told) == 4
    assert told[-1] == "the same of 6 more learners: see the report"


# ---------------------------------------------------------------- advice that can be followed


def test_advice__names_only_settings_that_there_are() -> None:
    """What cannot be set was recommended: grace_factor and stale_max are no options of any command."""
    code = Path(judge.__file__).read_text().partition('"""')[2].partition('"""')[2]
    known = {field.name for field in fields(Method)} | {"learner.progress", "step(tokens)", "advise", "advice"}
    for text in (*_CAUSES.values(), code):
        named = set(re.findall(r"`([^`\s]+)`", text))
        assert named <= known, named - known


@pytest.mark.parametrize(("learners", "quorum"), [(1, 1), (2, 1), (2, 2), (4, 3), (4, 4)])
def test_advice__a_larger_quorum_is_taken_as_it_is_told(learners: int, quorum: int) -> None:
    """`--quorum 2` was recommended, and refused because of `--min-ready 1`."""
    config = RunConfig(run_id="r", steps=24, interval=8, fragments=4, learners=learners)
    words = larger_quorum(config, quorum).split()
    told = {name.lstrip("-").replace("-", "_"): int(value) for name, value in zip(words[::2], words[1::2], strict=True)}
    expected = told.get("min_ready", learners)
    assert told["quorum"] == quorum + 1
    settings = method_settings(
        Method(quorum=told["quorum"]), steps=24, learners=expected, run_id="r", counted_as="min_ready"
    )
    assert settings["quorum"] == quorum + 1


def test_quorum__above_what_is_expected_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="quorum=2 must be between 1 and min_ready=1; raise min_ready with it"):
        method_settings(Method(quorum=2), steps=24, learners=1, run_id="r", counted_as="min_ready")


# ---------------------------------------------------------------- who is awaited


def before_version_0(lines: list[Record]) -> list[Record]:
    return lines[: next(i for i, line in enumerate(lines) if isinstance(line, SeedLine))]


def test_status__says_who_is_to_hand_in_version_0(tape: list[Record]) -> None:
    waiting = before_version_0(tape)
    assert status(fold(waiting[:1])).slots_now == ["the first parameters of the model are awaited: no learner is there"]
    first = next(i for i, line in enumerate(waiting) if isinstance(line, GrantLine))
    [told] = status(fold(waiting[: first + 1])).slots_now
    assert told == "the first parameters of the model are awaited from l0"
    [told] = status(fold(waiting)).slots_now
    assert told == "the first parameters of the model are awaited from one of l0, l1, l2"
    assert "awaited" not in str(status(fold(tape[: len(waiting) + 1])).slots_now)


def test_status__of_a_seeder_that_hands_nothing_in_says_what_the_syncer_says(tape: list[Record]) -> None:
    """The words are the core's: where they change, this must."""
    specs = [TensorSpec("t", (10,), "float32")]
    layout = make_layout(specs, 1)
    core = Syncer(RunConfig(run_id="r", steps=8, fragments=1, interval=4, learners=2), layout)
    core.handle(ev.Started(1, has_init=False), now_ns=0)
    for stream, name in ((1, "a"), (2, "b")):
        hello = Hello(PROTOCOL_VERSION, "", name, 0, layout.fingerprint, layout.tensors())
        core.handle(ev.StreamOpened(stream, hello), now_ns=0)
    actions = []
    for second in range(1, 12):
        for stream in (1, 2):
            actions += core.handle(ev.Received(stream, Heartbeat(0, False)), now_ns=second * S)
    notices = [action for action in actions if isinstance(action, ev.Notice) and FIRST_AWAITED in action.text]
    notice = NoticeLine(0, notices[0].text)
    [told] = status(fold([*before_version_0(tape), notice])).slots_now
    assert told == notice.text


def test_a_tape_that_does_not_grow__is_told_while_learners_are_ready(tape: list[Record], tmp_path: Path) -> None:
    cut = next(i for i, line in enumerate(tape) if isinstance(line, SlotLine) and line.slot == 2)
    running = fold(tape[:cut])
    assert running.ready()
    for silent_s, told in ((1.0, False), (60.0, True)):
        running.silent_s = silent_s
        assert any("has not grown for 60 s" in text for text in status(running).warnings) == told
    running.break_off()
    assert not any("has not grown" in text for text in status(running).warnings)
    assert {row.state for row in status(running).learners} & {"ready", "idle", "joining"} == set()
