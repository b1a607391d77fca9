"""The learning rate as a pure function of progress, so that late, slow and returned learners train at the
run's rate."""

from __future__ import annotations

import math

FLOOR = 0.1


def rate_factor(progress: float, *, warmup: float) -> float:
    """Share of the peak rate at `progress` in 0..1 of the run (protocol R22): never 0.

    Linear from 10% to 100% over the first `warmup` (a share of the run), then a cosine down to 10% at the
    end.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return FLOOR + (1 - FLOOR) * progress / warmup
    if warmup >= 1:
        return 1.0
    through = (progress - warmup) / (1 - warmup)
    return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * through)) / 2


def rewarm_factor(own_step: int, *, steps: int, joined_at: float, warmup: float) -> float:
    """A second factor for a learner that joined at progress `joined_at`, after the run's warm-up:
    (own_step+1)/steps.

    Its moments may be fresh; `own_step` counts from 0 in this generation. 1.0 for everybody else, and
    afterwards.
    """
    if joined_at <= warmup or own_step >= steps:
        return 1.0
    return (own_step + 1) / steps
