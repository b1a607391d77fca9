"""Contributions as the syncer holds them (protocol R6, R25): from announced to their fate.

announced -> complete -> merged, or missed or refused from either. A contribution counts once, in the slot that it
names, or never.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import median
from typing import NamedTuple

from atoll.core.machine import Table
from atoll.core.messages import Announce, Life

NORM_HISTORY = 64
NORM_HISTORY_MIN = 16
NORM_FACTOR_MAX = 10.0

CONTRIBUTION = Table(
    name="contribution",
    initial="announced",
    final=frozenset({"merged", "missed", "refused"}),
    rows={
        ("announced", "arrived"): "complete",
        ("announced", "missed"): "missed",
        ("announced", "refused"): "refused",
        ("complete", "missed"): "missed",
        ("complete", "refused"): "refused",
        ("complete", "merged"): "merged",
    },
)


@dataclass(slots=True)
class Contribution:
    """One announced delta. `norm` is |Delta|, known once it is complete."""

    life: Life
    announce: Announce
    announced_at_ns: int
    progress_at_ns: int
    state: str = CONTRIBUTION.initial
    hash: str = ""
    norm: float = 0.0

    @property
    def complete(self) -> bool:
        return self.state == "complete"

    @property
    def weight(self) -> float:
        """c_tokens * (c_tokens / c_steps) (method.md, One sync slot)."""
        return self.announce.c_tokens * (self.announce.c_tokens / self.announce.c_steps)

    @property
    def norm_per_step(self) -> float:
        """|Delta| / sqrt(c_steps): comparable between contributions of different length (R25)."""
        return self.norm / sqrt(self.announce.c_steps)

    def move(self, cause: str) -> None:
        self.state = CONTRIBUTION.move(self.state, cause)


def weight_is_valid(announce: Announce) -> bool:
    """Weights are finite and positive, and no contribution claims more than its learner computed (hazard 7)."""
    steps, tokens = announce.c_steps, announce.c_tokens
    if steps < 1 or tokens < 1 or steps > announce.counters.steps or tokens > announce.counters.tokens:
        return False
    return isfinite(tokens * (tokens / steps))


class Judged(NamedTuple):
    """What a history says of the contributions to one slot."""

    refused: list[Contribution]
    raised: list[Contribution]
    """Far above what is usual now, and taken: no larger than what was usual once in this run."""
    overruled: bool
    """More than half would be refused, so none is."""
    usual: float
    """Norm per root step that is usual now; 0: not known yet."""


class NormHistory:
    """The last 64 norms *seen* for a piece, refused ones too (hazard 46: a history of accepted ones locks up)."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=NORM_HISTORY)
        self._usual_max = 0.0

    def judge(self, candidates: Sequence[Contribution]) -> Judged:
        """Judge them, then remember all of them.

        Far: norm per step above 10 times the median of at least 16 seen. Refused: far, and above the largest such
        median of this run too. Late in training honest norms are small and now and then as large as they all were
        once; those do no harm that training has not survived before. If more than half of the candidates would go,
        none does: then the history is wrong. One voice is no majority: a learner that is alone in its slot (with
        K = 1 most are) is refused, until the history has seen enough of what it sends.
        """
        usual = median(self._seen) if len(self._seen) >= NORM_HISTORY_MIN else 0.0
        self._usual_max = max(self._usual_max, usual)
        far = [c for c in candidates if usual > 0 and c.norm_per_step > NORM_FACTOR_MAX * usual]
        outside = [c for c in far if c.norm_per_step > self._usual_max]
        overruled = len(outside) > max(1, len(candidates) // 2)
        self._seen.extend(c.norm_per_step for c in candidates)
        return Judged([] if overruled else outside, [c for c in far if c not in outside], overruled, usual)
