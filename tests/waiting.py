"""Waiting for what other processes do: for a condition with a deadline, never for a time."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

DEADLINE_S = 120.0


def wait_for(
    found: Callable[[], object],
    what: str,
    *,
    of: subprocess.Popen[str] | None = None,
    deadline_s: float = DEADLINE_S,
) -> None:
    """Return once `found()` is true; fail when the deadline passes, or when the process `of` ends before."""
    stop_s = time.monotonic() + deadline_s
    while not found():
        assert of is None or of.poll() is None, (f"it ended before {what}", of.communicate())
        assert time.monotonic() < stop_s, f"waited {deadline_s} s for {what}"
        time.sleep(0.05)
