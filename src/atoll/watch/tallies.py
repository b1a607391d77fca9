"""Small sums that a RunView is made of."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from atoll.core.records import LifeEndLine

OF_THE_END = "the run is ending"
"""No reason that a setting could change: every run ends."""
TRAIN_LOSS_SHARE = 0.1
POINTS_MAX = 800
"""Of one learner's losses."""
PACE_SHARE = 0.3
"""Weight of the newest report in a life's speed."""


@dataclass(slots=True)
class Share:
    """contributors / ready, summed over slots."""

    total: float = 0.0
    slots: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.slots += 1

    @property
    def mean(self) -> float | None:
        return self.total / self.slots if self.slots else None


@dataclass(slots=True)
class LifeView:
    """One life of a learner, as far as the tape tells."""

    pieces: int
    state: str = "joining"
    steps: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    merged: list[int] = field(default_factory=list)
    """c_tokens per piece of published contributions."""
    end: LifeEndLine | None = None
    reported_ns: int | None = None
    clock: int = 0
    """Steps that count for the slot in progress, as the syncer gave them (R2)."""
    step_ns: float = 0.0
    """Own step, moving average; 0 while unknown."""
    tokens_per_s: float = 0.0
    """Moving average."""
    last_merged: int = 0
    """Newest slot into which it was merged; 0: none."""
    ready_since: int = 0
    """Newest slot that had closed when it became ready."""
    last_fate: str = ""
    """Of its newest contribution with a fate: merged, or why not."""
    refused: int = 0
    refused_tokens: int = 0
    """Token-pieces."""
    last_refusal: str = ""
    missed_pieces: set[int] = field(default_factory=set)
    """Since something of it was merged."""
    missed_rounds: int = 0
    """How often that came to be all pieces."""
    last_miss: str = ""
    stepping_ns: int = 0
    stepping_steps: int = 0

    def __post_init__(self) -> None:
        self.merged = [0] * self.pieces

    def fate(self, fate: str, piece: int, c_tokens: int, reason: str) -> None:
        """One contribution of it was not merged."""
        self.last_fate = f"{fate}: {reason}"
        if fate == "refused":
            self.refused += 1
            self.refused_tokens += c_tokens
            self.last_refusal = reason
        elif reason != OF_THE_END:
            before = len(self.missed_pieces)
            self.missed_pieces.add(piece)
            self.missed_rounds += before < len(self.missed_pieces) == self.pieces > 1
            self.last_miss = reason

    def take(self, slot: int, piece: int, c_tokens: int) -> None:
        """One contribution of it was merged."""
        self.merged[piece] += c_tokens
        self.last_merged, self.last_fate = max(self.last_merged, slot), "merged"
        self.missed_pieces.clear()

    def pace(self, span_ns: int, steps: int, tokens: int) -> None:
        """A report of so many new steps and tokens came `span_ns` after the one before."""
        if span_ns <= 0:
            return
        weight = PACE_SHARE if self.step_ns else 1.0
        self.step_ns += weight * (span_ns / steps - self.step_ns)
        self.tokens_per_s += weight * (tokens / span_ns * 1e9 - self.tokens_per_s)


@dataclass(slots=True)
class Settled:
    """A regular slot that is over: who was merged in it, among how many."""

    slot: int
    piece: int
    ready: int
    merged: int
    share: float | None
    """min(1, merged / ready); None where nobody was ready."""
    grace_ns: int
    sync_ns: int
    """From closed to settled."""


@dataclass(slots=True)
class Union:
    """Length of a union of time intervals that come with growing ends."""

    spans: list[tuple[int, int]] = field(default_factory=list)

    def add(self, start: int, stop: int) -> None:
        while self.spans and self.spans[-1][1] >= start:
            start = min(start, self.spans.pop()[0])
        self.spans.append((start, stop))

    @property
    def length(self) -> int:
        return sum(stop - start for start, stop in self.spans)


class LossCurve:
    """The losses of one learner over its lives, in at most POINTS_MAX points: when it is full, every other one goes.

    Points are sums, so a mean between any two of them is exact.
    """

    def __init__(self) -> None:
        self._points: list[tuple[int, int, float]] = []
        self._every = 1
        self._passed = 0
        self._tokens, self._loss_sum = 0, 0.0

    def add(self, now_ns: int, tokens: int, loss_sum: float) -> None:
        """So many new tokens, with the sum of their losses, were heard of."""
        if tokens <= 0:
            return
        self._tokens += tokens
        self._loss_sum += loss_sum
        self._passed += 1
        if self._passed < self._every:
            return
        self._passed = 0
        self._points.append((now_ns, self._tokens, self._loss_sum))
        if len(self._points) > POINTS_MAX:
            self._points = self._points[1::2]
            self._every *= 2

    def means(self, points_max: int = 100) -> list[tuple[int, int, float]]:
        """(ns, own tokens, mean loss since the point before), at most so many points, evenly spread."""
        step = -(-len(self._points) // points_max) or 1
        found, before = [], (0, 0, 0.0)
        for now_ns, tokens, loss_sum in self._points[step - 1 :: step]:
            found.append((now_ns, tokens, (loss_sum - before[2]) / (tokens - before[1])))
            before = now_ns, tokens, loss_sum
        return found


class RecentLoss:
    """(tokens, loss * tokens) of the newest `TRAIN_LOSS_SHARE` of all tokens; what can never count again is dropped."""

    def __init__(self) -> None:
        self._window: deque[tuple[int, float]] = deque()
        self._kept = 0
        self._total = 0

    def add(self, tokens: int, loss_sum: float) -> None:
        if tokens <= 0:
            return
        self._window.append((tokens, loss_sum))
        self._kept += tokens
        self._total += tokens
        while self._kept - self._window[0][0] >= TRAIN_LOSS_SHARE * self._total:
            self._kept -= self._window.popleft()[0]

    @property
    def mean(self) -> float | None:
        """The oldest of them counts in proportion to the part of it that is needed."""
        if not self._total:
            return None
        wanted = TRAIN_LOSS_SHARE * self._total
        first_tokens, first_loss = self._window[0]
        part = (wanted - (self._kept - first_tokens)) / first_tokens
        rest = sum(loss for _, loss in self._window) - first_loss
        return (rest + part * first_loss) / wanted
