"""A run of a user's own script can be audited: step logs beside it, one per life, of steps that count."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import atoll
from atoll.core.events import FromLearner
from atoll.core.messages import Counters, Report, Welcome
from atoll.runtime.client import AgentClient
from atoll.runtime.pipe import Setup
from tests.runtime.conftest import DEADLINE_S, ROOT

STEPS, INTERVAL, STEP_S = 40, 4, 0.02


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A syncer by hand that keeps contributions, in run/, and its address."""
    command = [sys.executable, "-m", "atoll", "syncer", "--run", "run", "--listen", "127.0.0.1:0"]
    command += ["--steps", str(STEPS), "--interval", str(INTERVAL), "--fragments", "2", "--keep-contributions"]
    syncer = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert syncer.stdout is not None
    said = [syncer.stdout.readline(), syncer.stdout.readline()]
    found = re.search(r"--address (\S+)", said[1])
    assert found is not None, said
    yield syncer, found[1]
    if syncer.poll() is None:
        syncer.kill()
    syncer.communicate()


def join(address: str, **options: object) -> tuple[torch.nn.Module, atoll.JoinedLearner]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, atoll.join(model, optimizer, address=address, name="a", timeout_s=40.0, **options)


def step(model: torch.nn.Module, learner: atoll.JoinedLearner, tokens: int) -> bool:
    time.sleep(STEP_S)
    loss = (model(torch.ones(2, 8)) ** 2).mean()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.01 * torch.randn_like(parameter))
    return learner.step(tokens, loss)


def is_put_out(learner: atoll.JoinedLearner) -> None:
    """Its syncer hears what cannot be, ends its life, and grants another one (R28)."""
    counters = Counters(10**6, 10, 0.0, (50, 50), (50, 50))
    learner._client.send(FromLearner(Report(counters)))


def is_granted_a_life_and_dies(setup: Setup) -> None:
    client = AgentClient(replace(setup, name="ghost"))
    while not any(isinstance(getattr(item, "message", None), Welcome) for item in client.wait(DEADLINE_S)):
        pass
    client.abandon()


def finished(syncer: subprocess.Popen[str]) -> None:
    out, err = syncer.communicate(timeout=DEADLINE_S)
    assert syncer.returncode == 0, out + err


def audit(run: Path) -> str:
    command = [sys.executable, str(ROOT / "tools" / "audit.py"), str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_steps_dir__audit_is_equal__two_lives_of_one_learner_and_one_that_was_never_a_member(
    served: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    syncer, address = served
    folder = tmp_path / "run" / "steps"
    model, learner = join(address, steps_dir=folder)
    first, going_on = learner.generation, True
    is_granted_a_life_and_dies(learner._setup)
    while going_on and learner.steps < 6:
        step(model, learner, 0)  # an empty batch, and one that a scaler skipped, have no row
        going_on = step(model, learner, 3 + learner.steps)
    learner.step(5, 1.0, skipped=True)
    is_put_out(learner)
    while going_on:
        going_on = step(model, learner, 3)
    finished(syncer)
    assert learner.generation != first
    logs = [folder / f"a-{generation}.jsonl" for generation in (first, learner.generation)]
    assert sorted(folder.iterdir()) == sorted(logs)
    rows = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]
    assert [[row["step"] for row in life] for life in rows] == [list(range(1, len(life) + 1)) for life in rows]
    assert len(rows[0]) + len(rows[1]) == learner.steps
    assert [row["tokens"] for row in rows[0][:6]] == [3, 4, 5, 6, 7, 8]
    assert "audit: all equal: " in audit(tmp_path / "run")


def test_without_steps_dir__the_audit_checks_the_rest_and_says_so(
    served: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    syncer, address = served
    model, learner = join(address)
    while step(model, learner, 3):
        pass
    finished(syncer)
    said = audit(tmp_path / "run")
    assert "audit: equal as far as it was logged: " in said
    assert f"losses of a-{learner.generation};" in said
