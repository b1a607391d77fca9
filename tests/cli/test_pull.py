"""`atoll pull`: the merged model of a run that goes on, into files."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from atoll.cli import pull
from atoll.cli.main import main
from atoll.errors import ConfigError
from atoll.launch.durations import duration_s
from atoll.store import merged
from tests.store.fake_run import FakeRun
from tests.waiting import DEADLINE_S, wait_for


@pytest.fixture
def run(tmp_path, monkeypatch) -> FakeRun:
    monkeypatch.chdir(tmp_path)
    return FakeRun(tmp_path / "run")


def names(to: Path) -> list[str]:
    return sorted(path.name for path in to.iterdir()) if to.exists() else []


def refused(capsys, *argv: str) -> str:
    assert main(["pull", *argv]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("atoll: ")
    return lines[0]


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30.0), ("10m", 600.0), ("2h", 7200.0), ("1.5 h", 5400.0), ("1d", 86_400.0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_s("every", text) == seconds


@pytest.mark.parametrize("text", ["", "10", "m", "-3s", "1e3s", "10 minutes", "nan", "1m30s", "\u0661s \u0662"])
def test_durations__that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"every=.* must be a number with its unit, such as 30s, 10m or 2h"):
        duration_s("every", text)


@pytest.mark.parametrize("text", ["0s", "0.5s", "99999h", "9" * 400 + "h"])
def test_durations__too_short_or_too_long(text: str) -> None:
    with pytest.raises(ConfigError, match="must be from 1s to 366d"):
        duration_s("every", text)


def test_pull__once__writes_the_model_and_then_nothing_new(run, capsys) -> None:
    run.begin(5)
    assert main(["pull", "run", "--to", "new/to"]) == 0
    assert capsys.readouterr().out == "slot 5: new/to/model-00000005.safetensors\n"
    written = load_file("new/to/model-00000005.safetensors")
    assert written.keys() == {"a", "b", "c"}
    assert main(["pull", "run", "--to", "new/to"]) == 0
    assert capsys.readouterr().out == "nothing new: the newest model is in new/to already\n"
    run.commit(6)
    assert main(["pull", "run", "--to", "new/to"]) == 0
    assert names(Path("new/to")) == ["model-00000005.safetensors", "model-00000006.safetensors"]


def test_pull__a_lower_slot_came_late__the_file_of_the_slot_is_replaced(run, capsys) -> None:
    run.begin(3)
    run.commit(5)
    assert main(["pull", "run", "--to", "to"]) == 0
    run.commit(4)
    assert main(["pull", "run", "--to", "to"]) == 0
    assert names(Path("to")) == ["model-00000005.safetensors"]
    with safe_open("to/model-00000005.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["versions"]) == [[1, 3], [1, 4], [1, 5]]


def test_pull__bad_input_is_one_line(run, capsys) -> None:
    assert "nothing is merged yet in run: version 0 is not there; try" in refused(capsys, "run", "--to", "t")
    assert not Path("t").exists(), "nothing came, and nothing is left"
    run.begin(1)
    assert "directory nowhere holds no run" in refused(capsys, "nowhere", "--to", "t")
    assert "every='soon' must be a number with its unit" in refused(capsys, "run", "--to", "t", "--every", "soon")
    assert "keep=0 must be at least 1" in refused(capsys, "run", "--to", "t", "--every", "1s", "--keep", "0")
    assert "keep=3 must be at least 1, and goes with --every" in refused(capsys, "run", "--to", "t", "--keep", "3")
    assert "--to is missing" in refused(capsys, "run")
    Path("file").write_text("")
    assert "to='file' cannot be a directory" in refused(capsys, "run", "--to", "file")
    assert main(["pull", "run", "--to", "t"]) == 0
    capsys.readouterr()
    run.path.joinpath("run.toml").write_text(run.path.joinpath("run.toml").read_text().replace('"r"', '"other"'))
    assert "t holds models of run 'r', not 'other'; choose another --to" in refused(capsys, "run", "--to", "t")


def test_pull__every__follows_the_run_keeps_the_newest_and_ends_with_it(run, capsys) -> None:
    codes: list[int] = []
    command = ["pull", "run", "--to", "to", "--every", "1s", "--keep", "2"]
    follower = threading.Thread(target=lambda: codes.append(main(command)))
    follower.start()
    to = Path("to")
    wait_for(to.exists, "the directory")
    run.begin(4)
    wait_for(lambda: names(to)[-1:] == ["model-00000004.safetensors"], "a new model")
    run.commit(5)
    wait_for(lambda: names(to)[-1:] == ["model-00000005.safetensors"], "a new model")
    run.commit(6)
    wait_for(lambda: names(to) == ["model-00000005.safetensors", "model-00000006.safetensors"], "a new model")
    run.commit(7)
    (run.path / "model").mkdir()
    (run.path / "model" / "manifest.json").write_text("{}")
    follower.join(DEADLINE_S)
    assert codes == [0]
    assert names(to) == ["model-00000006.safetensors", "model-00000007.safetensors"]
    said = capsys.readouterr()
    assert said.out.splitlines()[-2:] == ["slot 7: to/model-00000007.safetensors", "the run is over"]
    assert said.err.splitlines() == [
        "atoll: nothing is merged yet in run: version 0 is not there; try again later; waiting"
    ]


def test_pull__a_full_disk__is_told_and_tried_again(run, capsys, monkeypatch) -> None:
    run.begin(2)
    whole, failures = merged.write_merged, [OSError(28, "No space left on device")]

    def write(directory, model):
        if failures:
            raise failures.pop()
        return whole(directory, model)

    monkeypatch.setattr(merged, "write_merged", write)
    source = pull.DirectorySource(run.path)
    follower = pull.Follower(source, run.path.parent, None)
    with pytest.raises(pull.RunError, match=r"cannot be written to .*: No space left on device; make room"):
        follower.run(None)
    assert follower.run(None) == 0


def test_pull__every__of_a_run_that_ended_without_a_model_ends_too(run, capsys) -> None:
    (run.path / "summary.json").write_text("{}")
    assert "ended before anything was merged" in refused(capsys, "run", "--to", "to", "--every", "1s")


def test_pull__every__of_a_run_whose_syncer_was_killed_takes_what_there_is_and_ends(run, capsys) -> None:
    run.begin(5)
    (run.path / "tape.jsonl").write_text("")
    os.utime(run.path / "tape.jsonl", (1, 1))
    told = refused(capsys, "run", "--to", "to", "--every", "1s")
    assert told == "atoll: the run broke off: its syncer is gone; to has its newest model"
    assert names(Path("to")) == ["model-00000005.safetensors"]


def test_pull__of_a_run_that_merges_nothing_says_where_its_model_is(run, capsys) -> None:
    (run.path / "run.toml").write_text('run_id = "r"\nmode = "data-parallel"\n')
    told = refused(capsys, "run", "--to", "to")
    assert "run run is of mode=data-parallel, which merges nothing" in told
    assert told.endswith("its model is in model/ of its directory")
