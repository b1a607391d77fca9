"""Make a failing plan smaller while it fails in the same way: fewer faults, fewer learners, a shorter and plainer run.

Greedy: each round tries all simplifications in a fixed order and keeps each that still fails; rounds go on until one
changes nothing or the time is over. `limit_ns` and `heal_at_ns` stay: a shorter limit, or no healing, would make a run
that only needs its time look like one without progress.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from atoll.errors import ConfigError
from atoll.sim.keys import LASTING
from atoll.sim.plan import MS, Fault, LearnerSpec, Plan
from atoll.sim.scenario import config_of
from atoll.sim.search import Outcome, outcome_of

Thing = TypeVar("Thing")
DEFAULTS = {field.name: field.default for field in fields(Plan)}
PLAIN_PLAN = ("bad_share", "norms_rise", "lossy", "linger_ns", "merge_ns", "commit_ns", "learners_max", "piece_values")
PLAIN_LEARNER: dict[str, Any] = {
    "site": "",
    "jitter": 0.0,
    "tail": 0.0,
    "up_bytes_per_s": 0.0,
    "down_bytes_per_s": 0.0,
    "latency_ns": 1 * MS,
    "joins_at_ns": 0,
    "step_ns": 100 * MS,
    "tokens": 1000,
}
NEEDED_SETTINGS = ("steps", "fragments", "interval")
FOR_MIN_NS = 10 * MS
"""Faults are not made shorter than this."""


def shrink(
    plan: Plan,
    sort: str,
    *,
    outcome: Callable[[Plan], Outcome] = outcome_of,
    budget_s: float = 120.0,
    clock: Callable[[], float] = time.monotonic,
) -> Plan:
    """The smallest plan found whose outcome is of `sort`, as that of `plan` must be; what is returned was seen to.

    After `budget_s` no new run begins; the one under way is carried through.
    """
    search = _Shrinker(plan, sort, outcome, clock() + budget_s, clock)
    search.run()
    return search.plan


class _Shrinker:
    """`plan` is the smallest so far that fails; `try_out` replaces it."""

    def __init__(
        self,
        plan: Plan,
        sort: str,
        outcome: Callable[[Plan], Outcome],
        until_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.plan = plan
        self._sort = sort
        self._outcome = outcome
        self._until_s = until_s
        self._clock = clock
        self._tried = {repr(plan)}

    def run(self) -> None:
        passes = (
            self._fewer_faults,
            self._fewer_learners,
            self._shorter_run,
            self._plainer_plan,
            self._plainer_settings,
            self._fewer_fragments,
            self._fewer_sites,
            self._plainer_learners,
            self._plainer_faults,
        )
        before = None
        while before != self.plan and not self._over():
            before = self.plan
            for simplify in passes:
                simplify()

    def _over(self) -> bool:
        return self._clock() >= self._until_s

    def try_out(self, candidate: Plan) -> bool:
        """True, and the candidate is kept, if it is valid and fails as the plan does."""
        key = repr(candidate)
        if self._over() or key in self._tried or not _valid(candidate):
            return False
        self._tried.add(key)
        if self._outcome(candidate).sort != self._sort:
            return False
        self.plan = candidate
        return True

    def _first(self, candidates: Iterable[Plan]) -> bool:
        """Keep the first candidate that fails."""
        return any(self.try_out(candidate) for candidate in candidates)

    # ------------------------------------------------------------ fewer things

    def _drop(self, count: Callable[[], int], without: Callable[[int, int], Plan]) -> None:
        """All at once, then halves, quarters, ..., one by one; `without(i, j)` leaves i to j - 1 out."""
        size = count()
        while size:
            start = 0
            while start < count():
                if not self.try_out(without(start, min(start + size, count()))):
                    start += size
            size //= 2

    def _fewer_faults(self) -> None:
        def without(start: int, end: int) -> Plan:
            return replace(self.plan, faults=_cut(self.plan.faults, start, end))

        self._drop(lambda: len(self.plan.faults), without)

    def _fewer_learners(self) -> None:
        def without(start: int, end: int) -> Plan:
            return with_learners(self.plan, _cut(self.plan.learners, start, end))

        self._drop(lambda: len(self.plan.learners), without)

    def _fewer_sites(self) -> None:
        def without(start: int, end: int) -> Plan:
            sites = _cut(self.plan.sites, start, end)
            left = {site.name for site in sites}
            learners = tuple(spec if spec.site in left else replace(spec, site="") for spec in self.plan.learners)
            return replace(self.plan, sites=sites, learners=learners)

        self._drop(lambda: len(self.plan.sites), without)

    def _shorter_run(self) -> None:
        while self._first(self._shorter()):
            pass

    def _shorter(self) -> Iterator[Plan]:
        config = config_of(self.plan)
        slots = config.slots
        for fewer in dict.fromkeys((slots // 4, slots // 2, slots * 3 // 4, slots * 7 // 8, slots - 1)):
            if 0 < fewer < slots:
                yield self._with_settings(steps=fewer * config.slot_steps)

    # ------------------------------------------------------------ plainer ones

    def _with_settings(self, **settings: Any) -> Plan:
        return replace(self.plan, settings={**self.plan.settings, **settings})

    def _plainer_plan(self) -> None:
        for name in PLAIN_PLAN:
            self.try_out(replace(self.plan, **{name: DEFAULTS[name]}))

    def _plainer_settings(self) -> None:
        """Leave a setting out, so that it has its default; else a smaller whole number."""
        for name in [name for name in self.plan.settings if name not in NEEDED_SETTINGS]:
            value = self.plan.settings[name]
            rest = {key: kept for key, kept in self.plan.settings.items() if key != name}
            if not self.try_out(replace(self.plan, settings=rest)) and isinstance(value, int):
                self._first(self._with_settings(**{name: less}) for less in _smaller(value))

    def _fewer_fragments(self) -> None:
        """P and s towards 1; the number of slots stays."""
        config = config_of(self.plan)
        slots = config.slots

        def with_shape(fragments: int, slot_steps: int) -> Plan:
            return self._with_settings(fragments=fragments, interval=fragments * slot_steps, steps=slots * slot_steps)

        self._first(with_shape(fewer, config.slot_steps) for fewer in _smaller(config.fragments, first=1))
        config = config_of(self.plan)
        self._first(with_shape(config.fragments, less) for less in _smaller(config.slot_steps, first=1))

    def _plainer_learners(self) -> None:
        for name in PLAIN_LEARNER:
            plainer = [_plainer_learner(spec, name) for spec in self.plan.learners]
            if not self.try_out(replace(self.plan, learners=tuple(plainer))):
                for i, spec in enumerate(plainer):
                    self.try_out(replace(self.plan, learners=_put(self.plan.learners, i, spec)))

    def _plainer_faults(self) -> None:
        for i in range(len(self.plan.faults)):
            while self._first(
                replace(self.plan, faults=_put(self.plan.faults, i, fault)) for fault in _plainer(self.plan.faults[i])
            ):
                pass


def with_learners(plan: Plan, learners: tuple[LearnerSpec, ...]) -> Plan:
    """The plan with these learners only: no faults of the others, `quorum` and `learners` no larger than it has."""
    names = {spec.name for spec in learners}
    settings = dict(plan.settings)
    if "learners" in settings:
        settings["learners"] = min(settings["learners"], len(learners))
    if "quorum" in settings:
        settings["quorum"] = min(settings["quorum"], settings.get("learners", len(learners)))
    faults = tuple(fault for fault in plan.faults if not fault.learner or fault.learner in names)
    return replace(plan, learners=learners, settings=settings, faults=faults)


def _plainer_learner(spec: LearnerSpec, name: str) -> LearnerSpec:
    """With one field plain. Nobody is made slower: a slow run looks like one without progress."""
    plain = PLAIN_LEARNER[name]
    return replace(spec, **{name: min(plain, spec.step_ns) if name == "step_ns" else plain})


def _plainer(fault: Fault) -> Iterator[Fault]:
    """At a time instead of a state, shorter, weaker, at an earlier or rounder time: each is plainer than `fault`."""
    if fault.when:
        yield replace(fault, when="")
    if fault.kind not in LASTING and fault.for_ns:
        yield replace(fault, for_ns=0)
    if fault.for_ns // 2 >= FOR_MIN_NS:
        yield replace(fault, for_ns=fault.for_ns // 2 // MS * MS)
    if fault.factor > 2:
        yield replace(fault, factor=max(2.0, fault.factor // 2))
    if fault.at_ns >= 2000 * MS:
        yield replace(fault, at_ns=fault.at_ns // 2 // MS * MS)
    for unit_ns in (1000 * MS, 100 * MS, MS):
        if fault.at_ns % unit_ns:
            yield replace(fault, at_ns=fault.at_ns // unit_ns * unit_ns)
    if fault.for_ns % MS:
        yield replace(fault, for_ns=max(fault.for_ns // MS, 1) * MS)


def _smaller(value: int, first: int = 0) -> Iterator[int]:
    """From `first` upwards in steps that double, and the next smaller one."""
    less, step, last = first, 1, value - 1
    while less < last:
        yield less
        less, step = less + step, step * 2
    if last >= first:
        yield last


def _valid(plan: Plan) -> bool:
    try:
        config_of(plan)
    except ConfigError:
        return False
    return bool(plan.learners)


def _cut(things: tuple[Thing, ...], start: int, end: int) -> tuple[Thing, ...]:
    return things[:start] + things[end:]


def _put(things: Sequence[Thing], i: int, thing: Thing) -> tuple[Thing, ...]:
    return (*things[:i], thing, *things[i + 1 :])
