"""A place on the processor behind the training processes of the same machine."""

from __future__ import annotations

import contextlib
import os


def yield_to_training() -> None:
    """Do not interrupt a running thread the moment there is something to do; a few ms later is early enough.

    Linux: the batch class, which does not preempt at wake-up and keeps its share of the processor. Elsewhere nothing.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
