"""Cores and threads for processes that share a machine (hazard 32). Standard library only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.errors import ConfigError

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Share:
    """What one learner gets of the machine."""

    threads: int
    cores: tuple[int, ...]
    """Empty: no affinity is set."""


def machine_cores() -> tuple[int, ...]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def shares(learners: int, cores: tuple[int, ...], threads: int | None = None) -> list[Share]:
    """One share per learner.

    Fewer learners than cores: neighbouring cores of their own, as many threads. Else one thread each, pinned round
    robin where every core gets the same number; where not, the operating system balances.
    threads: what the user wants; ConfigError above the number of cores.
    """
    count = len(cores)
    if threads is not None and not 1 <= threads <= count:
        raise ConfigError(f"threads={threads} must be between 1 and the {count} cores of this machine")
    if learners >= count:
        pinned = learners % count == 0 and threads in (None, 1)
        return [Share(threads or 1, (cores[i % count],) if pinned else ()) for i in range(learners)]
    each = count // learners
    if threads is not None and threads > each:
        return [Share(threads, ()) for _ in range(learners)]
    return [Share(threads or each, cores[i * each : (i + 1) * each]) for i in range(learners)]


def thread_environment(threads: int, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with thread counts that numerical libraries read at import."""
    return {**environ, **dict.fromkeys(THREAD_VARIABLES, str(threads))}


def pin(cores: tuple[int, ...]) -> None:
    """Keep this process to `cores`, where the system can."""
    if cores and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)
