"""A learner whose bulk port is cut: it trains on, takes less part, and the audit still finds every figure."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.relay import Relay
from tests.waiting import wait_for

ROOT = Path(__file__).parent.parent.parent


def closed_slots(run: Path) -> int:
    tape = run / "tape.jsonl"
    return tape.read_text().count('"kind":"closedline"') if tape.exists() else 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run_with_cut(directory: Path, *, steps: int, cut_s: float) -> dict[str, object]:
    """Two learners, one behind the proxy whose connections are cut for `cut_s`; the run's summary."""
    run, bulk_port, port = directory / "run", free_port(), free_port()
    proxy = Relay(bulk_port)
    atoll = [sys.executable, "-m", "atoll"]
    syncer = [*atoll, "syncer", "--run", str(run), "--listen", f"127.0.0.1:{port}", "--bulk-port", str(bulk_port)]
    syncer += ["--steps", str(steps), "--min-ready", "2", "--keep-contributions", "--quiet", "--fragments", "8"]
    processes = [subprocess.Popen(syncer, cwd=ROOT)]
    try:
        wait_for(lambda: not port_free(port), "the syncer")
        for index, name in enumerate(("l1", "l2")):
            command = [*atoll, "learner", "--address", f"127.0.0.1:{port}", "--name", name, "--run", str(run)]
            behind = proxy.port if index else bulk_port
            command += ["--index", str(index + 1), "--of", "2", "--bulk-address", f"127.0.0.1:{behind}"]
            processes.append(subprocess.Popen(command, cwd=ROOT))
        wait_for(lambda: closed_slots(run) >= 8, "eight slots")
        proxy.cut()
        began = time.monotonic()
        wait_for(lambda: time.monotonic() - began >= cut_s, "the end of the cut", deadline_s=cut_s + 60)
        proxy.restore()
        assert [process.wait(240) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        proxy.close()
    audit = [sys.executable, ROOT / "tools" / "audit.py", run]
    audited = subprocess.run(audit, capture_output=True, text=True, check=False)
    assert audited.returncode == 0, audited.stdout + audited.stderr
    summary: dict[str, object] = json.loads((run / "summary.json").read_text())
    return summary


def port_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def check(summary: dict[str, object]) -> None:
    taking_part = summary["participation"]
    assert isinstance(taking_part, dict)
    assert taking_part["learners"]["l1"] > 0.9, "the other learner does not notice"
    assert taking_part["learners"]["l2"] < 0.9, "a cut must show"
    assert summary["training_uptime"] > 0.95  # type: ignore[operator]
    assert summary["blocked_s"]["lock"] == 0.0  # type: ignore[index]
    assert summary["lives"] == {"l1": 1, "l2": 1}, "the learner itself lives on"


def test_bulk_port_cut_for_a_while__the_learner_trains_on_and_the_audit_passes(tmp_path: Path) -> None:
    check(run_with_cut(tmp_path, steps=168, cut_s=8))


@pytest.mark.slow
def test_bulk_port_cut_for_60_s__the_learner_trains_on_and_the_audit_passes(tmp_path: Path) -> None:
    check(run_with_cut(tmp_path, steps=1200, cut_s=60))
