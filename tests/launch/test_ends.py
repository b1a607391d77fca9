"""How runs end (docs/ENDS.md): its status and words in each row of the table, by real processes where it takes some."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from atoll.core.records import PhaseLine
from atoll.launch import local
from atoll.launch.local import LocalRun
from atoll.launch.parallel import ParallelRun
from atoll.store.tape import Tape
from tests.waiting import wait_for

TEXT = "the quick brown fox jumps over the lazy dog, and the dog does not mind it at all\n"
FAST = ("--learners", "1", "--eval-every", "0", "--plain", "--fragments", "1", "--interval", "4")


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 1500)
    return path


@pytest.fixture(autouse=True)
def hangups_count() -> Iterator[None]:
    """Under `nohup` children would inherit that SIGHUP is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def atoll(*words: str, cwd: Path, **more) -> subprocess.Popen[str]:  # type: ignore[no-untyped-def]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("ATOLL_")}
    return subprocess.Popen(
        [sys.executable, "-m", "atoll", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=environ,
        start_new_session=True,
        **more,
    )


def lines(run: Path, kind: str) -> list[dict]:
    tape = run / "tape.jsonl"
    found = tape.read_text().splitlines(keepends=True) if tape.exists() else []
    return [x for x in (json.loads(line) for line in found if line.endswith("\n")) if x["kind"] == kind]


@contextlib.contextmanager
def nobody_left(process: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever happens."""
    try:
        yield
    finally:
        left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        if process.poll() is None:
            process.kill()
        process.communicate()
        assert not psutil.wait_procs(left, timeout=15)[1]


# ---------------------------------------------------------------- the table, with children that only have a status


class FakeChild:
    """Ends by itself with `code`, or lives on (None)."""

    def __init__(self, name: str, code: int | None, run: LocalRun | None = None) -> None:
        self.name, self.code, self.log = name, code, Path("log")
        self.started_s, self.signals = time.monotonic(), []
        self.process = None

    @property
    def running(self) -> bool:
        return self.code is None

    def signal(self, number) -> None:  # type: ignore[no-untyped-def]
        self.signals.append(number)
        self.code = 0 if self.code is None else self.code

    def wait(self, timeout_s: float) -> bool:
        return not self.running

    def last_error(self) -> str:
        return "what it said"


def watched(tmp_path: Path, syncer: int | None, learner: int | None, *, reason: str = "", signals: int = 0) -> LocalRun:
    """A launcher in the middle of a run of one learner."""
    plan = SimpleNamespace(run_dir=tmp_path, learners=("l1",), evals=None)
    run = LocalRun(plan, say=lambda text: None, on_record=lambda record: None)  # type: ignore[arg-type]
    run._ours, run._inode, run._tape = True, tmp_path.stat().st_ino, tmp_path / "tape.jsonl"
    run._children = {"syncer": FakeChild("syncer", syncer), "l1": FakeChild("l1", learner)}  # type: ignore[dict-item]
    run._patience = {"l1": local.Patience()}
    tape = Tape(run._tape)
    tape.append(PhaseLine(1, "over" if reason else "running", 3, reason))
    tape.close()
    for _ in range(signals):
        run._signals._asked.hear(signal.SIGTERM)
    return run


@pytest.mark.parametrize(
    ("syncer", "learner", "more", "code", "words"),
    [
        (0, 0, {"reason": "all slots are done"}, 0, "finished"),
        (0, 0, {"reason": "stopped"}, 130, "stopped by a signal to its syncer"),
        (0, 0, {"reason": "stopped", "signals": 1}, 130, "stopped by a signal"),
        (130, 0, {"signals": 1}, 130, "stopped by a signal"),
        (130, 0, {}, 1, "the syncer was ended by a signal before it was done; no model is written"),
        (None, None, {"signals": 2}, 130, "killed by a second signal; no model is written"),
        (-9, 2, {}, 1, "the syncer died (killed by SIGKILL); nothing was merged after that"),
        (2, 2, {}, 1, "the syncer died (exit status 2); nothing was merged after that"),
        (None, 3, {}, 1, "no learner is left"),
    ],
)
def test_train__every_end_has_its_status_and_its_words(tmp_path, syncer, learner, more, code, words):
    outcome = watched(tmp_path, syncer, learner, **more)._watch()
    assert (outcome.code, outcome.reason) == (code, words)


@pytest.mark.parametrize(
    ("ranks", "signals", "code", "words"),
    [
        ((0, 0), 0, 0, "finished"),
        ((130, 130), 0, 130, "stopped by a signal to one of its ranks"),
        ((130, 130), 1, 130, "stopped by a signal"),
        ((2, 4), 0, 1, "rank l1 ended (exit status 2): what it said; mode=data-parallel cannot go on without it"),
        ((None, None), 2, 130, "killed by a second signal; no model is written"),
    ],
)
def test_data_parallel__every_end_has_its_status_and_its_words(tmp_path, ranks, signals, code, words):
    learners = tuple(SimpleNamespace(name=name) for name in ("l1", "l2"))
    plan = SimpleNamespace(run_dir=tmp_path, learners=learners)
    run = ParallelRun(plan, say=lambda text: None, on_step=lambda row: None)  # type: ignore[arg-type]
    run._ours, run._inode = True, tmp_path.stat().st_ino
    run._children = {t.name: FakeChild(t.name, c) for t, c in zip(learners, ranks, strict=True)}  # type: ignore[misc]
    for _ in range(signals):
        run._signals._asked.hear(signal.SIGTERM)
    outcome = run._watch()
    assert outcome.code == code
    assert outcome.reason.startswith(words)


# ---------------------------------------------------------------- real ones


@pytest.mark.parametrize("mode", ["decoupled", "data-parallel"])
def test_train__of_two_that_start_at_once_in_one_directory_one_runs_to_its_end(tmp_path, text, mode):
    options = FAST if mode == "decoupled" else ("--learners", "1", "--mode", mode)
    both = [atoll("train", "--run", "run", "--data", str(text), "--steps", "8", *options, cwd=tmp_path) for _ in (1, 2)]
    with nobody_left(both[0]), nobody_left(both[1]):
        said = [process.communicate(timeout=120) for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], said
    loser = said[[process.returncode for process in both].index(2)]
    assert re.fullmatch(r"atoll: (run )?directory .*; choose another.*\n", loser[1]), loser
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit"] == "finished"


def test_train__its_reader_gone_and_its_syncer_stopped_by_another(tmp_path, text):
    run = tmp_path / "run"
    process = atoll("train", "--run", "run", "--data", str(text), "--steps", "100000", *FAST, cwd=tmp_path)
    with nobody_left(process):
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()  # as `| head -1` does
        wait_for(lambda: len(lines(run, "publishedline")) >= 12, "12 slots", of=process)  # lines were said in between
        os.kill(json.loads((run / "processes.json").read_text())["syncer"], signal.SIGTERM)
        assert process.wait(60) == 130
        process.stdout = None
        assert "atoll: stopped by a signal to its syncer\n" in process.communicate()[1]
        process.stderr = None
    summary = json.loads((run / "summary.json").read_text())
    assert summary["exit"] == "stopped by a signal to its syncer"
    assert (run / "model" / "model.safetensors").exists()


def test_train__its_directory_removed_in_mid_run_is_said_and_ctrl_c_ends_it_soon(tmp_path, text):
    run = tmp_path / "run"
    process = atoll("train", "--run", "run", "--data", str(text), "--steps", "100000", *FAST, cwd=tmp_path)
    with nobody_left(process):
        wait_for(lambda: len(lines(run, "publishedline")) >= 2, "two slots", of=process)
        run.rename(tmp_path / "elsewhere")
        assert process.stdout is not None
        for line in process.stdout:
            if "was removed or moved" in line:
                break
        process.send_signal(signal.SIGINT)
        asked_s = time.monotonic()
        _, err = process.communicate(timeout=30)
        assert time.monotonic() - asked_s < 5.0
        assert process.returncode == 1
        assert err == "atoll: the run directory run was removed or moved: nothing can be merged or written, " \
            "and it was stopped\n"  # fmt: skip
    assert not run.exists()


def test_by_hand__readers_gone_terminals_closed_and_a_learner_that_says_goodbye(tmp_path, text):
    run = tmp_path / "run"
    more = ("--fragments", "1", "--interval", "4", "--plain")
    syncer = atoll("syncer", "--run", "run", "--listen", "127.0.0.1:0", "--steps", "100000", *more, cwd=tmp_path)
    with nobody_left(syncer):
        assert syncer.stdout is not None
        address = re.search(r"listens at (\S+)", syncer.stdout.readline())[1]
        syncer.stdout.close()
        words = ("learner", "--address", address, "--data", str(text))
        for name, number in (("a", signal.SIGTERM), ("b", signal.SIGHUP)):
            learner = atoll(*words, "--name", name, cwd=tmp_path)
            with nobody_left(learner):
                before = len(lines(run, "publishedline"))
                wait_for(lambda before=before: len(lines(run, "publishedline")) > before + 2, "more slots", of=learner)
                learner.send_signal(number)
                _, err = learner.communicate(timeout=30)
                *loss, last = err.splitlines()
                assert (learner.returncode, last) == (130, "atoll: interrupted")
                assert all("of its work" in line and "go over the data" not in line for line in loss), err
            wait_for(lambda name=name: any(x["name"] == name for x in lines(run, "lifeendline")), "it left", of=syncer)
        assert {x["name"]: x["reason"] for x in lines(run, "lifeendline")} == {"a": "interrupted", "b": "interrupted"}
        syncer.send_signal(signal.SIGHUP)
        assert syncer.wait(60) == 130
        syncer.stdout = None
    assert (run / "model" / "model.safetensors").exists()
    assert json.loads((run / "summary.json").read_text())["exit"] == "stopped by a signal"


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A small file system of its own."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(path)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no small file system can be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=False)


@pytest.mark.parametrize("full_s", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_train__a_disk_that_is_full_for_a_while_costs_no_life(disk, text, full_s):
    run, ballast = disk / "run", disk / "ballast"
    words = ("--run", str(run), "--data", str(text), "--steps", "60", *FAST)
    process = atoll("train", *words, cwd=disk.parent)
    with nobody_left(process):
        wait_for(lambda: len(lines(run, "publishedline")) >= 3, "three slots", of=process)
        with ballast.open("wb", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass
        time.sleep(full_s)  # what is proved is what comes after it
        assert process.poll() is None
        ballast.unlink()
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "No space left on device" in err
    assert "Traceback" not in out + err
    assert [x["name"] for x in lines(run, "grantline")] == ["l1"]
    assert json.loads((run / "summary.json").read_text())["exit"] == "finished"
    assert (run / "model" / "model.safetensors").exists()
    [log] = (run / "steps").iterdir()
    rows = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert rows == list(range(1, len(rows) + 1))
