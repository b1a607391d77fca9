"""`atoll sim fuzz`: many random worlds, one for each seed; what fails is printed, kept as a file and made smaller."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from math import isfinite
from pathlib import Path

from atoll.errors import ConfigError, RunError
from atoll.sim.coverage import gaps, report
from atoll.sim.draw import draw
from atoll.sim.plan import Plan
from atoll.sim.scenario import dumps
from atoll.sim.search import Outcome, outcome, outcome_of
from atoll.sim.shrink import shrink
from atoll.watch.lines import count

SEVERITY = {"ok": (0, 0), "crash": (1, 1), "liveness": (2, 5), "safety": (3, 4)}
"""Kind -> (rank, exit status). The worst of a search decides: safety, then liveness, then a crash."""
EXIT_GAPS = 6
EXIT_INTERRUPTED = 130
FAILURES_DIR = Path("sim-failures")
KEPT_MAX = 5
"""Failures of a search that are printed whole, kept as files and made smaller."""
SHRINK_BUDGET_S = 60.0
PROGRESS_S = 10.0
TABLE_SEEDS_MIN = 20
"""A shorter search prints no coverage, unless it is to be judged by it."""
GAPS_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Fuzz:
    """Run random worlds; each seed draws set-up and faults. Prints what a failing seed drew and how to repeat it.

    The plan of a failure is made smaller and written to sim-failures/, at most 5 of a search, one of each sort.

    Exit status: 0 all clean, 2 bad input, 4 a safety rule was broken, 5 no progress after healing, 1 a crash (the first
    of these that applies), 6 with --gate: something was met too seldom, 130 interrupted.
    """

    seeds: int = 100
    """How many worlds."""
    seed: int = 0
    """The first seed; the others follow."""
    minutes: float | None = None
    """Stop after so long, however many seeds are left."""
    jobs: int = os.cpu_count() or 1
    """Processes."""
    no_shrink: bool = False
    """Leave the plans of failures as they were drawn."""
    gate: bool = False
    """What was met too seldom is an error."""


@dataclass(slots=True)
class Tally:
    """What a search has seen."""

    done: int = 0
    slots: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    coverage: Counter[tuple[str, str]] = field(default_factory=Counter)
    kept: dict[str, Outcome] = field(default_factory=dict)
    """The first failure of each sort."""

    def add(self, outcome: Outcome) -> bool:
        """True if it is a failure of a new sort that is to be kept."""
        self.done += 1
        self.slots += outcome.slots
        self.kinds[outcome.kind] += 1
        self.coverage.update(outcome.coverage)
        if outcome.kind == "ok" or outcome.sort in self.kept or len(self.kept) >= KEPT_MAX:
            return False
        self.kept[outcome.sort] = outcome
        return True

    @property
    def failed(self) -> int:
        return self.done - self.kinds["ok"]

    @property
    def code(self) -> int:
        """Exit status of the worst outcome."""
        return max((SEVERITY[kind] for kind, number in self.kinds.items() if number), default=(0, 0))[1]

    def verdict(self) -> str:
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(self.kinds.items()) if kind != "ok")
        return f"{self.failed} failed ({kinds})" if self.failed else "clean"


def fuzz(options: Fuzz) -> int:
    """The exit status of the search."""
    _check(options)
    tally, began_s, interrupted = Tally(), time.monotonic(), False
    try:
        _search(options, tally, began_s)
        if not options.no_shrink:
            for failure in tally.kept.values():
                _shrink(failure)
    except KeyboardInterrupt:
        interrupted = True
    spent_s = time.monotonic() - began_s
    code = _summary(options, tally, spent_s, judged=not interrupted)
    return EXIT_INTERRUPTED if interrupted else code


def _check(options: Fuzz) -> None:
    for name in ("seeds", "jobs"):
        if getattr(options, name) < 1:
            raise ConfigError(f"{name}={getattr(options, name)} must be at least 1")
    if options.seed < 0:
        raise ConfigError(f"seed={options.seed} must be at least 0")
    if options.minutes is not None and not (isfinite(options.minutes) and options.minutes > 0):
        raise ConfigError(f"minutes={options.minutes} must be a number above 0")
    folder = FAILURES_DIR if FAILURES_DIR.exists() else FAILURES_DIR.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{FAILURES_DIR} cannot be written, and failures are kept there; run where it can")


# ---------------------------------------------------------------- the search


def _search(options: Fuzz, tally: Tally, began_s: float) -> None:
    """Run seeds until all are done or the time is over; failures are told at once."""
    until_s = began_s + 60 * options.minutes if options.minutes is not None else float("inf")
    said_s = began_s
    with _outcomes(range(options.seed, options.seed + options.seeds), options.jobs) as outcomes:
        for found in outcomes:
            now_s = time.monotonic()
            if found is not None:
                if tally.add(found):
                    _tell_failure(found)
                elif found.kind != "ok":
                    print(f"seed {found.seed}: {found.kind} again: {found.said}", flush=True)
            if now_s >= said_s + PROGRESS_S:
                said_s = now_s
                rate = 60 * tally.done / (now_s - began_s)
                print(f"{tally.done} of {options.seeds} seeds, {rate:.0f} a minute, {tally.verdict()}", flush=True)
            if now_s >= until_s:
                return


@contextmanager
def _outcomes(seeds: range, jobs: int) -> Iterator[Iterator[Outcome | None]]:
    """Outcomes as they come, None now and then while none does."""
    if jobs == 1:
        yield map(outcome, seeds)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(seeds)), mp_context=context, initializer=_as_worker)
    try:
        yield _from_pool(pool, iter(seeds), 4 * jobs)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.terminate()


def _from_pool(pool: ProcessPoolExecutor, seeds: Iterator[int], ahead: int) -> Iterator[Outcome | None]:
    """At most `ahead` seeds are handed out at a time. RunError where a worker died."""
    running = {pool.submit(outcome, seed) for seed in islice(seeds, ahead)}
    while running:
        done, running = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
        try:
            found = [future.result() for future in done]
            running |= {pool.submit(outcome, seed) for seed in islice(seeds, len(done))}
        except BrokenProcessPool:
            raise RunError("a worker process died (killed, or out of memory?); try again with --jobs 1") from None
        yield from found or [None]


def _as_worker() -> None:
    """Ctrl-C is for the parent; without the parent a worker ends, even where the parent was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ---------------------------------------------------------------- failures


def _tell_failure(failure: Outcome) -> None:
    """What was drawn, what happened, how to repeat it; the plan is kept as a file at once."""
    plan = draw(failure.seed)
    print("\n".join(plan.describe()))
    print(f"{failure.kind}: {failure.text}")
    print(f"repeat with: atoll sim fuzz --seeds 1 --seed {failure.seed} --jobs 1", flush=True)
    _keep(failure, plan)


def _file_of(failure: Outcome) -> Path:
    return FAILURES_DIR / f"{failure.kind}-{failure.seed}.toml"


def _keep(failure: Outcome, plan: Plan) -> None:
    path, about = _file_of(failure), f"Seed {failure.seed}: {failure.kind}: {failure.said}"
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(dumps(plan, about), encoding="utf-8")
    except OSError as error:
        print(f"{path} cannot be written: {error.strerror}; the search goes on", flush=True)


def _shrink(failure: Outcome) -> None:
    began_s = time.monotonic()
    drawn = draw(failure.seed)
    small = shrink(drawn, failure.sort, outcome=outcome_of, budget_s=SHRINK_BUDGET_S)
    _keep(replace(failure, text=outcome_of(small).text), small)
    print(
        f"seed {failure.seed} made smaller in {time.monotonic() - began_s:.0f} s: {_size(drawn)} -> {_size(small)}\n"
        f"repeat with: atoll sim run {_file_of(failure)}",
        flush=True,
    )


def _size(plan: Plan) -> str:
    faults, learners = count(len(plan.faults), "fault"), count(len(plan.learners), "learner")
    return f"{faults}, {learners}, {count(plan.settings['steps'], 'step')}"


# ---------------------------------------------------------------- the end


def _summary(options: Fuzz, tally: Tally, spent_s: float, *, judged: bool) -> int:
    """Print the whole; the exit status."""
    missing = gaps(tally.coverage, tally.done) if tally.done else []
    if options.gate or tally.done >= TABLE_SEEDS_MIN:
        _coverage(tally, missing, shown=len(missing) if options.gate else GAPS_SHOWN)
    minutes = spent_s / 60
    end = "" if judged else ", interrupted"
    print(
        f"{tally.done} seeds in {minutes:.1f} min ({tally.done / max(minutes, 1e-9):.0f} a minute), "
        f"{tally.slots / max(tally.done, 1):.1f} slots per seed, {tally.verdict()}{end}",
        flush=True,
    )
    return tally.code or (EXIT_GAPS if options.gate and missing else 0)


def _coverage(tally: Tally, missing: list[str], *, shown: int) -> None:
    """The table, and what was met too seldom."""
    for line in report(tally.coverage, tally.done):
        print(line)
    for gap in missing[:shown]:
        print(f"met too seldom: {gap}")
    if len(missing) > shown:
        print(f"met too seldom: {len(missing) - shown} more; --gate lists them all")
