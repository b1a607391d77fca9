"""The page of a run: whole, offline, escaped; and the commands that write and read it."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from atoll.cli.closing import close_run, closing_lines
from atoll.cli.main import main
from atoll.core.records import FateLine, MemberLine
from atoll.sim.plan import LearnerSpec, S
from atoll.sim.world import World
from atoll.store.evals import EvalLine, append_eval, read_evals
from atoll.store.rundir import RECIPE_FILE
from atoll.watch.charts import LEARNERS_NAMED, Charts, labels
from atoll.watch.read import fold_run
from atoll.watch.report import Compared, compare, report, run_cards
from atoll.watch.summary import fold
from atoll.watch.tallies import POINTS_MAX, LossCurve
from tests.watch.worlds import equal, tape_of, world, write_tape

TITLES = ("Learners", "Loss over tokens", "Loss over time", "Participation", "Contributions", "Waits", "Bandwidth")


class Tags(HTMLParser):
    """What a browser would fetch, and whether tags match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [f"{tag} {key}={value}" for key, value in attrs if key in ("src", "href")]
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def a_run_with_a_crash() -> World:
    made = World(seed=5, learners=equal(3), fragments=4, interval=8, steps=160)
    made.at(6 * S, lambda: made.crash("l1", back_after_ns=3 * S))
    made.run()
    return made


def test_report__is_one_file_that_fetches_nothing() -> None:
    page = report(fold(tape_of(a_run_with_a_crash())), [EvalLine(slot=20, loss=2.5, batches=8, cpu_s=0.1)], 2.25)
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.fetched == []
    assert "cdn.plot" not in re.sub(r"<script>.*?</script>", "", page, count=1, flags=re.S)
    for title in TITLES:
        assert f"<h2>{title}</h2>" in page
    assert "Lost and back: l1." in page
    assert "The held-out loss of the model is 2.2500." in page


@pytest.mark.parametrize("recipe", [True, False])
def test_losses__have_a_unit_only_where_it_is_known(
    recipe: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A learner of somebody's own may report any loss: everywhere it is just a loss."""
    run = write_tape(tmp_path / "run", tape_of(world(equal(2), steps=40)))
    other = write_tape(tmp_path / "other", tape_of(world(equal(2), steps=40)))
    for each in (run, other) if recipe else ():
        (each / RECIPE_FILE).write_text("")
    summary = close_run(run, fold_run(run), None, 0, {"exit": "finished"})
    said = "\n".join(closing_lines(run, summary, fold_run(run)))
    assert main(["report", str(run)]) == 0
    assert main(["compare", str(run), str(other), "--to", str(tmp_path / "both.html")]) == 0
    assert main(["status", str(run)]) == 0
    assert main(["advise", str(run)]) == 0
    report_, both = (page.read_text() for page in (run / "report.html", tmp_path / "both.html"))
    assert ("loss (nats per byte)" in report_) == recipe
    assert re.search(r"The training loss is \d\.\d{4}" + (" nats per byte," if recipe else ","), report_)
    assert ("<th>loss (nats per byte)</th>" in both) == recipe
    assert ("training (nats per byte)" in said) == recipe
    assert summary["loss_unit"] == ("nats per byte" if recipe else None)
    if not recipe:
        assert "nats" not in report_ + both + said + capsys.readouterr().out


def test_losses__of_runs_with_different_units_have_none_in_common(tmp_path: Path) -> None:
    one, two = fold(tape_of(world(equal(2), steps=24))), fold(tape_of(world(equal(2), steps=24)))
    one.loss_unit = "nats per byte"
    assert "nats" not in compare([Compared("one", one), Compared("two", two)])


def test_report__long_names_and_reasons_leave_room_for_the_pictures_on_a_narrow_page() -> None:
    """At 420 pixels whatever is longer than these was cut off, or left no room for a picture."""
    names = [f"gpu-node-{i:02d}.cluster-eu-west.example.org-{123456 + i}" for i in range(LEARNERS_NAMED)]
    lines = tape_of(world([LearnerSpec(name=name) for name in names], steps=80))
    why = "norm 3.1e+04 is far above all that is usual on this fragment"
    view = fold([*lines, FateLine(lines[-1].now_ns, 9, 1, names[3], 1, 900, 100, "refused", why)])
    for shown in run_cards(Charts(view)):
        axes = shown.figure.layout
        for line in (line for trace in shown.figure.data for line in (trace.name or "").split("<br>")):
            assert len(line) <= 28, shown.title
        for tick in (line for text in axes.yaxis.ticktext or () for line in text.split("<br>")):
            assert len(tick) <= 18, shown.title
        assert len(axes.xaxis.title.text or "") <= 20, shown.title


def test_labels__stay_apart() -> None:
    told = labels([f"{'a' * 20}-{i}-{'b' * 20}" for i in range(200)])
    assert len(set(told.values())) == 200
    assert labels(["l1"]) == {"l1": "l1"}


def test_report__shows_the_loss_of_each_learner() -> None:
    """Two lives of one learner are one line."""
    view = fold(tape_of(a_run_with_a_crash()))
    figure = Charts(view).learners_loss()
    assert [trace.name for trace in figure.data] == ["l0", "l1", "l2"]
    assert all(len(trace.x) > 5 and trace.y[-1] == pytest.approx(1.0) for trace in figure.data)
    assert "<h2>Loss of each learner</h2>" in report(view)


def test_loss_curve__is_bounded_and_its_means_are_exact() -> None:
    curve = LossCurve()
    for step in range(5 * POINTS_MAX):
        curve.add(step, 2, 2.0 * step)
    assert len(curve.means(10**6)) <= POINTS_MAX
    points = curve.means(100)
    assert 50 <= len(points) <= 100
    gaps = [after[1] - before[1] for before, after in pairwise(points)]
    assert max(gaps) <= 2 * min(gaps), "evenly spread"
    before = 0
    for _, tokens, mean in points:
        steps = range(before, tokens // 2)
        assert mean == pytest.approx(sum(steps) / len(steps))
        before = tokens // 2


def test_report__names_are_escaped() -> None:
    lines = tape_of(world(equal(2)))
    lines.insert(3, MemberLine(0, "<script>x", 1, "joining", "joining", "<b>"))
    page = report(fold(lines))
    assert "<script>x" not in page
    assert "&lt;script&gt;x" in page


@pytest.mark.parametrize("count", [1, 40, 400])
def test_report__of_a_run_that_has_hardly_begun(count: int) -> None:
    assert "<h2>Learners</h2>" in report(fold(tape_of(world(equal(2)))[:count]))


def test_commands__report_compare_status_advise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write_tape(tmp_path / "first", tape_of(a_run_with_a_crash()))
    second = write_tape(tmp_path / "second", tape_of(world(equal(2))))
    append_eval(first, EvalLine(slot=20, loss=2.5, batches=8, cpu_s=0.1))
    assert main(["report", str(first)]) == 0
    assert (first / "report.html").read_text().startswith("<!doctype html>")
    assert main(["compare", str(first), str(second), "--to", str(tmp_path / "both.html")]) == 0
    both = (tmp_path / "both.html").read_text()
    assert "<th>first</th>" in both
    assert "2.5000 held-out" in both
    capsys.readouterr()
    assert main(["status", str(first)]) == 0
    assert "l1" in capsys.readouterr().out
    assert main(["status", str(first), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["phase"] == "over"
    assert main(["advise", str(second)]) == 0
    assert capsys.readouterr().out.startswith("no setting to change: ")


def test_status__of_a_run_whose_syncer_was_killed__says_so_and_does_not_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tape_of(a_run_with_a_crash())
    run_dir = write_tape(tmp_path / "run", lines[: len(lines) // 2])
    os.utime(run_dir / "tape.jsonl", (1, 1))
    for follow in ([], ["--follow"]):
        assert main(["status", str(run_dir), *follow]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "the run is broken off: its syncer was killed, or its machine; `atoll pull RUN" in said
    assert main(["report", str(run_dir)]) == 0
    assert "the run broke off at slot" in (run_dir / "report.html").read_text()


@pytest.mark.parametrize("command", ["report", "status", "advise"])
@pytest.mark.parametrize("what", ["missing", "a file", "no run", "empty", "dead", "damaged", "gap"])
def test_commands__what_is_no_run(
    command: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    lines = tape_of(world(equal(2), steps=24))
    told = {
        "missing": "does not exist; give the directory of a run",
        "a file": "is a file; give the directory of a run",
        "no run": "holds no run: run.toml is missing",
        "empty": "has not begun: its tape is empty; try again later",
        "dead": "broke off before it began: its syncer is gone; start another",
        "damaged": "is damaged at byte",
        "gap": "lines are missing; restore the file from a copy",
    }
    if what == "a file":
        run_dir.write_text("")
    elif what == "no run":
        run_dir.mkdir()
    elif what != "missing":
        tape = write_tape(run_dir, [] if what in ("empty", "dead") else lines) / "tape.jsonl"
        rows = tape.read_bytes().splitlines(keepends=True)
        if what == "damaged":
            tape.write_bytes(b"".join([*rows[:5], b"{\n", *rows[5:]]))
        elif what == "gap":
            tape.write_bytes(b"".join(rows[:5] + rows[7:]))
        elif what == "dead":
            os.utime(tape, (1, 1))
    assert main([command, str(run_dir)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("atoll: ")
    assert said.err.count("\n") == 1
    assert told[what] in said.err


def test_report__a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_tape(tmp_path / "run", tape_of(world(equal(2), steps=24)))
    for path, reason in (("none/x.html", "No such file or directory"), (".", "Is a directory")):
        assert main(["report", str(run), "--to", str(tmp_path / path)]) == 2
        assert f"cannot be written: {reason}; give another file with --to" in capsys.readouterr().err
    assert main(["report", str(run), "--to", ""]) == 2
    assert "'.' cannot be written: " in capsys.readouterr().err


def test_compare__one_line_has_its_name_too_and_no_markers_are_promised(tmp_path: Path) -> None:
    page = compare([Compared("only", fold(tape_of(world(equal(2), steps=24))))])
    assert '"showlegend":true' in page
    assert "Training loss." in page
    assert "markers: held-out" not in page


def test_report__of_a_run_that_goes_on(tmp_path: Path) -> None:
    lines = tape_of(world(equal(2)))
    assert "the run has come to slot " in report(fold(lines[: len(lines) // 2]))


def test_evals__a_torn_last_line_is_ignored_and_damage_is_told(tmp_path: Path) -> None:
    append_eval(tmp_path, EvalLine(slot=1, loss=3.0, batches=1, cpu_s=0.0))
    append_eval(tmp_path, EvalLine(slot=2, loss=2.0, batches=1, cpu_s=0.0))
    path = tmp_path / "evals.jsonl"
    whole = path.read_bytes()
    for stop in range(len(whole)):
        path.write_bytes(whole[:stop])
        assert len(read_evals(tmp_path)) == whole[:stop].count(b"\n")
    path.write_bytes(b"x\n" + whole)
    with pytest.raises(Exception, match="damaged"):
        read_evals(tmp_path)
