"""Processes of a launcher: started in sessions of their own, logged, restarted with patience, never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from atoll.runtime.children import python_command
from atoll.store.files import write_atomic
from atoll.streams import Asked, ending_signals

LOG_TAIL_BYTES = 4096
ERROR_PREFIX = "atoll: "


class Signals:
    """Ctrl-C, SIGTERM and a closed terminal, counted while it is entered; elsewhere than in the main thread nothing is
    heard."""

    def __init__(self) -> None:
        self._asked = Asked()
        self._seen = 0
        self._before: dict[signal.Signals, Any] = {}

    @property
    def count(self) -> int:
        """How often the launcher was asked to end."""
        return self._asked.count

    def news(self) -> bool:
        """More have come since it was last asked."""
        seen, self._seen = self._seen, self.count
        return self.count > seen

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in ending_signals()}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: object) -> None:
        self._asked.hear(number)


@dataclass(slots=True, kw_only=True)
class Child:
    """One named process; a restart is a new process under the same name."""

    name: str
    spec: Mapping[str, Any]
    log: Path
    environ: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    starts: int = 0
    cpu_s: float = 0.0
    """CPU time of its lives that have ended, with that of processes they waited for. One thread looks after children:
    what all children have used grows by that of one when it is seen to have ended."""

    def start(self) -> None:
        """stdin is empty, output goes to the log; Ctrl-C in the terminal reaches only the launcher."""
        with open_log(self.log) as log:
            self.process = subprocess.Popen(
                python_command("atoll.launch.child", str(os.getpid()), json.dumps(self.spec)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self.environ),
                start_new_session=True,
            )
        self.started_s = time.monotonic()
        self.starts += 1

    @property
    def running(self) -> bool:
        return self.process is not None and self.code is None

    @property
    def code(self) -> int | None:
        """Exit status; negative: the signal that ended it; None while it runs or before its start."""
        if self.process is None or self.process.returncode is not None:
            return None if self.process is None else self.process.returncode
        before_s = children_cpu_s()
        code = self.process.poll()
        self.cpu_s += 0.0 if code is None else children_cpu_s() - before_s
        return code

    def signal(self, number: signal.Signals) -> None:
        """Harmless when it is gone."""
        if self.process is not None and self.running:
            self.process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """True when it has ended in time."""
        if self.process is None or not self.running:
            return True
        before_s = children_cpu_s()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self.cpu_s += children_cpu_s() - before_s
        return True

    def last_error(self) -> str:
        """The last line of its log that is meant for people; else the last line."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        told = [line.removeprefix(ERROR_PREFIX) for line in lines if line.startswith(ERROR_PREFIX)]
        return (told or lines or [""])[-1]


def open_log(path: Path) -> IO[bytes]:
    """For a child's output. Where the disk has no room for it, nobody keeps what the child says."""
    try:
        path.parent.mkdir(exist_ok=True)
        return path.open("ab")
    except OSError:
        return open(os.devnull, "ab")


def children_cpu_s() -> float:
    """CPU time, user and system, of all children that have been waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def describe_exit(code: int | None) -> str:
    """`exit status 2`, or the signal's name."""
    if code is not None and code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit status {code}"


@dataclass(slots=True)
class Patience:
    """When to start a learner again, and when to give it up."""

    quick_s: float = 20.0
    """A life shorter than this is a quick death."""
    quick_max: int = 5
    first_delay_s: float = 0.5
    delay_max_s: float = 10.0
    quick: int = 0
    history: list[float] = field(default_factory=list)

    def after(self, lived_s: float) -> float | None:
        """Seconds to wait before the next start; None: give it up."""
        self.history.append(lived_s)
        self.quick = self.quick + 1 if lived_s < self.quick_s else 0
        if self.quick >= self.quick_max:
            return None
        return min(self.delay_max_s, self.first_delay_s * 2 ** max(0, self.quick - 1))


def write_pids(path: Path, children: Mapping[str, Child]) -> None:
    """processes.json: the launcher and whatever runs now, by name. Where the disk has no room it stays as it is."""
    pids = {"launcher": os.getpid()}
    pids |= {name: child.process.pid for name, child in children.items() if child.running and child.process}
    with contextlib.suppress(OSError):
        write_atomic(path, json.dumps(pids, indent=1).encode() + b"\n", sync=False)
