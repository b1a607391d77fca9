"""`atoll sim fuzz`: the real core in random virtual worlds, to find what no run on real machines would show."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.cli.parse import parse
from atoll.errors import ConfigError
from atoll.sim.fuzz import NoProgress, draw, run_plan

EXIT_CODES = {"ok": 0, "crash": 1, "safety": 4, "liveness": 5}


@dataclass(frozen=True, kw_only=True)
class Fuzz:
    """Run random worlds; each seed draws set-up and faults. Prints what a failing seed drew and how to repeat it.

    Exit status: 0 all clean, 1 a crash, 4 a safety rule was broken, 5 no progress after healing.
    """

    seeds: int = 100
    """How many worlds."""
    seed: int = 0
    """The first seed; the others follow."""
    minutes: float | None = None
    """Stop after so long, however many seeds are left."""
    jobs: int = os.cpu_count() or 1
    """Processes."""


def outcome(seed: int) -> tuple[int, str, str]:
    """(seed, ok | crash | safety | liveness, what happened)."""
    try:
        run_plan(draw(seed))
    except NoProgress as error:
        return seed, "liveness", str(error)
    except AssertionError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return seed, "safety", f"{error} ({frame.filename.rpartition('/')[2]}:{frame.lineno})"
    except Exception:
        return seed, "crash", traceback.format_exc().strip()
    return seed, "ok", ""


def main(argv: Sequence[str]) -> int:
    """The worst outcome's exit status."""
    if not argv or argv[0] != "fuzz":
        said = " ".join(argv) or "nothing"
        raise ConfigError(f"sim has one command, fuzz, not {said}; try `atoll sim fuzz --seeds 100`")
    options = parse(Fuzz, "sim fuzz", argv[1:])
    if options.seeds < 1 or options.jobs < 1 or options.seed < 0:
        raise ConfigError(
            f"seeds={options.seeds} and jobs={options.jobs} must be at least 1, seed={options.seed} at least 0"
        )
    started, worst, done = time.monotonic(), 0, 0
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        seeds = range(options.seed, options.seed + options.seeds)
        for seed, kind, text in pool.imap_unordered(outcome, seeds, chunksize=4):
            done += 1
            if kind != "ok":
                worst = max(worst, EXIT_CODES[kind])
                print("\n".join(draw(seed).describe()))
                print(f"{kind}: {text}\nrepeat with: atoll sim fuzz --seeds 1 --seed {seed} --jobs 1", flush=True)
            if options.minutes is not None and time.monotonic() - started > 60 * options.minutes:
                pool.terminate()
                break
    minutes = (time.monotonic() - started) / 60
    print(f"{done} seeds in {minutes:.1f} min ({done / minutes:.0f} a minute), {'clean' if not worst else 'NOT clean'}")
    return worst
