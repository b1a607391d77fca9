"""Whole runs with real processes: one that loses a learner, one that is stopped, one that loses its syncer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from atoll.cli.main import main
from tests.waiting import wait_for

TEXT = "the quick brown fox jumps over the lazy dog, and the dog does not mind it at all\n"


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 1500)
    return path


class Train:
    """`atoll train` in a process of its own."""

    def __init__(self, run: Path, text: Path, *options: str) -> None:
        self.run = run
        command = [sys.executable, "-m", "atoll", "train", "--run", str(run), "--data", str(text), "--learners", "2"]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("ATOLL_")}
        self.process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
            start_new_session=True,
        )

    def slot(self) -> int:
        """The newest closed one."""
        tape = self.run / "tape.jsonl"
        lines = tape.read_text().splitlines() if tape.exists() else []
        return max((json.loads(line)["slot"] for line in lines if '"kind":"closedline"' in line), default=0)

    def first_step_s(self, name: str) -> float:
        """Between the report that made a learner ready and its next: it must not have waited for the first step."""
        lines = map(json.loads, (self.run / "tape.jsonl").read_text().splitlines())
        times = [x["now_ns"] for x in lines if x["kind"] == "reportline" and x["name"] == name]
        return (times[1] - times[0]) / 1e9

    def pids(self) -> dict[str, int]:
        return json.loads((self.run / "processes.json").read_text())

    def await_slot(self, slot: int) -> None:
        wait_for(lambda: self.slot() >= slot, f"slot {slot}", of=self.process)

    def end(self, limit_s: float = 120.0) -> tuple[int, str, str]:
        """(exit status, stdout, stderr); no process of the run is left."""
        children = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        out, err = self.process.communicate(timeout=limit_s)
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive
        return self.process.returncode, out, err

    def summary(self) -> dict:
        return json.loads((self.run / "summary.json").read_text())


def test_train__a_killed_learner_comes_back_and_the_run_leaves_all_it_should(tmp_path, text, capsys):
    train = Train(tmp_path / "run", text, "--steps", "60", "--slow", "l1=1.2", "--keep-contributions")
    train.await_slot(6)
    os.kill(train.pids()["l2"], signal.SIGKILL)
    code, out, err = train.end()
    assert code == 0, err
    assert all("% of its work not merged" in line for line in err.splitlines()), err
    assert "learner l2 ended (killed by SIGKILL); it is started again" in out
    assert "learner l2 is lost" in out
    summary = train.summary()
    pieces = summary["token_pieces"]
    assert summary["lives"]["l1"] == 1
    assert (summary["slots"], summary["steps"], summary["phase"]) == (20, 60, "over")
    assert pieces["computed"] == pieces["merged"] + pieces["overwritten"] + pieces["lost"]
    assert 0 < pieces["lost"] < 0.5 * pieces["computed"]
    assert summary["eval_loss"] < 4
    assert summary["exit"] == "finished"
    names = {path.name for path in train.run.iterdir()}
    assert names >= {"run.toml", "recipe.toml", "tape.jsonl", "summary.json", "model", "logs", "steps"}
    logs = {path.name for path in (train.run / "logs").iterdir()} - {"evaluator.log"}  # where the machine is slow
    assert logs == {"l1.log", "l2.log", "syncer.log"}
    assert train.pids().keys() == {"launcher"}
    assert train.first_step_s("l1") > 0.005
    assert main(["evaluate", str(train.run)]) == 0
    assert f"{summary['eval_loss']:.4f} nats per byte" in capsys.readouterr().out
    assert main(["sample", str(train.run), "--prompt", "the ", "--length", "20"]) == 0
    assert capsys.readouterr().out.startswith("the ")


def test_train__ctrl_c_ends_it_cleanly_with_everything_written(tmp_path, text):
    train = Train(tmp_path / "run", text, "--steps", "100000", "--quiet")
    train.await_slot(4)
    train.process.send_signal(signal.SIGINT)
    code, out, err = train.end()
    assert code == 130
    assert "Traceback" not in err
    summary = train.summary()
    assert summary["phase"] == "over"
    assert summary["eval_loss"] is not None
    assert summary["exit"] == "stopped by a signal"
    assert (train.run / "model" / "manifest.json").exists()
    assert "held-out" in out


@pytest.mark.slow
def test_train__when_the_syncer_dies_learners_train_on_and_it_is_said(tmp_path, text):
    train = Train(tmp_path / "run", text, "--steps", "90")
    train.await_slot(4)
    os.kill(train.pids()["syncer"], signal.SIGKILL)
    code, out, err = train.end()
    assert code == 1
    assert "the syncer died (killed by SIGKILL); learners train on" in out
    assert "trained" in out
    assert "the syncer died" in err
    logs = [path.read_text().splitlines() for path in (train.run / "steps").iterdir()]
    assert all(len(log) >= 85 for log in logs)
    assert train.summary()["token_pieces"]["pending"] > 0


@pytest.mark.slow
def test_train__nobody_outlives_a_killed_launcher(tmp_path, text):
    train = Train(tmp_path / "run", text, "--steps", "100000")
    train.await_slot(2)
    children = psutil.Process(train.process.pid).children(recursive=True)
    assert len(children) >= 5
    train.process.kill()
    train.process.communicate()
    assert not psutil.wait_procs(children, timeout=15)[1]


@pytest.mark.slow
def test_train__a_second_ctrl_c_kills(tmp_path, text):
    train = Train(tmp_path / "run", text, "--steps", "100000", "--mode", "streaming")
    train.await_slot(2)
    for pid in [pid for name, pid in train.pids().items() if name.startswith("l") and name != "launcher"]:
        os.kill(pid, signal.SIGSTOP)
    train.process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    train.process.send_signal(signal.SIGINT)
    assert train.end(30)[0] == 130
