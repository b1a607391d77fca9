"""The training process's side of its agent: starts it, shares memory with it, exchanges frames. No torch, no gRPC.

gRPC never runs in the training process, so that data loader workers may be forked at any time (hazard 38). An agent
that ends or hangs is followed by another one of the same life (R28): training goes on, meanwhile the syncer is away.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import selectors
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from atoll.core.events import AgentRestarted, Past, StreamLost
from atoll.errors import JoinError, RunError
from atoll.runtime.children import held_signals, python_command
from atoll.runtime.memory import SharedMemory, create_file
from atoll.runtime.pipe import AgentCost, BulkTrouble, Pipe, PipeError, Setup

_log = logging.getLogger("atoll")
EXIT_WAIT_S = 5.0
RESTART_FIRST_S = 1.0
RESTART_LAST_S = 60.0
STEADY_S = 60.0
"""An agent that lived so long was a good one: the next is started at once."""
HUNG_S = 60.0
"""Without a heartbeat in shared memory for so long, an agent is taken for hung."""
START_S = 300.0
"""Its first heartbeat may take longer: many processes that read their code from one slow disk."""
LOOK_S = 5.0
"""It is looked at twice before that: this process may have stood still itself."""
_clients: weakref.WeakSet[AgentClient] = weakref.WeakSet()
"""Of this process."""


class AgentClient:
    """The agent of one learner, as its training process sees it; one process after another."""

    def __init__(self, setup: Setup, *, hung_s: float = HUNG_S) -> None:
        self._setup = setup
        with _startable():
            self._memory_fd = create_file()
        self.memory = SharedMemory(self._memory_fd)
        self.cost: AgentCost | None = None
        self.bulk_trouble: BulkTrouble | None = None
        self.restarts = 0
        self._pid = os.getpid()
        self._past: Callable[[], Past] | None = None
        self._waiting_items: list[Any] = []
        self._closing = False
        self._hung = _Hung(hung_s)
        self._restart_at_s = 0.0
        self._restart_wait_s = 0.0
        with contextlib.ExitStack() as undo:
            undo.callback(self.memory.release)
            with _startable():
                self._start(setup)
            undo.pop_all()
        _clients.add(self)
        _drop_all_in_children()

    def outlive(self, past: Callable[[], Past], run_id: str) -> None:
        """From now on an agent that ends is followed by another, which takes over what `past` says of the life."""
        self._past = past
        self._setup = replace(self._setup, run_id=run_id, name_wait_ns=0)

    def _start(self, setup: Setup) -> None:
        ours, theirs = socket.socketpair()
        self.pipe: Pipe | None = Pipe(ours)
        self._started_s = time.monotonic()
        self._hung.begin(self.memory.beats, self._started_s)
        with theirs:
            numbers = [str(theirs.fileno()), str(self._memory_fd), str(self._pid)]
            try:
                with held_signals():
                    self.process = subprocess.Popen(
                        python_command("atoll.runtime.agent_main", *numbers),
                        pass_fds=(theirs.fileno(), self._memory_fd),
                        stdin=subprocess.DEVNULL,
                    )
            except OSError:
                self.pipe.close()
                self.pipe = None
                raise
        self.pipe.send(setup)

    # ------------------------------------------------------------ frames

    def flush(self) -> None:
        """Let the agent see what was sent: once per step, so that it wakes once."""
        if self.pipe is not None:
            try:
                self.pipe.flush()
            except PipeError as error:
                self._lost(str(error))

    def poll(self) -> list[Any]:
        """Items that have come; never blocks. RunError where the agent of a life that has not begun is gone."""
        items: list[Any] = []
        if self.pipe is not None:
            try:
                items = self._sorted(self.pipe.receive())
                self._look()
            except PipeError as error:
                self._lost(str(error))
        items += self._waiting_items
        self._waiting_items = []
        # Not before all that the old agent said has been handed out: what it staged is not free.
        return items or self._restarted()

    def wait(self, timeout_s: float) -> list[Any]:
        """Items that come within `timeout_s`; empty after that."""
        self.flush()
        if self._waiting_items:
            return self.poll()
        if self.pipe is None:
            time.sleep(max(0.0, min(timeout_s, self._restart_at_s - time.monotonic())))
            return self.poll()
        # Not select: its descriptors must be below 1,024, and a training process may have more open.
        with selectors.DefaultSelector() as selector:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.pipe.sending else 0)
            selector.register(self.pipe.sock, wanted)
            ready = selector.select(max(0.0, timeout_s))
        if not ready:
            self._look_without_frames()
            return []
        return self.poll()

    def send(self, item: Any) -> None:
        """Hand an item to the agent at the next `flush` or `wait`. While there is none, `AgentRestarted` makes up."""
        if self.pipe is not None:
            try:
                self.pipe.put(item)
            except PipeError as error:
                self._lost(str(error))

    def _sorted(self, items: list[Any]) -> list[Any]:
        for item in items:
            if isinstance(item, AgentCost):
                self.cost = item
            elif isinstance(item, BulkTrouble):
                self.bulk_trouble = item if item.reason else None
        return [item for item in items if not isinstance(item, AgentCost | BulkTrouble)]

    # ------------------------------------------------------------ an agent that ends or hangs (R28)

    def _look(self) -> None:
        if self._hung.seen(self.memory.beats, time.monotonic()):
            raise PipeError(f"it has given no sign for {self._hung.limit_s:.0f} s")

    def _look_without_frames(self) -> None:
        try:
            self._look()
        except PipeError as error:
            self._lost(str(error))

    def _lost(self, reason: str) -> None:
        """This agent is gone, or useless. What it still said is kept; the next one begins after a while."""
        assert self.pipe is not None
        with contextlib.suppress(PipeError):
            while said := self.pipe.receive():
                self._waiting_items += self._sorted(said)
        self.pipe.close()
        self.pipe = None
        how = self._end_of_process(reason)
        if self._closing:
            return
        if self._past is None:
            raise RunError(f"the agent process of this learner {how} before it had joined; start the script again")
        lived_s = time.monotonic() - self._started_s
        short = lived_s < STEADY_S and self.restarts
        self._restart_wait_s = min(max(2 * self._restart_wait_s, RESTART_FIRST_S), RESTART_LAST_S) if short else 0.0
        self._restart_at_s = time.monotonic() + self._restart_wait_s
        after = f" in {self._restart_wait_s:.0f} s" if self._restart_wait_s else ""
        _log.warning("the agent process of this learner %s; training goes on, a new one is started%s", how, after)
        self._waiting_items.append(StreamLost(f"the agent process {how}", of_agent=True))

    def _end_of_process(self, reason: str) -> str:
        """See that it is gone, so that nobody writes into the memory any more; how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        code = self.process.returncode
        if code is None:
            self.process.kill()
            self.process.wait()
            return f"was ended ({reason})"
        return f"was killed by signal {_signal_name(-code)}" if code < 0 else f"ended (status {code})"

    def _restarted(self) -> list[Any]:
        """Start the next agent, if one is due."""
        if self.pipe is not None or self._closing or self._past is None or time.monotonic() < self._restart_at_s:
            return []
        self.restarts += 1
        try:
            self._start(replace(self._setup, past=self._past()))
        except (OSError, PipeError) as error:
            self.pipe = None
            self._restart_wait_s = min(max(2 * self._restart_wait_s, RESTART_FIRST_S), RESTART_LAST_S)
            self._restart_at_s = time.monotonic() + self._restart_wait_s
            _log.warning("no agent process can be started (%s); tried again in %.0f s", error, self._restart_wait_s)
            return []
        return [AgentRestarted()]

    # ------------------------------------------------------------ the end

    def finish(self) -> None:
        """After the goodbye: let the agent deliver it and end; then clear up. Harmless when repeated."""
        if os.getpid() != self._pid or self._closing:
            return
        self._closing = True
        deadline = time.monotonic() + EXIT_WAIT_S
        with contextlib.suppress(ValueError, OSError):
            while self.pipe is not None and self.cost is None and time.monotonic() < deadline:
                self.wait(deadline - time.monotonic())
        self._close(EXIT_WAIT_S)

    def abandon(self) -> None:
        """Joining failed: end the agent without a word."""
        self._closing = True
        self.process.kill()
        self._close(EXIT_WAIT_S)

    def _close(self, wait_s: float) -> None:
        if self.pipe is not None:
            self.pipe.close()
        try:
            self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.memory.release()

    def drop_in_child(self) -> None:
        """A forked child must not keep the agent alive."""
        if self.pipe is not None:
            with contextlib.suppress(OSError):
                self.pipe.close()


@contextlib.contextmanager
def _startable() -> Iterator[None]:
    """JoinError where the system has no descriptor, process or memory for an agent."""
    try:
        yield
    except OSError as error:
        raise JoinError(
            f"no agent process can be started for this learner ({error.strerror}); raise the limits of this process "
            "(`ulimit -n` for open files, `ulimit -u` for processes)"
        ) from error


class _Hung:
    """Whether the agent's heartbeats stand still: for long, and as seen twice."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._look_s = min(LOOK_S, limit_s / 2)
        self.begin(0, time.monotonic())

    @property
    def limit_s(self) -> float:
        """How long this agent may be silent at present."""
        return max(START_S, self._limit_s) if self._starting else self._limit_s

    def begin(self, beats: int, now_s: float) -> None:
        """A new agent, which has given no sign yet: `beats` are those of the agents before it."""
        self._starting = True
        self._beats = beats
        self._changed_s = now_s
        self._suspect_s: float | None = None

    def seen(self, beats: int, now_s: float) -> bool:
        """Look at the count of heartbeats; True: it hangs."""
        if beats != self._beats:
            self._starting, self._beats, self._changed_s, self._suspect_s = False, beats, now_s, None
        elif now_s >= self._changed_s + self.limit_s:
            if self._suspect_s is None:
                self._suspect_s = now_s
            return now_s >= self._suspect_s + self._look_s
        return False


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


@functools.cache
def _drop_all_in_children() -> None:
    """Once per process, at its first join."""

    def drop() -> None:
        for client in list(_clients):
            client.drop_in_child()

    os.register_at_fork(after_in_child=drop)
