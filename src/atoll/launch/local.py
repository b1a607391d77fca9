"""One machine: a syncer and M learners as processes, watched to the end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll.core.records import PhaseLine, PublishedLine, Record
from atoll.errors import RunError
from atoll.launch.child import ENDED_DIVERGED
from atoll.launch.cores import Share, machine_cores, thread_environment
from atoll.launch.options import OPTIONS_FILE
from atoll.launch.prepare import Plan
from atoll.launch.processes import Child, Patience, Signals, describe_exit, write_pids
from atoll.recipes.loop import TrainConfig
from atoll.recipes.muon import MUON_LR
from atoll.store.files import write_atomic
from atoll.store.rundir import RECIPE_FILE, gone_text, is_gone, open_rundir, remove_run, toml_bytes
from atoll.store.tape import read_tape
from atoll.watch.lines import count
from atoll.wire.channel import format_address

POLL_S = 0.1
LISTEN_WAIT_S = 60.0
JOIN_TIMEOUT_S = 120.0
NAME_WAIT_S = 30.0
GOODBYE_S = 10.0
KILL_WAIT_S = 5.0
EVALUATOR_GRACE_S = 0.5
EVAL_BATCHES = 8
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}

FINISHED = "finished"
STOPPED = "stopped by a signal"
KILLED = "killed by a second signal; no model is written"
SYNCER_STOPPED = "stopped by a signal to its syncer"
SYNCER_KILLED = "the syncer was ended by a signal before it was done; no model is written"

Say = Callable[[str], None]
OnRecord = Callable[[Record], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: exit status 0, 1 (it failed) or 130 (stopped), and what to say about it (docs/ENDS.md)."""

    code: int
    reason: str


class LocalRun:
    """Starts, watches, restarts, stops."""

    def __init__(self, plan: Plan, *, say: Say, on_record: OnRecord) -> None:
        self._plan = plan
        self._say = say
        self._on_record = on_record
        self._children: dict[str, Child] = {}
        self._patience: dict[str, Patience] = {}
        self._restart_at: dict[str, float] = {}
        self._done: set[str] = set()
        self._diverged: set[str] = set()
        self._signals = Signals()
        self._ours = False
        self._gone = False
        self._stopped = False
        self._tape_bytes = 0
        self._tape_lines = 0
        self._phase = "waiting"
        self._running_s: float | None = None
        self._published_slot = 0
        self._evaluator: Child | None = None
        self._evaluator_told = False
        self._syncer_dead = ""
        self._failure = ""

    # ------------------------------------------------------------ from start to end

    def run(self) -> Outcome:
        """Until the run is over. RunError where it could not start: then nothing of it is left behind."""
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
                self._end_evaluator()
                self._kill_all()
                self._follow()
                self._pids_changed()

    def _begin(self) -> None:
        plan = self._plan
        self._began_s = time.monotonic()
        rundir = open_rundir(plan.run_dir, plan.config.run_id)
        self._ours = True
        self._inode = plan.run_dir.stat().st_ino
        (plan.run_dir / "logs").mkdir(exist_ok=True)
        write_recipe(plan.run_dir, plan.learners[0], plan.options)
        self._tape = rundir.tape
        syncer = self._child("syncer", self._syncer_spec(), threads=1)
        syncer.start()
        self._pids_changed()
        address = self._await_listening(syncer)
        for train, share in zip(plan.learners, plan.shares, strict=True):
            self._patience[train.name] = Patience()
            self._child(train.name, learner_spec(train, share, address, plan.config.run_id), threads=share.threads)
            self._children[train.name].start()
        self._pids_changed()
        learners = count(len(plan.learners), "learner")
        self._say(f"run {plan.config.run_id} in {plan.run_dir}: syncer at {address}, {learners}")

    def _child(self, name: str, spec: Mapping[str, Any], *, threads: int) -> Child:
        environ = thread_environment(threads, os.environ)
        for own in ("ATOLL_ADDRESS", "ATOLL_NAME", "ATOLL_TOKEN_FILE"):
            environ.pop(own, None)
        environ["ATOLL_TOKEN"] = self._plan.token
        log = self._plan.run_dir / "logs" / f"{name}.log"
        child = Child(name=name, spec=spec, log=log, environ=environ)
        self._children[name] = child
        return child

    def _syncer_spec(self) -> dict[str, Any]:
        plan = self._plan
        return {
            "role": "syncer",
            "run_dir": os.fspath(plan.run_dir),
            "settings": plan.config.to_dict(),
            "host": plan.host,
            "port": plan.port,
            "init": os.fspath(plan.init) if plan.init is not None else "",
            "keep_contributions": plan.keep_contributions,
            "listening": os.fspath(self._listening),
        }

    @property
    def _listening(self) -> Path:
        return self._plan.run_dir / "listening.json"

    def _await_listening(self, syncer: Child) -> str:
        deadline = time.monotonic() + LISTEN_WAIT_S
        while not self._listening.exists():
            if self._signals.count:
                raise KeyboardInterrupt
            if not syncer.running:
                raise RunError(f"the syncer did not start ({describe_exit(syncer.code)}): {syncer.last_error()}")
            if time.monotonic() > deadline:
                raise RunError(f"the syncer did not start within {LISTEN_WAIT_S:.0f} s; is the machine overloaded?")
            time.sleep(POLL_S / 2)
        found = json.loads(self._listening.read_text())
        return format_address(LOOPBACK_OF.get(found["host"], found["host"]), found["port"])

    # ------------------------------------------------------------ the watch

    def _watch(self) -> Outcome:
        syncer = self._children["syncer"]
        while True:
            time.sleep(POLL_S)
            self._look_for_directory()
            self._follow()
            if self._hear_signals():
                return Outcome(EXIT_INTERRUPTED, KILLED)
            if self._gone and self._signals.count:
                return Outcome(EXIT_FAILED, f"{gone_text(self._plan.run_dir)}, and it was stopped")
            self._look_after_learners()
            self._look_after_evaluator()
            if not syncer.running and not self._syncer_dead:
                if syncer.code == EXIT_INTERRUPTED and not self._signals.count:
                    return Outcome(EXIT_FAILED, SYNCER_KILLED)
                if syncer.code in (0, EXIT_INTERRUPTED):
                    return self._goodbye()
                self._mourn_syncer(syncer)
            if self._syncer_dead and not self._learners_running():
                return Outcome(EXIT_FAILED, self._syncer_dead)
            nobody = len(self._done) == len(self._plan.learners) and self._phase in ("waiting", "running")
            if nobody and not self._failure and not self._syncer_dead:
                self._failure = "no learner is left"
                self._say("no learner is left; the run ends with what was merged")
                syncer.signal(signal.SIGINT)

    def _look_for_directory(self) -> None:
        gone, self._gone = self._gone, is_gone(self._plan.run_dir, self._inode)
        if self._gone and not gone:
            self._say(f"{gone_text(self._plan.run_dir)}; it goes on where it comes back, Ctrl-C ends it")

    def _hear_signals(self) -> bool:
        """The first signal stops the syncer cleanly; True at the second."""
        if not self._signals.news():
            return False
        if self._signals.count > 1:
            return True
        syncer = self._children["syncer"]
        if self._syncer_dead:
            self._say("stopping: learners leave")
            for name in self._patience:
                self._children[name].signal(signal.SIGTERM)
        else:
            self._say("asked to stop; once more kills, and no model is written")
            syncer.signal(signal.SIGINT)
        return False

    def _follow(self) -> None:
        """Read what the tape has more of."""
        if not hasattr(self, "_tape") or not self._tape.exists():
            return
        for entry in read_tape(self._tape, self._tape_bytes, self._tape_lines):
            self._tape_bytes, self._tape_lines = entry.stop_bytes, entry.i + 1
            if isinstance(entry.record, PhaseLine):
                self._phase = entry.record.phase
                self._stopped |= entry.record.reason.startswith("stopped")
                self._running_s = time.monotonic() if self._phase == "running" else self._running_s
            if isinstance(entry.record, PublishedLine):
                self._published_slot = max(self._published_slot, entry.record.slot)
            if entry.record is not None:
                self._on_record(entry.record)

    def _learners_running(self) -> bool:
        return any(self._children[name].running for name in self._patience)

    def _mourn_syncer(self, syncer: Child) -> None:
        self._restart_at.clear()
        how = describe_exit(syncer.code)
        self._syncer_dead = f"the syncer died ({how}); nothing was merged after that"
        said = f": {syncer.last_error()}" if syncer.code is not None and syncer.code > 0 else ""
        self._say(f"the syncer died ({how}); learners train on, nothing is merged any more{said}")
        self._pids_changed()

    # ------------------------------------------------------------ learners

    def _look_after_learners(self) -> None:
        for name in self._patience:
            child = self._children[name]
            if name in self._done or child.running:
                continue
            if name not in self._restart_at:
                self._learner_ended(child)
            elif time.monotonic() >= self._restart_at[name]:
                del self._restart_at[name]
                child.start()
                self._say(f"learner {name} is started again")
                self._pids_changed()

    def _learner_ended(self, child: Child) -> None:
        name, code = child.name, child.code
        self._pids_changed()
        if code == ENDED_DIVERGED:
            self._diverged.add(name)
            self._done.add(name)
            self._say(f"learner {name} stopped for good: {child.last_error()}")
            return
        ending = self._phase not in ("waiting", "running") or self._signals.count or self._failure or self._syncer_dead
        if code == 0 or ending:
            self._done.add(name)
            if code and self._syncer_dead:
                self._say(f"learner {name} ended: {child.last_error() or describe_exit(code)}")
            return
        how = describe_exit(code) + (f": {child.last_error()}" if code and code > 0 else "")
        delay_s = self._patience[name].after(time.monotonic() - child.started_s)
        if delay_s is None:
            self._done.add(name)
            self._say(f"learner {name} ended again ({how}) and is given up; its log is {child.log}")
            return
        self._restart_at[name] = time.monotonic() + delay_s
        self._say(f"learner {name} ended ({how}); it is started again in {delay_s:.1f} s")

    # ------------------------------------------------------------ evaluator

    @property
    def evaluator_cpu_s(self) -> float:
        """What the evaluator has cost, once it has ended."""
        return 0.0 if self._evaluator is None else self._evaluator.cpu_s

    def _look_after_evaluator(self) -> None:
        """Start it when its first evaluation is due, so that a short run never pays for it; say it once if it dies."""
        if self._evaluator is None:
            if self._evaluation_is_due():
                self._evaluator = self._child("evaluator", self._evaluator_spec(), threads=1)
                # It talks to nobody.
                self._evaluator.environ = {k: v for k, v in self._evaluator.environ.items() if k != "ATOLL_TOKEN"}
                self._evaluator.start()
                self._pids_changed()
        elif not self._evaluator.running and not self._evaluator_told:
            self._evaluator_told = True
            if self._evaluator.code:
                said = self._evaluator.last_error()
                how = describe_exit(self._evaluator.code) + (f": {said}" if said else "")
                self._say(f"the evaluator ended ({how}); the run goes on without evaluations")

    def _evaluation_is_due(self) -> bool:
        evals = self._plan.evals
        if evals is None or self._running_s is None or self._phase != "running" or self._syncer_dead:
            return False
        if evals.slots:
            return self._published_slot >= evals.slots
        return time.monotonic() - self._running_s >= evals.seconds

    def _evaluator_spec(self) -> dict[str, Any]:
        train = self._plan.learners[0]
        assert self._plan.evals is not None
        return {
            "role": "evaluator",
            "run_dir": os.fspath(self._plan.run_dir),
            "model": train.model,
            "data": list(train.data),
            "length": train.preset().length,
            "batches": EVAL_BATCHES,
            "every": asdict(self._plan.evals),
            "machine_cores": len(machine_cores()),
            "began_s": self._began_s,
        }

    def _end_evaluator(self) -> None:
        """It is never waited for."""
        if self._evaluator is not None:
            self._evaluator.signal(signal.SIGTERM)
            if not self._evaluator.wait(EVALUATOR_GRACE_S):
                self._evaluator.signal(signal.SIGKILL)

    # ------------------------------------------------------------ the end

    def _goodbye(self) -> Outcome:
        """The syncer is done: learners have heard so, or came too late to matter."""
        self._restart_at.clear()
        deadline = time.monotonic() + GOODBYE_S
        while self._learners_running() and time.monotonic() < deadline and self._signals.count < 2:
            time.sleep(POLL_S)
        if self._failure:
            return Outcome(EXIT_FAILED, self._failure)
        if self._signals.count:
            return Outcome(EXIT_INTERRUPTED, STOPPED)
        self._follow()
        return Outcome(EXIT_INTERRUPTED, SYNCER_STOPPED) if self._stopped else Outcome(0, FINISHED)

    def _kill_all(self) -> None:
        """Nobody outlives the launcher: first gently, then not."""
        for child in self._children.values():
            child.signal(signal.SIGTERM if self._signals.count < 2 else signal.SIGKILL)
        deadline = time.monotonic() + KILL_WAIT_S
        for child in self._children.values():
            if not child.wait(max(0.0, deadline - time.monotonic())):
                child.signal(signal.SIGKILL)
                child.wait(KILL_WAIT_S)

    def _pids_changed(self) -> None:
        if self._ours and self._plan.run_dir.exists():
            write_pids(self._plan.run_dir / "processes.json", self._children)


def unwritable(run_dir: Path, error: OSError) -> RunError:
    """A run that cannot begin for want of room, rights or a sound file system."""
    return RunError(f"run directory {str(run_dir)!r} cannot be written ({error.strerror or error}); choose another")


def write_recipe(run_dir: Path, train: TrainConfig, options: Mapping[str, Any]) -> None:
    """What is to be known to use the model, and to make such a run again."""
    write_atomic(run_dir / RECIPE_FILE, toml_bytes(recipe_of(train)))
    write_atomic(run_dir / OPTIONS_FILE, toml_bytes(options))


def recipe_of(train: TrainConfig) -> dict[str, str | int | float]:
    """The content of RECIPE_FILE."""
    preset = train.preset()
    return {
        "model": train.model,
        "data": json.dumps(list(train.data)),
        "batch": preset.batch,
        "length": preset.length,
        "inner_lr": preset.lr,
        "inner": train.inner,
        **({"muon_lr": train.muon_lr or MUON_LR} if train.inner == "muon" else {}),
    }


def learner_spec(train: TrainConfig, share: Share, address: str, run_id: str) -> dict[str, Any]:
    """What a learner process is told."""
    config = {key: os.fspath(value) if isinstance(value, Path) else value for key, value in asdict(train).items()}
    join = {"address": address, "run": run_id, "timeout_s": JOIN_TIMEOUT_S, "name_wait_s": NAME_WAIT_S}
    return {"role": "learner", "train": config, "join": join, "cores": list(share.cores)}
