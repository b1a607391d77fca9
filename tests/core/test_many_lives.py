"""A thousand learners come and go: what the syncer's machine holds does not grow with lives that are over."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import pytest

from atoll.core import events as ev
from atoll.core import members, records
from atoll.core.messages import Leave, Timings
from tests.core.helpers import MS, Bench, S

LIVES = 1000
CONTAINERS = (list, tuple, set, frozenset, dict, deque)


def sizes(root: Any) -> dict[str, int]:
    """Path -> length of everything that the machine holds, found by walking its attributes."""
    found: dict[str, int] = {}
    seen: set[int] = set()

    def walk(thing: Any, path: str) -> None:
        if id(thing) in seen or path.count(".") > 12:
            return
        seen.add(id(thing))
        if isinstance(thing, CONTAINERS):
            found[path] = found.get(path, 0) + len(thing)
            for inner in [*thing.values(), *thing.keys()] if isinstance(thing, dict) else list(thing):
                walk(inner, f"{path}[]")
        elif type(thing).__module__.startswith("atoll."):
            names = getattr(thing, "__dict__", None) or {
                f.name: None for f in (dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ())
            }
            for name in names:
                walk(getattr(thing, name, None), f"{path}.{name}")

    walk(root, "core")
    return found


def one_life(bench: Bench, name: str, how: str) -> None:
    """It joins, something of it is merged, and something is on its way when it ends."""
    bench.join(name)
    slot = bench.core.slots.reached + 1
    first = bench.announce(name, 1, slot, steps=2, anchor=bench.core.pieces[slot % 2].version)
    bench.arrive(name, first)
    bench.report(name, 2)
    bench.pass_ns(100 * MS)
    if how == "leaves":
        bench.say(name, Leave("over", bench.counters(2), Timings()))
    elif how == "breaks":
        bench.report(name, 1)  # counters run backwards
    bench.feed(ev.StreamClosed(bench.streams[name]))
    if how == "dies":
        bench.pass_ns(10 * S)


@pytest.mark.parametrize("how", ["leaves", "dies", "breaks"])
@pytest.mark.parametrize("names", [1, 7, LIVES])
def test_thousand_lives__leave_nothing_in_the_machine(names: int, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "NAMES_MAX", 20)
    bench = Bench(steps=10**6, lease_interval_ns=5 * S, learners_max=20)
    bench.join("stays")
    marks, merged = [], 0
    for index in range(LIVES):
        one_life(bench, f"n{index % names}", how)
        bench.beat("stays", 0)
        merged += sum(any(end.merged) for end in bench.written(records.LifeEndLine))
        bench.actions.clear()
        if index in (LIVES // 2, LIVES - 1):
            marks.append(sizes(bench.core))
    middle, last = marks
    grown = {path: (middle.get(path, 0), size) for path, size in last.items() if size > 1.2 * middle.get(path, 0) + 8}
    assert not grown
    assert merged > LIVES / 2, "it was work that was merged"


def test_sizes__sees_what_grows() -> None:
    bench = Bench()
    before = sizes(bench.core)
    bench.join("a")
    after = sizes(bench.core)
    assert sum(after.values()) > sum(before.values())
