"""Real processes under a deadline."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 90.0


class Process:
    """A child whose JSON lines can be waited for."""

    def __init__(self, kind: str, environ: dict[str, str], **options: Any) -> None:
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        env = {**os.environ, "PYTHONPATH": path, **environ}
        command = [sys.executable, "-m", "tests.runtime.process", kind, json.dumps(options)]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        self.lines: list[dict[str, Any]] = []
        self.errors = ""
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._threads = [threading.Thread(target=self._read), threading.Thread(target=self._read_errors)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with self.popen.stdout as lines:
            for line in lines:
                self._queue.put(json.loads(line))
        self._queue.put(None)

    def _read_errors(self) -> None:
        assert self.popen.stderr is not None
        with self.popen.stderr as lines:
            for line in lines:
                self.errors += line

    def expect(self, kind: str, until: Callable[[dict[str, Any]], bool] = lambda line: True) -> dict[str, Any]:
        """The next line of this kind for which `until` is true."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            line = self._queue.get(timeout=max(0.01, deadline - time.monotonic()))
            assert line is not None, f"ended before {kind!r}: {self.lines[-3:]} {self.errors}"
            self.lines.append(line)
            if line["kind"] == kind and until(line):
                return line

    def wait(self) -> int:
        """Exit status."""
        return self.popen.wait(DEADLINE_S)

    def kill(self) -> None:
        """kill -9, if it lives."""
        self.popen.kill()
        self.popen.wait(DEADLINE_S)
        for thread in self._threads:
            thread.join(DEADLINE_S)


Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start("syncer", settings={...}) | start("learner", address=..., name=...)."""
    started: list[Process] = []

    def begin(kind: str, environ: dict[str, str] | None = None, **options: Any) -> Process:
        if kind == "syncer":
            options.setdefault("run_dir", str(tmp_path / "run"))
        process = Process(kind, environ or {}, **options)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
