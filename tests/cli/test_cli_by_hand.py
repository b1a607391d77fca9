"""A syncer and learners started by hand; one learner diverges and the run goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from atoll.cli.learner import Progress
from atoll.cli.main import main
from tests.waiting import wait_for

TEXT = "the quick brown fox jumps over the lazy dog, and the dog does not mind it at all\n"


def start(*argv: str, cwd, **more: str) -> subprocess.Popen[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("ATOLL_")}
    return subprocess.Popen(
        [sys.executable, "-m", "atoll", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=environ | more,
    )


def published(tape) -> int:
    """The newest slot."""
    lines = tape.read_text().splitlines() if tape.exists() else []
    return max((json.loads(line)["slot"] for line in lines if '"kind":"publishedline"' in line), default=0)


@pytest.fixture
def by_hand(tmp_path):
    """(start a command, the address) of a syncer with one piece, a slot per step."""
    (tmp_path / "text.txt").write_text(TEXT * 1500)
    syncer = start(
        "syncer", "--run", "run", "--listen", "127.0.0.1:0", "--steps", "100000", "--fragments", "1", "--interval", "1",
        cwd=tmp_path,
    )  # fmt: skip
    said = [syncer.stdout.readline(), syncer.stdout.readline()]
    address = re.search(r"atoll learner --address (\S+)", said[1]).group(1)
    processes = [syncer]

    def learner(name: str, *options: str) -> subprocess.Popen[str]:
        command = ["learner", "--address", address, "--name", name, "--data", "text.txt", *options]
        processes.append(start(*command, cwd=tmp_path))
        return processes[-1]

    yield syncer, learner, tmp_path
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_by_hand__a_learner_that_diverges_stops_with_status_3_and_the_run_goes_on(
    by_hand, monkeypatch, capsys
):
    syncer, learner, where = by_hand
    good = learner("good")
    # From 16 seen contributions on, a norm far above the history is refused (R25).
    wait_for(lambda: published(where / "run" / "tape.jsonl") >= 20, "slot 20")
    bad = learner("bad", "--inner-lr", "1e30")
    _, err = bad.communicate(timeout=60)
    assert bad.returncode == 3, err
    assert re.fullmatch(r"atoll: (loss|gradient norm) \S+ of learner 'bad' at step \d+ is not finite; .*\n", err)
    twin = learner("good")
    _, err = twin.communicate(timeout=60)
    assert twin.returncode == 2
    assert "the name 'good' is in use by a live learner; choose another name" in err
    other = learner("other", "--model", "small")
    _, err = other.communicate(timeout=60)
    assert other.returncode == 2
    assert "tensor blocks.0.attention.key.weight float32[128,128] of the run is" in err
    assert good.poll() is None
    syncer.send_signal(signal.SIGINT)
    out, err = syncer.communicate(timeout=60)
    assert syncer.returncode == 130, err
    assert re.search(r"\(stopped early: \d+ of 100000 slots\)", out)
    assert "held-out loss: atoll evaluate run" in out
    out, _ = good.communicate(timeout=30)
    assert good.returncode == 0
    assert out.splitlines()[0].startswith("learner good: looking for a syncer at ")
    assert out.splitlines()[0].endswith(" for up to 60 s")
    assert re.fullmatch(r"  0% of the run  1 own step  loss \d\.\d+", out.splitlines()[1])
    summary = json.loads((where / "run" / "summary.json").read_text())
    assert summary["train_loss"] < 5
    assert summary["exit"] == "stopped by a signal"
    assert summary["lives"] == {"bad": 1, "good": 1}
    monkeypatch.chdir(where)
    assert main(["evaluate", "run", "--data", "text.txt"]) == 0
    assert float(re.search(r"tiny: (\S+) nats", capsys.readouterr().out).group(1)) < 5
    assert {path.name.split("-")[0] for path in (where / "runs").glob("*/steps/*")} == {"good", "bad"}


@pytest.mark.parametrize("wait", ["-3", "nan", "inf", "1e9"])
def test_learner__a_wait_that_makes_no_sense_is_refused_before_anything_is_said(wait, capsys):
    assert main(["learner", f"--timeout-s={wait}"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"atoll: timeout_s={float(wait):g} must be between 0 and 2,678,400 seconds\n"


def test_learner__tells_every_tenth_and_every_half_minute():
    now = [0.0]
    progress = Progress(clock=lambda: now[0])
    said = []
    for step in range(1, 101):
        now[0] += 1.0
        said.append(progress.line(min(step, 50) / 100, step, 2.0))
    steps = [step for step, line in enumerate(said, 1) if line is not None]
    assert steps == [1, 10, 20, 30, 40, 50, 80]
    assert said[9] == " 10% of the run  10 own steps  loss 2.000"


def test_syncer__stopped_before_anybody_came_says_so(tmp_path):
    syncer = start("syncer", "--run", "run", "--listen", "127.0.0.1:0", cwd=tmp_path)
    syncer.stdout.readline()
    syncer.send_signal(signal.SIGINT)
    out, err = syncer.communicate(timeout=60)
    assert (syncer.returncode, err) == (130, "")
    assert out.splitlines()[-1] == "no learner joined; nothing was trained"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit"] == "stopped by a signal"


def test_syncer__for_other_machines_names_host_ports_and_token(tmp_path):
    syncer = start("syncer", "--run", "run", "--listen", "0.0.0.0:0", cwd=tmp_path, ATOLL_TOKEN="a-secret-of-16-bytes")
    said = [syncer.stdout.readline() for _ in range(4)]
    syncer.kill()
    syncer.communicate()
    port = said[0].strip().rpartition(":")[2]
    assert said[1] == (
        "in another terminal, with the same ATOLL_TOKEN:  "
        f"atoll learner --address {socket.gethostname()}:{port}\n"
    )
    reached = f"{socket.gethostname()}:{port}"
    assert said[2] == f'or in a script of yours:  atoll.join(model, optimizer, address="{reached}")\n'
    assert re.fullmatch(rf"ports {port} and \d+ must be open for learners on other machines\n", said[3])
