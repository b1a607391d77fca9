"""mode=data-parallel on one machine: M ranks, started, followed by their step logs, and ended together."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll import __version__
from atoll.core.config import DATA_PARALLEL, SEED_MAX, STEPS_MAX, between
from atoll.core.layout import make_layout
from atoll.errors import ConfigError
from atoll.launch.check import check_data, check_init
from atoll.launch.child import ENDED_INTERRUPTED, ENDED_RANK_LOST
from atoll.launch.cores import Share, machine_cores, thread_environment
from atoll.launch.local import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    FINISHED,
    KILL_WAIT_S,
    KILLED,
    POLL_S,
    STOPPED,
    Outcome,
    Say,
    unwritable,
    write_recipe,
)
from atoll.launch.options import LocalOptions, as_told
from atoll.launch.plan import check_run_dir, new_run_id
from atoll.launch.prepare import LEARNERS_MAX, asked_steps, default_run_dir, learners_of
from atoll.launch.processes import Child, Signals, describe_exit, write_pids
from atoll.recipes.data import Corpus
from atoll.recipes.loop import TrainConfig
from atoll.recipes.model import build_model
from atoll.store.rundir import gone_text, is_gone, remove_run, take_directory
from atoll.store.steps import StepReader, StepRow, step_log_path
from atoll.tensors.names import specs_of

MEANINGLESS = (
    "quorum", "fragments", "interval", "overlap", "merge", "take", "outer_lr", "outer_momentum", "keep_contributions",
    "listen", "eval_every",
)  # fmt: skip
"""Options that say how a syncer merges, or where it is."""
RANK_STOPPED = "stopped by a signal to one of its ranks"
CULPRIT_WAIT_S = 2.0
"""Ranks that lost another one may be seen to end before it."""


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """A run that was checked and can begin. Nothing is written yet."""

    run_dir: Path
    run_id: str
    steps: int
    seed: int
    init: Path | None
    learners: tuple[TrainConfig, ...]
    shares: tuple[Share, ...]
    corpus: Corpus
    options: dict[str, Any]
    """As `options.as_told`."""

    def settings(self) -> dict[str, str | int]:
        """run.toml."""
        return {
            "run_id": self.run_id,
            "mode": DATA_PARALLEL,
            "learners": len(self.learners),
            "steps": self.steps,
            "seed": self.seed,
        }


def refuse_meaningless(options: LocalOptions) -> None:
    """ConfigError names the first option that was given and does nothing in this mode."""
    for name in MEANINGLESS:
        value = getattr(options, name)
        if value not in (None, False):
            raise ConfigError(f"{name}={value} does nothing in mode={DATA_PARALLEL}, which has no syncer; omit it")


def prepare_parallel(options: LocalOptions) -> ParallelPlan:
    """Check everything that can be checked, cheap things first. AtollError names value and remedy."""
    refuse_meaningless(options)
    if not 1 <= options.learners <= LEARNERS_MAX:
        raise ConfigError(f"learners={options.learners} must be between 1 and {LEARNERS_MAX} on one machine")
    between("seed", options.seed, -SEED_MAX, SEED_MAX)
    run_dir = options.run or default_run_dir(options.model)
    check_run_dir(run_dir)
    learners, parts = learners_of(options, run_dir, machine_cores())
    steps = asked_steps(options, learners[0])
    between("steps", steps, 1, STEPS_MAX)
    if options.init is not None:
        check_init(options.init, make_layout(specs_of(build_model(options.model, 0)), 1))
    return ParallelPlan(
        run_dir=run_dir,
        run_id=new_run_id(),
        steps=steps,
        seed=options.seed,
        init=options.init,
        learners=learners,
        shares=tuple(parts),
        corpus=check_data(learners[0]),
        options=as_told(options),
    )


def loopback() -> str:
    """Name of the interface over which ranks of one machine talk."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), "lo")


class ParallelRun:
    """Starts the ranks and watches them. One that dies ends the run: the others cannot step without it."""

    def __init__(self, plan: ParallelPlan, *, say: Say, on_step: Callable[[StepRow], None]) -> None:
        self._plan = plan
        self._say = say
        self._on_step = on_step
        self._children: dict[str, Child] = {}
        self._signals = Signals()
        self._ours = False
        self._gone = False
        steps = plan.run_dir / "steps"
        self.logs = {train.name: StepReader(step_log_path(steps, train.name, 1)) for train in plan.learners}

    def run(self) -> Outcome:
        """Until all ranks have ended; none is left behind."""
        with self._signals:
            existed = self._plan.run_dir.exists()
            try:
                self._begin()
            except BaseException as error:
                self._kill_all()
                if self._ours:
                    remove_run(self._plan.run_dir, keep=existed)
                if isinstance(error, OSError):
                    raise unwritable(self._plan.run_dir, error) from error
                raise
            try:
                return self._watch()
            finally:
                self._kill_all()
                self._follow()
                self._pids_changed()

    def _begin(self) -> None:
        plan = self._plan
        take_directory(plan.run_dir, plan.settings())
        self._ours, self._inode = True, plan.run_dir.stat().st_ino
        write_recipe(plan.run_dir, plan.learners[0], plan.options)
        for train, share in zip(plan.learners, plan.shares, strict=True):
            environ = thread_environment(share.threads, os.environ) | {"GLOO_SOCKET_IFNAME": loopback()}
            log = plan.run_dir / "logs" / f"{train.name}.log"
            child = Child(name=train.name, spec=rank_spec(plan, train, share), log=log, environ=environ)
            self._children[train.name] = child
            child.start()
        self._pids_changed()
        self._say(f"run {plan.run_id} in {plan.run_dir}: {len(plan.learners)} ranks, one mean gradient in each step")

    def _watch(self) -> Outcome:
        while True:
            time.sleep(POLL_S)
            self._follow()
            if self._hear_signals():
                return Outcome(EXIT_INTERRUPTED, KILLED)
            if self._directory_is_gone() and self._signals.count:
                return Outcome(EXIT_FAILED, f"{gone_text(self._plan.run_dir)}, and it was stopped")
            dead = [child for child in self._children.values() if child.code not in (None, 0, ENDED_INTERRUPTED)]
            if dead and self._signals.count:
                return Outcome(EXIT_INTERRUPTED, STOPPED)
            if dead:
                return Outcome(EXIT_FAILED, self._blame())
            if not any(child.running for child in self._children.values()):
                return self._ended()

    def _ended(self) -> Outcome:
        if self._signals.count:
            return Outcome(EXIT_INTERRUPTED, STOPPED)
        stopped = any(child.code == ENDED_INTERRUPTED for child in self._children.values())
        return Outcome(EXIT_INTERRUPTED, RANK_STOPPED) if stopped else Outcome(0, FINISHED)

    def _directory_is_gone(self) -> bool:
        gone, self._gone = self._gone, is_gone(self._plan.run_dir, self._inode)
        if self._gone and not gone:
            self._say(f"{gone_text(self._plan.run_dir)}; Ctrl-C ends it")
        return self._gone

    def _hear_signals(self) -> bool:
        """The first signal asks every rank to stop, and they agree on the step; True at the second."""
        if not self._signals.news():
            return False
        if self._signals.count > 1:
            return True
        self._say("stopping: all ranks end after the same step and the model is written; once more kills")
        for child in self._children.values():
            child.signal(signal.SIGINT)
        return False

    def _follow(self) -> None:
        for name, log in self.logs.items():
            rows = log.follow()
            if name == self._plan.learners[0].name:
                for row in rows:
                    self._on_step(row)

    def _blame(self) -> str:
        """Who died: not those who only lost another rank."""
        deadline = time.monotonic() + CULPRIT_WAIT_S
        while True:
            dead = [child for child in self._children.values() if child.code not in (None, 0)]
            guilty = [child for child in dead if child.code != ENDED_RANK_LOST]
            if guilty or time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        child = (guilty or dead)[0]
        said = f": {child.last_error()}" if child.code is not None and child.code > 0 else ""
        ended = f"rank {child.name} ended ({describe_exit(child.code)}){said}"
        return f"{ended}; mode={DATA_PARALLEL} cannot go on without it, and no model is written"

    def _kill_all(self) -> None:
        """A rank in an all-reduce hears no gentle signal."""
        for child in self._children.values():
            child.signal(signal.SIGKILL)
        for child in self._children.values():
            child.wait(KILL_WAIT_S)

    def _pids_changed(self) -> None:
        if self._ours and self._plan.run_dir.exists():
            write_pids(self._plan.run_dir / "processes.json", self._children)


def rank_spec(plan: ParallelPlan, train: TrainConfig, share: Share) -> dict[str, Any]:
    """What a rank's process is told."""
    config = {key: os.fspath(value) if isinstance(value, Path) else value for key, value in asdict(train).items()}
    return {
        "role": "rank",
        "train": config,
        "cores": list(share.cores),
        "steps": plan.steps,
        "run_id": plan.run_id,
        "rendezvous": os.fspath((plan.run_dir / "rendezvous").absolute()),
        "init": os.fspath(plan.init) if plan.init is not None else "",
    }


def versions() -> dict[str, str]:
    """For summary.json."""
    import platform

    import torch

    return {"atoll": __version__, "python": platform.python_version(), "torch": torch.__version__}
