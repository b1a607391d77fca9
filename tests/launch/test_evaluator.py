"""The observer beside a run: rarely enough, harmless when it fails, gone with its run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from atoll.errors import ConfigError, OvertakenError
from atoll.launch.evaluator import NICE, SHARE, Budget, EvalEvery, Evaluator, eval_every
from atoll.launch.processes import Child
from atoll.store.evals import EvalLine, append_eval, read_evals
from atoll.store.merged import MergedReader
from tests.launch.test_launch_local import TEXT, Train
from tests.store.fake_run import FakeRun
from tests.waiting import wait_for

LIMIT_S = 60.0


def test_eval_every__a_duration_or_slots_or_off() -> None:
    assert eval_every("30s") == EvalEvery(seconds=30.0)
    assert eval_every("24") == EvalEvery(slots=24)
    assert eval_every("0") is None
    for wrong in ("often", "-1", "1.5", "0.1s"):
        with pytest.raises(ConfigError, match=r"eval_every=.*, or a number of slots; 0 turns it off"):
            eval_every(wrong)


class World:
    """An evaluator on a made-up clock: start-up costs 2 s of CPU time, an evaluation 0.5 s."""

    def __init__(self, path: Path, every: EvalEvery, cores: int = 2, loss: float = 2.5) -> None:
        self.run = FakeRun(path)
        self.run.begin(0)
        self.now_s, self.cpu_s, self.loss, self.slot = 30.0, 2.0, loss, 0
        self.lines: list[EvalLine] = []
        self.times: list[tuple[float, float]] = []
        self.evaluator = Evaluator(
            MergedReader(path),
            every,
            Budget(cores, 0.0),
            self.evaluate,
            self.append,
            clock=lambda: self.now_s,
            cpu=lambda: self.cpu_s,
        )

    def evaluate(self, model) -> tuple[float, int]:
        self.cpu_s += 0.5
        self.now_s += 0.7
        return self.loss, 8

    def append(self, line: EvalLine) -> None:
        self.lines.append(line)
        self.times.append((self.now_s, self.cpu_s))

    def live(self, seconds: int, slot_every_s: int = 1) -> None:
        for second in range(seconds):
            self.now_s += 1.0
            if second % slot_every_s == 0:
                self.slot += 1
                self.run.commit(self.slot)
            self.evaluator.look()


def test_evaluator__stays_within_its_share_after_the_first(tmp_path) -> None:
    world = World(tmp_path, EvalEvery(seconds=1.0))
    world.live(300)
    (first_s, _), *later = world.times
    assert first_s < 33.0
    assert all(cpu_s <= SHARE * 2 * now_s for now_s, cpu_s in later)
    assert world.cpu_s > 0.8 * SHARE * 2 * world.now_s
    assert [line.slot for line in world.lines] == sorted({line.slot for line in world.lines})
    assert {(line.loss, line.batches, line.cpu_s) for line in world.lines} == {(2.5, 8, 0.5)}


def test_evaluator__on_many_cores__comes_when_it_is_due(tmp_path) -> None:
    world = World(tmp_path, EvalEvery(seconds=20.0), cores=64)
    world.live(100)
    assert len(world.lines) == 5
    slots = World(tmp_path / "slots", EvalEvery(slots=10), cores=64)
    slots.live(35)
    assert [line.slot for line in slots.lines] == [1, 11, 21, 31]


def test_evaluator__with_nothing_new__does_nothing(tmp_path) -> None:
    world = World(tmp_path, EvalEvery(seconds=1.0), cores=64)
    world.live(20, slot_every_s=100)
    assert len(world.lines) == 1


def test_evaluator__a_loss_that_is_not_finite__is_no_line(tmp_path, capsys) -> None:
    world = World(tmp_path, EvalEvery(slots=1), cores=64, loss=float("nan"))
    world.live(1)
    assert not world.lines
    assert capsys.readouterr().out == "slot 1: the held-out loss is nan\n"


def test_evaluator__overtaken__tries_later_within_its_share(tmp_path, monkeypatch) -> None:
    world = World(tmp_path, EvalEvery(seconds=1.0))

    def read():
        world.cpu_s += 1.0
        raise OvertakenError("too fast")

    monkeypatch.setattr(world.evaluator._reader, "read", read)
    world.live(200)
    assert not world.lines
    assert world.cpu_s <= SHARE * 2 * world.now_s


def test_evals__appended_by_two__are_whole_lines(tmp_path) -> None:
    line = EvalLine(slot=3, loss=1.5, batches=8, cpu_s=0.4, hash="ab")
    append_eval(tmp_path, line)
    append_eval(tmp_path, line)
    with (tmp_path / "evals.jsonl").open("ab") as file:
        file.write(b'{"slot":4,"lo')
    assert read_evals(tmp_path) == [line, line]


def test_child__its_cpu_time_is_measured_when_it_ends(tmp_path, monkeypatch) -> None:
    work = "import time\nwhile time.process_time() < 0.3: pass"
    whole = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: whole([sys.executable, "-c", work], **more))
    child = Child(name="x", spec={}, log=tmp_path / "logs" / "x.log", environ=os.environ)
    child.start()
    assert child.wait(LIMIT_S)
    first_s = child.cpu_s
    assert 0.3 <= first_s < 3.0
    child.start()
    wait_for(lambda: not child.running, "its end")
    assert child.cpu_s >= first_s + 0.3


@pytest.fixture
def train(tmp_path):
    """A run of two learners that evaluates early; no sooner than it has begun."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 1500)
    run = Train(tmp_path / "run", text, "--steps", "100000", "--eval-every", "1s")
    wait_for(lambda: read_evals(run.run), "an evaluation", of=run.process)
    yield run
    if run.process.poll() is None:
        run.process.kill()
        run.process.communicate()


def test_train__evaluates_beside_the_run_and_does_not_mind_its_evaluator_dying(train) -> None:
    evaluator = psutil.Process(train.pids()["evaluator"])
    assert evaluator.nice() == min(19, psutil.Process().nice() + NICE)
    assert "ATOLL_TOKEN" not in evaluator.environ()
    evaluator.kill()
    train.await_slot(train.slot() + 8)
    train.process.send_signal(signal.SIGINT)
    code, out, err = train.end()
    assert code == 130
    assert "Traceback" not in err
    assert out.count("the evaluator ended") == 1
    assert "the evaluator ended (killed by SIGKILL); the run goes on without evaluations" in out
    (line, *_) = read_evals(train.run)
    assert line.slot >= 1
    assert 0 < line.loss < 8
    summary = train.summary()
    assert line.cpu_s < summary["evaluator_cpu_s"] < 60
    assert summary["exit"] == "stopped by a signal"


@pytest.mark.slow
def test_train__an_evaluator_that_hangs__delays_no_end(train) -> None:
    os.kill(train.pids()["evaluator"], signal.SIGSTOP)
    train.process.send_signal(signal.SIGINT)
    code, out, _ = train.end()
    assert code == 130
    assert "the evaluator ended" not in out
    assert train.summary()["evaluator_cpu_s"] > 0
