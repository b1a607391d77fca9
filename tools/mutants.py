"""Do the random worlds notice when the core is wrong? Run them against every mutant of tests/mutants/mutants.toml.

A mutant is a small wrong change to one module of the core. Each is loaded in a fresh process in place of its module and
meets one world after another until one fails: it is killed. One that survives breaks a rule that nobody guards.

Every mutant meets a few worlds first, then those that are left meet the rest, so that most answers come early. A world
in which the unchanged core fails too kills nobody. Exit status: 0 all killed, 1 some survived, 2 bad input.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import multiprocessing
import signal
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from statistics import median
from types import CodeType
from typing import Any

MUTANTS = Path(__file__).parent.parent / "tests" / "mutants" / "mutants.toml"
FIRST_SEEDS = 20
"""Worlds that every mutant meets before any meets more."""
TEXT_MAX = 100
SEED_LIMIT_S = 120
"""A world that takes so long hangs: by far more than any that ends."""


class BadInput(Exception):
    """What the user must change."""


class Hang(BaseException):
    """A world did not end in time. No Exception, so that nothing on the way takes it for a failure of its own."""


@dataclass(frozen=True)
class Mutant:
    """One wrong change: `old` occurs once in `module` and becomes `new`."""

    name: str
    rules: list[str]
    module: str
    old: str
    new: str
    why: str


@dataclass(frozen=True)
class Result:
    """What became of a mutant: the kind of failure ("" if none), in which world, after how many."""

    kind: str
    seed: int
    tried: int
    text: str


class MutantLoader(SourceFileLoader):
    """Loads a module from changed source; compiled files are neither read nor written."""

    def __init__(self, mutant: Mutant, path: str) -> None:
        super().__init__(mutant.module, path)
        source = Path(path).read_text("utf-8")
        if source.count(mutant.old) != 1:
            raise BadInput(f"mutant {mutant.name}: `old` occurs {source.count(mutant.old)} times in {mutant.module}")
        self._changed = source.replace(mutant.old, mutant.new)

    def get_source(self, fullname: str) -> str:
        return self._changed

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._changed.encode(), self.path)


class MutantFinder(MetaPathFinder):
    """Stands before all other finders and answers for one module."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self.used = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = MutantLoader(self._mutant, spec.origin)
        self.used = True
        return spec


def _hang(signum: int, frame: object) -> None:
    raise Hang


def hunt(mutant: Mutant | None, seeds: range) -> Result:
    """In a fresh process: the first of `seeds` whose world fails. Without a mutant: of the unchanged core."""
    assert not any(name.split(".")[0] == "atoll" for name in sys.modules), "the process is not fresh"
    finder = MutantFinder(mutant) if mutant is not None else None
    sys.meta_path[:0] = [finder] if finder is not None else []
    outcome = importlib.import_module("atoll.sim.search").outcome
    signal.signal(signal.SIGALRM, _hang)
    assert finder is None or finder.used, "the worlds do not use this module"
    for tried, seed in enumerate(seeds, start=1):
        try:
            signal.alarm(SEED_LIMIT_S)
            result = outcome(seed)
            signal.alarm(0)
        except Hang:
            return Result("hang", seed, tried, f"no end after {SEED_LIMIT_S} s")
        if result.kind != "ok":
            return Result(result.kind, seed, tried, str(result.text).strip().partition("\n")[0][:TEXT_MAX])
    return Result("", seeds.stop - 1, len(seeds), "")


class Hunt:
    """Runs mutants side by side and prints each as it finishes; the unchanged core runs aside, not behind them all."""

    def __init__(self, pool: ProcessPoolExecutor, aside: ProcessPoolExecutor) -> None:
        self._pool, self._aside = pool, aside
        self._unchanged: dict[int, Future[Result]] = {}
        self.needed: dict[str, int] = {}
        """Worlds that it took to kill a mutant, by name."""

    def round(self, mutants: Iterable[Mutant], seeds: range, before: int, *, last: bool) -> list[Mutant]:
        """Let `mutants` meet `seeds` after `before` others; returns those that were not killed."""
        running = {self._pool.submit(hunt, mutant, seeds): mutant for mutant in mutants}
        left = []
        for future in as_completed(running):
            mutant, result = running[future], future.result()
            tried = before + result.tried
            who = f"{mutant.name} [{' '.join(mutant.rules)}]:"
            if result.kind and self._fails_unchanged(result.seed):
                print(f"{who} SURVIVED, since the unchanged core fails at seed {result.seed} too", flush=True)
            elif result.kind:
                self.needed[mutant.name] = tried
                print(f"{who} {result.kind} at seed {result.seed} after {tried} seeds: {result.text}", flush=True)
            else:
                left.append(mutant)
                if last:
                    print(f"{who} SURVIVED {tried} seeds", flush=True)
        return left

    def _fails_unchanged(self, seed: int) -> bool:
        if seed not in self._unchanged:
            self._unchanged[seed] = self._aside.submit(hunt, None, range(seed, seed + 1))
        return bool(self._unchanged[seed].result().kind)


def table(mutants: list[Mutant], needed: dict[str, int]) -> str:
    """Per rule: how many mutants, how many were killed, and the worlds that it took."""
    by_rule: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        for rule in mutant.rules:
            by_rule[rule].append(mutant)
    rows = ["rule  mutants  killed  seeds: median  max"]
    for rule in sorted(by_rule, key=lambda r: (r[0] != "R", int(r[1:]))):
        seeds = [needed[m.name] for m in by_rule[rule] if m.name in needed]
        figures = f"{median(seeds):>13g}  {max(seeds):>3}" if seeds else f"{'-':>13}  {'-':>3}"
        rows.append(f"{rule:<4}  {len(by_rule[rule]):>7}  {len(seeds):>6}  {figures}")
    return "\n".join(rows)


def load() -> list[Mutant]:
    return [Mutant(**values) for values in tomllib.loads(MUTANTS.read_text("utf-8"))["mutant"]]


def choose(mutants: list[Mutant], names: list[str] | None) -> list[Mutant]:
    """The mutants of these names; all where none is given."""
    known = {mutant.name: mutant for mutant in mutants}
    for name in names or []:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise BadInput(f"no mutant is named {name!r}; the nearest is {near[0]!r}")
    return [known[name] for name in dict.fromkeys(names)] if names else mutants


def main() -> int:
    parser = argparse.ArgumentParser(description="Run random worlds against mutants of the core.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants, not all")
    parser.add_argument("--seeds", type=int, default=500, help="worlds that a mutant may survive (default 500)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once (default 2)")
    args = parser.parse_args()
    began = time.monotonic()
    try:
        if args.seeds < 1 or args.jobs < 1:
            raise BadInput("--seeds and --jobs must be at least 1")
        mutants = choose(load(), args.only)
        fresh = partial(ProcessPoolExecutor, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1)
        with fresh(args.jobs) as pool, fresh(1) as aside:
            hunts = Hunt(pool, aside)
            first, end = args.seed + min(FIRST_SEEDS, args.seeds), args.seed + args.seeds
            left = hunts.round(mutants, range(args.seed, first), 0, last=first == end)
            if left and first < end:
                hunts.round(left, range(first, end), first - args.seed, last=True)
    except BadInput as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    print(table(mutants, hunts.needed))
    print(f"{len(hunts.needed)} of {len(mutants)} mutants were killed in {time.monotonic() - began:.0f} s")
    return 0 if len(hunts.needed) == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
