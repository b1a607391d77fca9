"""R28 with real processes: a learner outlives its agent, its syncer's refusals and another run at the old address."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from atoll.core import records
from atoll.core.events import AgentRestarted, Past, StreamLost
from atoll.errors import RunError
from atoll.runtime import client as client_module
from atoll.runtime.client import AgentClient, _Hung
from atoll.runtime.pipe import Setup
from atoll.store.tape import read_tape
from tests.runtime.conftest import Process
from tests.waiting import wait_for

SECOND_NS = 1_000_000_000
FAST = {"heartbeat_interval_ns": SECOND_NS // 10, "lease_interval_ns": SECOND_NS, "interval": 4, "overlap": 1}
ENDLESS = 100_000


def lines_of(run: Path, kind: type) -> list[Any]:
    return [e.record for e in read_tape(run / "tape.jsonl") if isinstance(e.record, kind)]


def agents_step(learner: Process, other_than: int, count: int = 1) -> dict[str, Any]:
    """A step of the learner with another agent than this, `count` steps after its first."""
    first = learner.expect("step", lambda line: line["agent"] != other_than)
    return learner.expect("step", lambda line: line["n"] >= first["n"] + count)


def is_back(run: Path, name: str) -> bool:
    """It was away, and is ready again."""
    states = [line.state for line in lines_of(run, records.MemberLine) if line.name == name]
    return "away" in states and states[-1] == "ready"


def books_are_whole(run: Path) -> None:
    for end in lines_of(run, records.LifeEndLine):
        rows = zip(end.merged, end.overwritten, end.lost, strict=True)
        assert all(sum(row) == end.tokens for row in rows)


# ---------------------------------------------------------------- the agent


def test_agent__killed_three_times__costs_neither_life_nor_finish(start, tmp_path) -> None:
    syncer = start("syncer", settings={**FAST, "steps": 600, "learners": 2})
    address = f"127.0.0.1:{syncer.expect('listening')['port']}"
    a, b = (start("learner", address=address, name=name) for name in ("a", "b"))
    agent = a.expect("joined")["agent"]
    a.expect("step", lambda line: line["n"] >= 20)
    for _ in range(3):
        os.kill(agent, signal.SIGKILL)
        agent = agents_step(a, agent, 20)["agent"]
    done = [learner.expect("done") for learner in (a, b)]
    assert [a.wait(), b.wait(), syncer.wait()] == [0, 0, 0]
    assert done[0]["hash"] == done[1]["hash"]
    assert [grant.name for grant in lines_of(tmp_path / "run", records.GrantLine)].count("a") == 1
    books_are_whole(tmp_path / "run")
    a.kill()
    assert a.errors.count("was killed by signal SIGKILL; training goes on") == 3
    assert not psutil.pid_exists(agent)


def test_agent__stopped__is_replaced(start, tmp_path) -> None:
    syncer = start("syncer", settings={**FAST, "steps": ENDLESS, "learners": 1})
    learner = start("learner", address=f"127.0.0.1:{syncer.expect('listening')['port']}", name="a", hung_s=1.5)
    agent = learner.expect("joined")["agent"]
    learner.expect("step", lambda line: line["n"] >= 8)
    os.kill(agent, signal.SIGSTOP)
    agents_step(learner, agent, 20)
    assert not psutil.pid_exists(agent), "two agents of one life"
    # The finish waits for nobody who is away: so the new agent must have found the syncer before.
    wait_for(lambda: is_back(tmp_path / "run", "a"), "the new agent to be ready")
    syncer.popen.send_signal(signal.SIGINT)
    learner.expect("done")
    assert [learner.wait(), syncer.wait()] == [0, 0]
    learner.kill()
    assert "was ended (it has given no sign for 2 s); training goes on" in learner.errors


# ---------------------------------------------------------------- the syncer


def restart(start: Callable[..., Process], run: Path, port: int, **settings: Any) -> Process:
    """Another syncer at the same port."""
    syncer = start("syncer", run_dir=str(run), port=port, settings={**FAST, "learners": 1, **settings})
    syncer.expect("listening")
    return syncer


def test_another_run_at_the_old_address__is_warned_of__and_training_goes_on_to_its_end(start, tmp_path) -> None:
    first = start("syncer", settings={**FAST, "steps": 400, "learners": 1})
    port = first.expect("listening")["port"]
    learner = start("learner", address=f"127.0.0.1:{port}", name="a")
    learner.expect("step", lambda line: line["n"] >= 8)
    first.kill()
    other = restart(start, tmp_path / "other", port, steps=400)
    failed = learner.expect("failed")
    assert learner.wait() == 1
    assert failed["error"] == "SyncerLostError"
    assert "by its own steps this learner is at the end" in failed["text"]
    assert failed["progress"] == 1.0
    assert failed["steps"] >= 390
    learner.kill()
    assert "refuses this learner" in learner.errors
    assert not lines_of(tmp_path / "other", records.GrantLine), "it trained in another run"
    other.popen.send_signal(signal.SIGINT)


def test_syncer__away_for_its_whole_wait__ends_the_learner_with_that_reason(start, tmp_path) -> None:
    syncer = start("syncer", settings={**FAST, "steps": ENDLESS, "learners": 1})
    learner = start("learner", address=f"127.0.0.1:{syncer.expect('listening')['port']}", name="a", syncer_wait_s=2.0)
    learner.expect("step", lambda line: line["n"] >= 8)
    syncer.kill()
    failed = learner.expect("failed")
    assert failed["error"] == "SyncerLostError"
    assert "away for 2 s (syncer_wait)" in failed["text"]


def test_life__put_out__goes_on_in_a_new_one_in_place(start, tmp_path) -> None:
    syncer = start("syncer", settings={**FAST, "steps": 400, "learners": 2})
    address = f"127.0.0.1:{syncer.expect('listening')['port']}"
    a, b = (start("learner", address=address, name=name, put_out_at=60 * (name == "a")) for name in ("a", "b"))
    joined = a.expect("joined")
    went_on = a.expect("step", lambda line: line["generation"] != joined["generation"])
    done = [learner.expect("done") for learner in (a, b)]
    assert [a.wait(), b.wait(), syncer.wait()] == [0, 0, 0]
    assert done[0]["hash"] == done[1]["hash"]
    assert [grant.name for grant in lines_of(tmp_path / "run", records.GrantLine)].count("a") == 2
    assert done[0]["steps"] > went_on["n"] >= 60, "steps are counted on"
    books_are_whole(tmp_path / "run")
    a.kill()
    assert "granted a new one" in a.errors


def test_fresh_syncer_of_the_same_run__goes_on_with_the_learners_it_finds(start, tmp_path) -> None:
    settings = {"run_id": "one-run", "steps": ENDLESS}
    first = start("syncer", settings={**FAST, "learners": 1, **settings})
    port = first.expect("listening")["port"]
    learner = start("learner", address=f"127.0.0.1:{port}", name="a")
    learner.expect("step", lambda line: line["n"] >= 40)
    first.kill()
    second = restart(start, tmp_path / "second", port, **settings)
    new = learner.expect("step", lambda line: line["generation"] != learner.lines[0]["generation"])
    learner.expect("step", lambda line: line["n"] >= new["n"] + 40)
    second.popen.send_signal(signal.SIGINT)
    learner.expect("done")
    assert [learner.wait(), second.wait()] == [0, 0]
    assert lines_of(tmp_path / "second", records.SlotLine)


# ---------------------------------------------------------------- the client


def test_heartbeats_that_stand_still__are_looked_at_twice() -> None:
    hung = _Hung(60.0)
    hung.begin(0, 0.0)
    assert not hung.seen(1, 0.0)
    assert not hung.seen(1, 59.0)
    assert not hung.seen(1, 1000.0), "this process may have stood still itself"
    assert not hung.seen(1, 1004.0)
    assert hung.seen(1, 1005.0)
    assert not hung.seen(2, 1006.0)
    assert not hung.seen(2, 1065.0)


def test_agent__that_starts_slowly__is_not_taken_for_hung() -> None:
    hung = _Hung(60.0)
    hung.begin(7, 0.0)
    assert not any(hung.seen(7, now_s) for now_s in (0.0, 60.0, 120.0, 299.0))
    assert not hung.seen(7, 300.0)
    assert hung.seen(7, 305.0)
    hung.begin(7, 400.0)
    assert not hung.seen(7, 460.0)
    assert not hung.seen(8, 470.0)
    assert not hung.seen(8, 530.0)
    assert hung.seen(8, 535.0), "it has begun"


@pytest.fixture
def client(monkeypatch):
    """An agent that finds no syncer: nobody listens at that port."""
    clock = [1000.0]
    monkeypatch.setattr(client_module.time, "monotonic", lambda: clock[0])
    agent = AgentClient(Setup("127.0.0.1:9", "", "", "a", "0" * 64, ()))
    agent.clock = clock
    yield agent
    monkeypatch.undo()
    agent.abandon()


def items_until(client: AgentClient, kind: type) -> list[Any]:
    items: list[Any] = []
    for _ in range(2000):
        items += client.wait(0.05)
        if any(isinstance(item, kind) for item in items):
            return items
    raise AssertionError(f"no {kind.__name__} in {items}")


def test_agent__dead_before_the_learner_joined__is_an_error(client) -> None:
    client.process.kill()
    with pytest.raises(RunError, match="SIGKILL before it had joined"):
        items_until(client, AgentRestarted)


def test_agent__that_dies_again_and_again__is_started_ever_more_rarely(client, monkeypatch) -> None:
    client.outlive(lambda: Past(1, (), (0,)), "run")
    waits = []
    for _ in range(9):
        client.process.kill()
        client.process.wait()
        said = [type(item) for item in items_until(client, StreamLost)]
        assert AgentRestarted not in said, "before all that the old agent said has been handed out"
        waits.append(client._restart_wait_s)
        client.clock[0] += client._restart_wait_s
        items_until(client, AgentRestarted)
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    client.clock[0] += 60.0
    client.process.kill()
    items_until(client, StreamLost)
    assert client._restart_wait_s == 0.0, "the last one lived long"
