"""A real syncer and real learners, as processes on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import atoll
from atoll.core import records
from atoll.core.layout import fingerprint
from atoll.errors import ConfigError, FinishedError, JoinError, RunError
from atoll.runtime.options import SyncerOptions
from atoll.runtime.pipe import Setup
from atoll.runtime.syncer import serve
from atoll.store.tape import read_tape
from atoll.tensors.names import specs_of
from atoll.train.learner import JoinedLearner

SECOND_NS = 1_000_000_000
FAST = {"heartbeat_interval_ns": SECOND_NS // 10, "lease_interval_ns": SECOND_NS, "interval": 4, "overlap": 1}


def address_of(syncer: Any) -> str:
    return f"127.0.0.1:{syncer.expect('listening')['port']}"


def tape_of(tmp_path: Path, kind: type) -> list[Any]:
    return [e.record for e in read_tape(tmp_path / "run" / "tape.jsonl") if isinstance(e.record, kind)]


def test_two_learners__to_the_finish__end_with_the_same_model(start, tmp_path) -> None:
    syncer = start("syncer", settings={**FAST, "steps": 24, "learners": 2})
    address = address_of(syncer)
    learners = [start("learner", address=address, name=name) for name in ("a", "b")]
    done = [learner.expect("done") for learner in learners]
    assert [learner.wait() for learner in learners] == [0, 0]
    assert syncer.wait() == 0
    assert done[0]["hash"] == done[1]["hash"]
    assert not any(learner.lines[0]["grpc"] for learner in learners)
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    ends = tape_of(tmp_path, records.LifeEndLine)
    assert {end.name for end in ends} == {"a", "b"}
    for end in ends:
        rows = zip(end.merged, end.overwritten, end.lost, strict=True)
        assert all(sum(row) == end.tokens for row in rows)
        assert end.step_ns > 0
    assert sum(sum(end.merged) for end in ends) > 0


def test_learner__killed_in_mid_run__rejoins_under_its_name(start, tmp_path) -> None:
    syncer = start("syncer", settings={**FAST, "steps": 100_000, "learners": 2})
    address = address_of(syncer)
    a = start("learner", address=address, name="a")
    b = start("learner", address=address, name="b")
    a.expect("step", lambda line: line["n"] == 5)
    agent = psutil.Process(a.lines[0]["agent"])
    a.kill()
    agent.wait(5.0)
    again = start("learner", address=address, name="a", name_wait_s=20.0)
    again.expect("step", lambda line: line["n"] >= 3)
    syncer.popen.send_signal(signal.SIGINT)
    assert [again.expect("done")["kind"], b.expect("done")["kind"]] == ["done", "done"]
    assert syncer.wait() == 0
    lives = [grant.generation for grant in tape_of(tmp_path, records.GrantLine) if grant.name == "a"]
    assert len(lives) == 2
    assert lives[0] < lives[1]


def test_call_that_holds_the_interpreter__for_three_leases__costs_no_lease(start, tmp_path) -> None:
    syncer = start("syncer", settings={**FAST, "steps": 12, "learners": 1})
    learner = start("learner", address=address_of(syncer), name="a", hold_at=4, hold_s=3.0)
    learner.expect("done")
    assert syncer.wait() == 0
    states = [line.state for line in tape_of(tmp_path, records.MemberLine)]
    assert "away" not in states
    assert len(tape_of(tmp_path, records.GrantLine)) == 1


def test_learner__has_two_connections__and_forks_loader_workers(start, tmp_path) -> None:
    syncer = start("syncer", settings={**FAST, "steps": 100_000, "learners": 1})
    where = syncer.expect("listening")
    learner = start("learner", address=f"127.0.0.1:{where['port']}", name="a", workers_at=6)
    assert learner.expect("loaded")["items"] == list(range(8))
    learner.expect("step", lambda line: line["n"] >= 12)
    agent = psutil.Process(learner.lines[0]["agent"])
    ports = [c.raddr.port for c in agent.net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED]
    assert sorted(ports) == sorted([where["port"], where["bulk_port"]])
    assert not psutil.Process(learner.popen.pid).net_connections("tcp")


def test_syncer__killed__learner_trains_on(start, tmp_path) -> None:
    syncer = start("syncer", settings={**FAST, "steps": 100_000, "learners": 1})
    learner = start("learner", address=address_of(syncer), name="a")
    learner.expect("step", lambda line: line["n"] >= 5)
    syncer.kill()
    seen = learner.expect("step")["n"]
    learner.expect("step", lambda line: line["n"] >= seen + 100)


def test_syncer__interrupted__ends_cleanly(start, tmp_path) -> None:
    syncer = start("syncer", settings={**FAST, "steps": 100_000, "learners": 1})
    learner = start("learner", address=address_of(syncer), name="a")
    learner.expect("step", lambda line: line["n"] >= 5)
    syncer.popen.send_signal(signal.SIGINT)
    learner.expect("done")
    assert syncer.wait() == 0
    assert (tmp_path / "run" / "model" / "manifest.json").exists()


# ---------------------------------------------------------------- refusals; these join from the test process


def small_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_refusals(start, tmp_path, monkeypatch) -> None:
    syncer = start("syncer", {"ATOLL_TOKEN": "right"}, settings={**FAST, "steps": 1000, "learners": 2})
    address = address_of(syncer)
    model, optimizer = small_model()
    monkeypatch.setenv("ATOLL_TOKEN", "wrong")
    with pytest.raises(JoinError, match="token"):
        atoll.join(model, optimizer, address=address, name="a", timeout_s=30.0)
    monkeypatch.setenv("ATOLL_TOKEN", "right")
    tensors = specs_of(model)
    stranger = Setup(address, "", "", "old", fingerprint(tensors), tensors, protocol=99)
    with pytest.raises(JoinError, match="protocol 99"):
        JoinedLearner(model, stranger, 30.0, None)
    with pytest.raises(JoinError, match="asks for run 'other'"):
        atoll.join(model, optimizer, address=address, name="a", run="other", timeout_s=30.0)
    with atoll.join(model, optimizer, address=address, name="a", timeout_s=30.0) as learner:
        assert learner.settings.learners == 2
        with pytest.raises(JoinError, match="in use"):
            atoll.join(*small_model(), address=address, name="a", timeout_s=30.0)
        other = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.Linear(9, 8))
        with pytest.raises(JoinError, match=r"tensor .* of the run"):
            atoll.join(other, torch.optim.SGD(other.parameters()), address=address, name="b", timeout_s=30.0)
        assert learner.step(3, torch.tensor(1.0))
        assert learner.step(3, 1.0, skipped=True)
        assert learner.steps == 1
        with pytest.raises(ConfigError, match="tokens=-1"):
            learner.step(-1)
    with pytest.raises(FinishedError):
        learner.step(3)
    assert learner.agent_cost is not None


def test_join__with_nobody_there__names_the_address() -> None:
    began = time.monotonic()
    with pytest.raises(JoinError, match=r"no syncer answers at 127\.0\.0\.1:9 "):
        atoll.join(*small_model(), address="127.0.0.1:9", name="a", timeout_s=1.5)
    assert time.monotonic() - began < 15.0


def test_join__checks_the_optimizer() -> None:
    model, _ = small_model()
    with pytest.raises(ConfigError, match=r"'1\.weight' is trainable"):
        atoll.join(model, torch.optim.SGD(model[0].parameters()))
    foreign = torch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(ConfigError, match="not a parameter of the model"):
        atoll.join(model, foreign)
    optimizer = torch.optim.SGD(model.parameters())
    model[0].bias.requires_grad_(False)
    with pytest.raises(ConfigError, match="frozen"):
        atoll.join(model, optimizer)


def test_serve__where_it_cannot__says_so(start, tmp_path) -> None:
    syncer = start("syncer", settings={**FAST, "steps": 10})
    port = syncer.expect("listening")["port"]
    settings = {**FAST, "steps": 10}
    with pytest.raises(RunError, match=f"port={port}"):
        serve(SyncerOptions(run_dir=tmp_path / "x", settings=settings, port=port, handle_signals=False))
    with pytest.raises(RunError, match="holds run"):
        serve(SyncerOptions(run_dir=tmp_path / "run", settings=settings, port=0, handle_signals=False))
    with pytest.raises(ConfigError, match="needs a token"):
        serve(SyncerOptions(run_dir=tmp_path / "y", settings=settings, host="0.0.0.0", handle_signals=False))
    with pytest.raises(ConfigError, match="interval"):
        serve(SyncerOptions(run_dir=tmp_path / "z", settings={"steps": 10}, handle_signals=False))
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("atoll.runtime.agent_main, atoll.runtime.agent", "torch"),
        ("atoll.train.learner", "grpc"),
    ],
)
def test_imports__stay_out_of(modules: str, absent: str) -> None:
    code = f"import sys, {modules}; sys.exit({absent!r} in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(Path(atoll.__file__).parent.parent)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0


def test_settings_file__tells_what_the_tape_tells(start, tmp_path) -> None:
    syncer = start("syncer", settings={**FAST, "steps": 8, "learners": 1})
    learner = start("learner", address=address_of(syncer), name="a")
    learner.expect("done")
    assert syncer.wait() == 0
    first = json.loads((tmp_path / "run" / "tape.jsonl").read_text().splitlines()[0])
    toml = (tmp_path / "run" / "run.toml").read_text()
    assert f'run_id = "{first["settings"]["run_id"]}"' in toml
    assert first["settings"]["fragments"] == 4


def test_join__names_what_stays_local(caplog: pytest.LogCaptureFixture) -> None:
    from atoll.tensors.names import specs_of
    from atoll.train.checks import warn_of_local_state

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    warn_of_local_state(model, specs_of(model, "local"))
    [record] = caplog.records
    assert "4 tensors stay with this learner" in record.getMessage()
    assert "0.bias, 1.num_batches_tracked, 1.running_mean, ..." in record.getMessage()
    caplog.clear()
    model[0].bias.requires_grad_(True)
    warn_of_local_state(model, specs_of(model))
    assert not caplog.records
