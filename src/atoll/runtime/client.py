"""The training process's side of its agent: starts it, shares memory with it, exchanges frames. No torch, no gRPC.

gRPC never runs in the training process, so that data loader workers may be forked at any time (hazard 38).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import time
import weakref
from typing import Any

from atoll.errors import RunError
from atoll.runtime.children import held_signals, python_command
from atoll.runtime.memory import SharedMemory, create_file
from atoll.runtime.pipe import AgentCost, BulkTrouble, Pipe, PipeError, Setup

EXIT_WAIT_S = 5.0


class AgentClient:
    """One agent process, as its training process sees it."""

    def __init__(self, setup: Setup) -> None:
        ours, theirs = socket.socketpair()
        memory_fd = create_file()
        self.memory = SharedMemory(memory_fd)
        self.pipe = Pipe(ours)
        self.cost: AgentCost | None = None
        self.bulk_trouble: BulkTrouble | None = None
        self._pid = os.getpid()
        with theirs:
            numbers = [str(theirs.fileno()), str(memory_fd), str(self._pid)]
            with held_signals():
                self.process = subprocess.Popen(
                    python_command("atoll.runtime.agent_main", *numbers),
                    pass_fds=(theirs.fileno(), memory_fd),
                    stdin=subprocess.DEVNULL,
                )
        _close_in_children(self)
        self.pipe.send(setup)

    def flush(self) -> None:
        """Let the agent see what was sent: once per step, so that it wakes once."""
        try:
            self.pipe.flush()
        except PipeError as error:
            raise self._gone() from error

    def poll(self) -> list[Any]:
        """Items that have come; never blocks. RunError where the agent is gone."""
        try:
            return self._sorted(self.pipe.receive())
        except PipeError as error:
            raise self._gone() from error

    def wait(self, timeout_s: float) -> list[Any]:
        """Items that come within `timeout_s`; empty after that."""
        self.flush()
        # Not select: its descriptors must be below 1,024, and a training process may have more open.
        with selectors.DefaultSelector() as selector:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.pipe.sending else 0)
            selector.register(self.pipe.sock, wanted)
            ready = selector.select(max(0.0, timeout_s))
        return self.poll() if ready else []

    def send(self, item: Any) -> None:
        """Hand an item to the agent at the next `flush` or `wait`. RunError where it is gone."""
        try:
            self.pipe.put(item)
        except PipeError as error:
            raise self._gone() from error

    def _sorted(self, items: list[Any]) -> list[Any]:
        for item in items:
            if isinstance(item, AgentCost):
                self.cost = item
            elif isinstance(item, BulkTrouble):
                self.bulk_trouble = item if item.reason else None
        return [item for item in items if not isinstance(item, AgentCost | BulkTrouble)]

    def _gone(self) -> RunError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        code = self.process.returncode
        return RunError(f"the agent process of this learner ended (status {code}); start the script again to rejoin")

    def finish(self) -> None:
        """After the goodbye: let the agent deliver it and end; then clear up. Harmless when repeated."""
        if os.getpid() != self._pid or self.process.returncode is not None:
            return
        deadline = time.monotonic() + EXIT_WAIT_S
        with contextlib.suppress(RunError, ValueError, OSError):
            while self.cost is None and time.monotonic() < deadline:
                self.wait(deadline - time.monotonic())
        self.pipe.close()
        try:
            self.process.wait(EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.memory.release()

    def drop_in_child(self) -> None:
        """A forked child must not keep the agent alive."""
        with contextlib.suppress(OSError):
            self.pipe.close()


def _close_in_children(client: AgentClient) -> None:
    reference = weakref.ref(client)

    def close() -> None:
        live = reference()
        if live is not None:
            live.drop_in_child()

    os.register_at_fork(after_in_child=close)
