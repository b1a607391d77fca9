"""An observer beside a run: the held-out loss of the merged model, again and again, in evals.jsonl.

A process of its own at nice 10 with one thread. All its CPU time, imports included, stays within SHARE of what the
machine has had since the run began; only the first evaluation may come before that is earned. Nothing waits for it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.errors import ConfigError, NothingMergedError, OvertakenError, RunError
from atoll.launch.durations import duration_s
from atoll.store.evals import EvalLine, append_eval
from atoll.store.merged import MergedModel, MergedReader

SHARE = 0.02
"""Of the CPU time of all cores that the run may use."""
RESERVE_S = 0.7
"""For looking whether there is something new, and for the end of the process: 0.5 s were seen."""
NICE = 10
POLL_S = 2.0
OFF = "0"


@dataclass(frozen=True, slots=True)
class EvalEvery:
    """How often: one of both is 0."""

    seconds: float = 0.0
    slots: int = 0


def eval_every(text: str) -> EvalEvery | None:
    """`30s` or `10m`: so often; `24`: every 24 slots; `0`: never (None). ConfigError for anything else."""
    text = text.strip()
    if text.isascii() and text.isdigit():
        slots = int(text[:20])
        return EvalEvery(slots=slots) if slots else None
    try:
        return EvalEvery(seconds=duration_s("eval_every", text))
    except ConfigError as error:
        raise ConfigError(f"{error}, or a number of slots; {OFF} turns it off") from None


@dataclass(frozen=True, slots=True)
class Budget:
    """At most `share` of `cores` since `began_s`."""

    cores: int
    began_s: float
    share: float = SHARE

    def earned_s(self, spent_s: float) -> float:
        """When `spent_s` of CPU time is within the budget."""
        return self.began_s + (spent_s + RESERVE_S) / (self.share * self.cores)


class Evaluator:
    """When to evaluate, and what comes of it. Clocks and the evaluation itself are handed in."""

    def __init__(
        self,
        reader: MergedReader,
        every: EvalEvery,
        budget: Budget,
        evaluate: Callable[[MergedModel], tuple[float, int]],
        append: Callable[[EvalLine], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.process_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._reader = reader
        self._every = every
        self._budget = budget
        self._evaluate = evaluate
        self._append = append
        self._clock = clock
        self._cpu = cpu
        self._sleep = sleep
        self._due_s = -math.inf
        self._cost_s = 0.0
        self._slot = -1
        self._hash = ""
        self._told = False

    def run(self) -> None:
        """Until the run is over."""
        while not self._reader.over:
            self.look()
            now_s = self._clock()
            self._sleep(min(POLL_S, max(POLL_S / 4, self._due_s - now_s)))

    def look(self) -> None:
        """Evaluate, where it is time, it is paid for, and there is something new."""
        if self._clock() < self._due_s:
            return
        before_s = self._cpu()
        if self._cost_s and self._clock() < self._budget.earned_s(before_s + self._cost_s):
            return
        try:
            slot = self._reader.newest_slot()
            if self._slot >= 0 and slot < self._slot + max(1, self._every.slots):
                return
            self._work(before_s)
        except (NothingMergedError, OvertakenError):
            return
        finally:
            self._cost_s = max(self._cost_s, self._cpu() - before_s)

    def _work(self, before_s: float) -> None:
        started_s = self._clock()
        model = self._reader.read()
        if model.hash != self._hash:
            loss, batches = self._evaluate(model)
            if math.isfinite(loss):
                cost_s = self._cpu() - before_s
                self._note(EvalLine(slot=model.slot, loss=loss, batches=batches, cpu_s=cost_s, hash=model.hash))
            else:
                print(f"slot {model.slot}: the held-out loss is {loss}", flush=True)
        self._slot, self._hash = model.slot, model.hash
        self._due_s = started_s + self._every.seconds

    def _note(self, line: EvalLine) -> None:
        """A loss that finds no room on the disk is dropped; the next one may."""
        try:
            self._append(line)
        except OSError as error:
            if not self._told:
                print(f"atoll: losses on the way cannot be written ({error}); these are dropped", flush=True)
            self._told = True


def run_evaluator(spec: dict[str, Any]) -> int:
    """Evaluate one run to its end; 0."""
    os.nice(NICE)
    import torch

    from atoll.core.layout import fingerprint
    from atoll.recipes.data import load_corpus
    from atoll.recipes.evaluate import evaluate
    from atoll.recipes.model import build_model
    from atoll.tensors.names import specs_of

    torch.set_num_threads(1)
    run_dir, length, batches = Path(spec["run_dir"]), spec["length"], spec["batches"]
    corpus = load_corpus(*spec["data"])
    net = build_model(spec["model"], 0)
    ours = fingerprint(specs_of(net))

    def loss_of(model: MergedModel) -> tuple[float, int]:
        if model.fingerprint != ours:
            raise RunError(f"the run does not train model={spec['model']!r}; start it with --eval-every {OFF}")
        net.load_state_dict(dict(model.tensors), strict=False)
        return evaluate(net, corpus, batches=batches, length=length), batches

    budget = Budget(spec["machine_cores"], spec["began_s"])
    every = EvalEvery(**spec["every"])
    Evaluator(MergedReader(run_dir), every, budget, loss_of, lambda line: append_eval(run_dir, line)).run()
    return 0
