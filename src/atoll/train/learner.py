"""What a training script touches: `learner = atoll.join(model, optimizer)`, then `learner.step(tokens, loss)` per step.

    for batch in loader:
        loss = train_step(batch)
        if not learner.step(tokens=batch.numel(), loss=loss): break     # publishes, takes what arrived; never waits

The decisions are core.learner's; the network is the agent process's. Here time, tensors and frames meet.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import math
import os
import re
import socket
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core import events
from atoll.core.alone import SYNCER_WAIT_NS
from atoll.core.config import RunConfig
from atoll.core.layout import check_tensors, fingerprint, make_layout
from atoll.core.learner import Learner
from atoll.core.messages import Announce, Leave, Refuse, Report, Welcome
from atoll.errors import (
    ConfigError,
    DivergedError,
    FinishedError,
    JoinError,
    PutOutError,
    RunError,
    RunOverError,
    SyncerLostError,
)
from atoll.runtime.client import AgentClient
from atoll.runtime.memory import make_plan
from atoll.runtime.pipe import AgentCost, Setup
from atoll.store.steps import LifeLogs, check_folder
from atoll.tensors.names import specs_of
from atoll.train.attachment import Attachment
from atoll.train.checks import (
    NAME_LENGTH_MAX,
    check_agreement,
    check_model,
    check_name,
    check_optimizers,
    check_process,
    check_reach,
    loss_of,
    optimizers_of,
    tokens_of,
    warn_of_environment,
    warn_of_local_state,
)
from atoll.train.farewell import pending_tokens, warn_at_the_end, warn_of_leaving
from atoll.train.line import Line
from atoll.train.losses import LossSum
from atoll.train.pieces import Pieces
from atoll.train.timers import Timers
from atoll.train.whole import Whole
from atoll.wire.channel import load_token

_log = logging.getLogger("atoll")
DEFAULT_ADDRESS = "127.0.0.1:7700"
WAKE_S = 0.25
SYNCER_WAIT_S = SYNCER_WAIT_NS / 1e9
BULK_PATIENCE_S = 12.0
"""So long without a connection to the bulk service, and a join says so."""
LEFT = "interrupted"
_joined: weakref.WeakSet[JoinedLearner] = weakref.WeakSet()
"""Learners of this process."""

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
OnEvent = Callable[[events.LearnerEvent], None]


def default_name() -> str:
    """Host and process, in the letters that names may have."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()) or "learner"
    tail = f"-{os.getpid()}"
    return host[: NAME_LENGTH_MAX - len(tail)] + tail


def join(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    address: str | None = None,
    name: str | None = None,
    run: str | None = None,
    bulk_address: str | None = None,
    timeout_s: float = 60.0,
    name_wait_s: float = 0.0,
    syncer_wait_s: float = SYNCER_WAIT_S,
    buffers: str = "average",
    fingerprint_extra: str = "",
    alone: bool = False,
    steps_dir: str | os.PathLike[str] | None = None,
    on_event: OnEvent | None = None,
) -> JoinedLearner:
    """Join the run at `address` (ATOLL_ADDRESS, else 127.0.0.1:7700); returns when the model holds its parameters.

    name: of this learner in the run (ATOLL_NAME, else host and process); `name_wait_s`: how long to ask again for one
    that is in use. run: the run's id, where only that run will do. bulk_address: HOST:PORT of the bulk service, where
    it is not on the syncer's host. timeout_s bounds all of it. The token comes from ATOLL_TOKEN or ATOLL_TOKEN_FILE.
    syncer_wait_s: so long `step` trains on while the syncer is away, before SyncerLostError (R28); at the end of the
    run by its own steps it waits a lease more.

    buffers: what becomes of a BatchNorm's statistics and other floating-point buffers (R29): "average", they are part
    of the run's model; "local", they stay with each learner. fingerprint_extra: any text that all learners must agree
    on, for what shapes do not show, such as "relu, dropout 0.1". alone: this process is a learner although
    torch.distributed has several ranks here; else that is refused. steps_dir: a folder for this learner's step log,
    RUN/steps where the run's directory is on this machine: the audit counts from it what was trained.
    """
    check_process(alone=alone)
    check_model(model)
    check_no_other(model)
    check_optimizers(model, optimizers_of(optimizer))
    warn_of_environment()
    check_agreement(buffers, fingerprint_extra)
    tensors = specs_of(model, buffers)
    check_tensors(tensors)
    warn_of_local_state(model, tensors)
    address = address or os.environ.get("ATOLL_ADDRESS") or DEFAULT_ADDRESS
    name = name or os.environ.get("ATOLL_NAME") or default_name()
    check_reach(address, bulk_address, timeout_s=timeout_s, name_wait_s=name_wait_s, syncer_wait_s=syncer_wait_s)
    check_name(name)
    logs = LifeLogs(check_folder(steps_dir), name)
    load_token()
    setup = Setup(
        address=address,
        bulk_address=bulk_address or "",
        run_id=run or "",
        name=name,
        fingerprint=fingerprint(tensors, fingerprint_extra),
        tensors=tensors,
        extra=fingerprint_extra,
        name_wait_ns=int(name_wait_s * 1e9),
    )
    return JoinedLearner(model, setup, timeout_s + name_wait_s, on_event, syncer_wait_s, logs)


def check_no_other(model: nn.Module) -> None:
    """ConfigError where a learner of this process exchanges parameters of this model, under whatever wrapper."""
    for other in list(_joined):
        if other.open and other.exchanges(model):
            raise ConfigError(
                f"this model trains as learner {other.name!r} already; close that one before it joins again"
            )


def interrupted_by(kind: type[BaseException]) -> str:
    """Why a learner leaves before the end, for the tape and for people."""
    return LEFT if kind is KeyboardInterrupt else f"{LEFT}: {kind.__name__}"


class JoinedLearner:
    """A learner that has joined. Made by `join`; also a context manager that says goodbye."""

    def __init__(
        self,
        model: nn.Module,
        setup: Setup,
        timeout_s: float,
        on_event: OnEvent | None,
        syncer_wait_s: float = SYNCER_WAIT_S,
        logs: LifeLogs | None = None,
    ) -> None:
        self._setup = setup
        self._logs = logs or LifeLogs(None, setup.name)
        self._syncer_wait_ns = int(syncer_wait_s * 1e9)
        self._on_event = on_event
        self._timers = Timers()
        self._losses = LossSum()
        self._pending: list[Any] = []
        self._end: events.End | None = None
        self._whole = Whole()
        self._broken = ""
        self._line = Line(setup.address)
        self._steps_before = 0
        self._client = AgentClient(setup)
        self._pid = os.getpid()
        self._performers: dict[type, Callable[[Any], None]] = {
            events.Capture: self._capture,
            events.CaptureSeed: lambda action: self._capture_seed(),
            events.Take: self._take,
            events.Revert: self._revert,
            events.Free: lambda action: self._client.send(events.PlaceFreed(action.place)),
            events.Tell: lambda action: self._tell(action.message),
            events.End: self._on_end,
        }
        try:
            self._enter(model, time.monotonic() + timeout_s)
        except BaseException:
            self._client.abandon()
            self._logs.close(wait_s=0.0)
            raise
        _joined.add(self)
        _close_all_at_exit()

    # ------------------------------------------------------------ what a script may ask

    name: str
    """Of this learner."""
    generation: int
    """This life of the name. It changes where the syncer did not know the life any more (R28)."""
    settings: RunConfig
    """Of the run; they come from the syncer."""
    progress_at_join: float
    """Of the run when this learner joined, 0 to 1."""

    @property
    def progress(self) -> float:
        """Global progress of the run, 0 to 1: what schedules follow (R22)."""
        return self._machine.progress

    @property
    def steps(self) -> int:
        """Own steps since the join."""
        return self._steps_before + self._machine.book.steps

    @property
    def timings(self) -> dict[str, int]:
        """ns by cause of waits and copies, and of step() itself."""
        timers = self._timers
        own = {"step": timers.step_ns, "step_max": timers.step_ns_max, "gap_max": timers.gap_ns_max}
        return {**timers.by_cause, **own}

    @property
    def agent_cost(self) -> AgentCost | None:
        """CPU time of the agent process; None before it has ended."""
        return self._client.cost

    def step(self, tokens: int, loss: float | Tensor | None = None, skipped: bool = False) -> bool:
        """Call once after each optimizer step, with its tokens and mean loss. False: the run is over, stop training.

        tokens: a whole number of any kind. skipped: the step changed nothing (a GradScaler found inf); it does not
        count, and neither does an empty batch (tokens 0), whatever its loss.
        """
        self._check_open()
        tokens = tokens_of(tokens)
        loss = loss_of(loss)
        with self._whole:
            self._timers.begin()
            try:
                self._step(tokens, loss, skipped)
            except BaseException as error:
                self._break(error)
                raise
            finally:
                self._timers.end()
        if self._end is None:
            return True
        self._client.finish()
        self._logs.close()
        if self._end.kind == "run over":
            _log.warning("%s while this learner was cut off; its last work is not merged", self._end.reason)
        elif self._end.ok:
            warn_at_the_end(self.name, self._pieces.sizes, self._machine.book)
        if not self._end.ok:
            kind = SyncerLostError if self._end.kind == "syncer lost" else PutOutError
            raise kind(self._end.reason)
        return False

    def close(self, reason: str = "") -> None:
        """Say goodbye before the run is over; harmless afterwards. Unmerged work is lost, and it is said how much.

        reason: why, for the tape, where it is not that the loop has ended.
        """
        if os.getpid() != self._pid:
            return
        if self._end is None:
            warn_of_leaving(self.name, self._pieces.sizes, self._machine.book, self.progress, reason)
            with contextlib.suppress(RunError):
                self._handle(events.Interrupted(reason or LEFT))
        self._client.finish()
        self._logs.close()

    def __enter__(self) -> JoinedLearner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("" if kind is None else interrupted_by(kind))

    def _break(self, error: BaseException) -> None:
        """Something escaped from the middle of a step: books and model may not agree any more."""
        if self._end is not None:
            return
        self._broken = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        with contextlib.suppress(Exception):
            self.close(f"broken: {type(error).__name__}")

    # ------------------------------------------------------------ joining

    @property
    def open(self) -> bool:
        """It has not ended, and was not closed."""
        return self._end is None and not self._broken

    def exchanges(self, model: nn.Module) -> bool:
        """It exchanges a parameter that this model has too."""
        return self._pieces.move_any(model.parameters())

    def _enter(self, model: nn.Module, deadline: float) -> None:
        self.name = self._setup.name
        with self._timers.timed("parameters"):
            heard = self._await_welcome(deadline)
        welcome = heard.message
        assert isinstance(welcome, Welcome)
        self.generation = welcome.generation
        self._logs.begin(self.generation)
        self.settings = RunConfig.from_dict(dict(welcome.settings))
        layout = make_layout(self._setup.tensors, self.settings.fragments)
        self._client.memory.reserve(make_plan(layout.payload_sizes(self.settings.payload), self.settings.places))
        self._pieces = Pieces(model, layout, self.settings.payload, self._client.memory)
        self._pieces.set_constants(dict(welcome.constants))
        self._attachment = Attachment(model, layout)
        self._layout = layout
        self._machine = Learner(
            self.settings, layout, self.name, self.generation, syncer_wait_ns=self._syncer_wait_ns
        )
        self._client.outlive(lambda: self._machine.past(), self.settings.run_id)
        self._handle(heard)
        self.progress_at_join = self._machine.progress
        self._feed(self._pending)
        self._pending = []
        self._wait(deadline)
        self._client.flush()  # the report that makes it ready must not wait for the first step
        if self._end is not None:
            self._client.finish()
            raise JoinError(self._end.reason)
        self._line.joined = True

    def _await_welcome(self, deadline: float) -> events.Heard:
        """The answer to Hello. What came behind it in the same read is kept for the machine."""
        reason = "no answer"
        while time.monotonic() < deadline:
            items = self._client.wait(deadline - time.monotonic())
            for index, item in enumerate(items):
                if isinstance(item, events.StreamLost):
                    reason = item.reason or reason
                elif isinstance(item, events.Heard) and isinstance(item.message, Refuse):
                    kind = RunOverError if item.message.kind == "finished" else JoinError
                    raise kind(f"the syncer at {self._setup.address} refused: {item.message.message}")
                elif isinstance(item, events.Heard) and isinstance(item.message, Welcome):
                    self._pending = items[index + 1 :]
                    return item
        raise JoinError(
            f"no syncer answers at {self._setup.address} ({reason}); start one there, or set address or ATOLL_ADDRESS"
        )

    # ------------------------------------------------------------ stepping

    def _check_open(self) -> None:
        if self._broken:
            raise RunError(f"this learner broke in an earlier step ({self._broken}); join again to go on")
        if self._end is not None:
            raise FinishedError(
                f"step() after the end of this learner ({self._end.reason}); leave the loop when it is False"
            )
        if os.getpid() != self._pid:
            raise RunError("step() belongs to the process that joined, not to a fork of it; join there")

    def _step(self, tokens: int, loss: float | Tensor | None, skipped: bool) -> None:
        self._feed(self._client.poll())
        if self._machine.waiting is not None:  # Ctrl-C ended the wait of the step before
            self._wait(math.inf)
        if skipped or tokens == 0 or self._end is not None or self._machine.waiting is not None:
            return
        self._attachment.stepped(self._machine.book.steps)
        counts, loss = self._machine.counts, self._logs.read(loss)
        if not self._losses.add(tokens if counts else 0, loss):
            self._diverged()
        if counts:
            self._logs.write(tokens, loss)  # before it is reported: a crash leaves no reported step without its line
        # The sum is put into messages by `_tell`: the machine need not know it at each step.
        self._client.memory.steps = self._machine.book.steps + int(counts)
        self._handle(events.Stepped(tokens, 0.0))
        if self._machine.waiting is not None:
            self._wait(math.inf)
        self._client.flush()

    def _diverged(self) -> None:
        step = self._machine.book.steps + 1
        self.close(f"diverged: the loss of step {step} is not finite")
        raise DivergedError(
            f"the loss of step {step} of learner {self.name} is not finite; it left the run (a batch without targets: "
            "leave it out, or say step(tokens=0) or skipped=True)"
        )

    def _wait(self, deadline: float) -> None:
        """Block while the machine waits (R9), each wait timed by its cause."""
        memory = self._client.memory
        while self._end is None and (cause := self._machine.waiting) is not None:
            if time.monotonic() >= deadline:
                raise JoinError(
                    f"no first parameters came from {self._setup.address} in time; is the learner that hands them in "
                    "still there? raise timeout_s for a large model"
                )
            self._check_joining()
            memory.waiting = True
            with self._timers.timed(cause):
                items = self._client.wait(WAKE_S)
            self._feed(items or [events.Wake()])
            if self._whole.noted:
                break
        memory.waiting = False

    def _check_joining(self) -> None:
        """JoinError where first parameters cannot come: it was put out, or one of the two ports is not reachable."""
        if self._machine.waiting != "parameters":
            return
        if self._line.put_out:
            raise JoinError(self._line.put_out)
        trouble = self._client.bulk_trouble
        if trouble is not None and trouble.lasted_s > BULK_PATIENCE_S:
            raise JoinError(
                f"the syncer at {self._setup.address} answers, but its bulk service at {trouble.target} does not "
                f"({trouble.reason}); open or forward that port too, and give bulk_address where it is elsewhere"
            )

    def _feed(self, items: list[Any]) -> None:
        for item in items:
            self._line.hear(item, self.progress)
            message = item.message if isinstance(item, events.Heard) else None
            if isinstance(message, Welcome) and message.generation != self.generation and self._end is None:
                self._begin_life(message)
            self._handle(item)

    def _begin_life(self, welcome: Welcome) -> None:
        """The syncer does not know this life any more and has granted another: go on in that (R28)."""
        old, lost_tokens = self._machine, pending_tokens(self._pieces.sizes, self._machine.book)
        _log.warning(
            "the syncer at %s did not know this life of learner %s any more and granted a new one; work of %.0f tokens "
            "is not merged and lost, parameters come from the run again",
            self._setup.address,
            self.name,
            lost_tokens,
        )
        self.generation = welcome.generation
        self._logs.begin(self.generation)
        self._steps_before += old.book.steps
        self._losses = LossSum()
        self._timers.restart()
        self._client.memory.steps = 0
        self._machine = Learner(
            self.settings,
            self._layout,
            self.name,
            self.generation,
            syncer_wait_ns=self._syncer_wait_ns,
            in_place=True,
            progress_steps=old.progress_steps,
        )
        self._client.send(events.LifeBegun(self.generation))
        for place in old.staged():
            self._client.send(events.PlaceFreed(place))

    def _handle(self, event: events.LearnerEvent) -> None:
        if self._on_event is not None:
            self._on_event(event)
        for action in self._machine.handle(event, now_ns=time.monotonic_ns()):
            self._performers[type(action)](action)

    # ------------------------------------------------------------ actions

    def _capture(self, action: events.Capture) -> None:
        with self._timers.timed("capture"):
            self._pieces.capture(action.announce.piece)
        self._tell(action.announce)

    def _capture_seed(self) -> None:
        with self._timers.timed("capture"):
            sizes = self._pieces.capture_seed()
        self._client.send(events.SeedOffered(sizes))

    def _take(self, action: events.Take) -> None:
        def take() -> None:
            self._pieces.take(action.piece, action.place, action.how, subtract_sent=action.subtract_sent)

        with self._timers.timed("take"):
            self._attachment.taking(action.piece, take)
        self._client.send(events.PlaceFreed(action.place))

    def _revert(self, action: events.Revert) -> None:
        with self._timers.timed("take"):
            self._pieces.revert(action.piece)

    def _tell(self, message: Any) -> None:
        """Timings and the loss sum are the driver's to know."""
        loss_sum = self._losses.settle() if isinstance(message, Leave) else self._losses.read()
        if isinstance(message, Report | Announce | Leave):
            message = replace(message, counters=replace(message.counters, loss_sum=loss_sum))
        if isinstance(message, Report | Leave):
            message = replace(message, timings=self._timers.timings())
        self._client.send(events.FromLearner(message))

    def _on_end(self, action: events.End) -> None:
        self._end = action


@functools.cache
def _close_all_at_exit() -> None:
    """A script that ends without close() still says goodbye. Once per process, at its first join."""

    def close() -> None:
        # Set where an exception ended the script: Ctrl-C is one.
        kind = getattr(sys, "last_type", None)
        for learner in list(_joined):
            learner.close("" if kind is None else interrupted_by(kind))

    atexit.register(close)
