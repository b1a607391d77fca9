"""How fast a tape becomes a read model: lines per second, whole and line by line as they come.

    python benchmarks/fold.py                       # 1,000,000 lines of 8 learners
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro
from common import circumstances

from atoll.core.config import RunConfig
from atoll.core.records import (
    ClosedLine,
    MemberLine,
    Merge1,
    PublishedLine,
    QuorumLine,
    Record,
    ReportLine,
    RunLine,
    SlotLine,
    StartLine,
)
from atoll.store.tape import encode_line
from atoll.watch.read import Follower, fold_run
from atoll.watch.status import status
from atoll.watch.view import RunView

FRAGMENTS, STEPS_PER_SLOT, STEP_NS = 8, 3, 100_000_000
HASH = "0" * 32


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write such a tape, fold it, say how long it took."""

    lines: int = 1_000_000
    learners: int = 8
    redraws: int = 1000
    """Full status pictures made meanwhile, as a live view does."""


def tape(options: Options) -> Iterator[Record]:
    """An even run: per slot a report of each learner, then quorum, closed, slot and published."""
    per_slot = options.learners + 4
    slots = options.lines // per_slot
    settings = RunConfig(
        run_id="fold",
        steps=slots * STEPS_PER_SLOT,
        fragments=FRAGMENTS,
        interval=FRAGMENTS * STEPS_PER_SLOT,
        learners=options.learners,
    ).to_dict()
    yield RunLine(1, 0, "", settings, "f", (1_000_000,) * FRAGMENTS, {}, ())
    names = [f"l{i}" for i in range(options.learners)]
    for name in names:
        yield MemberLine(0, name, 1, "joining", "ready", "reported")
    yield StartLine(0, tuple(names), "all")
    for slot in range(1, slots + 1):
        yield from one_slot(slot, names)


def one_slot(slot: int, names: list[str]) -> Iterator[Record]:
    """Its lines, in order."""
    now_ns, steps, piece = slot * STEPS_PER_SLOT * STEP_NS, slot * STEPS_PER_SLOT, slot % FRAGMENTS
    for name in names:
        yield ReportLine(now_ns, name, 1, steps, 1000 * steps, 2000.0 * steps, steps)
    count = len(names)
    yield QuorumLine(now_ns, slot, count // 2, count, now_ns, 0, STEP_NS, 0, 0)
    yield ClosedLine(now_ns, slot, piece, "no grace", 0, count, count, tuple((name, 1, slot) for name in names))
    merged = tuple(Merge1(name, 1, slot, (0, 0), 24, 24_000, steps, 1.0, HASH, 1.0, 0.7) for name in names)
    n = slot // FRAGMENTS
    hashes = (HASH, HASH, HASH)
    yield SlotLine(now_ns, slot, piece, (0, n), (0, n + 1), merged, *hashes, 1.0, 0, 0, 0.3, 1.2)
    yield PublishedLine(now_ns, slot, piece, (0, n + 1))


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name)
        with (run_dir / "tape.jsonl").open("wb") as file:
            count = 0
            for count, record in enumerate(tape(options), 1):
                file.write(encode_line(count - 1, record))
        began_s = time.perf_counter()
        view = fold_run(run_dir)
        whole_s = time.perf_counter() - began_s
        view, every = RunView(), max(1, count // options.redraws)
        began_s = time.perf_counter()
        for index, record in enumerate(Follower(run_dir).records()):
            view.feed(record)
            if index % every == 0:
                status(view)
        live_s = time.perf_counter() - began_s
    print(circumstances())
    print(f"{count:,} lines, {view.slots_closed:,} slots: folded in {whole_s:.1f} s ({count / whole_s:,.0f} lines/s)")
    print(f"with {options.redraws} status pictures meanwhile: {live_s:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
