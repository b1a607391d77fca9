"""Figures of the newest slots of a run: what judges and shows it now, not on the whole."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from atoll.watch.history import SlotRow
from atoll.watch.tallies import LifeView
from atoll.watch.view import RunView

ROUNDS, SLOTS_LEAST = 4, 16


@dataclass(frozen=True, slots=True)
class Window:
    """Means over the newest regular slots that are settled. None where there is nothing to take a mean of."""

    rows: list[SlotRow]
    """Oldest first."""
    participation: float | None
    kept: float | None
    """Token-pieces merged in them / computed in the meantime."""
    slot_ns: float | None
    """From one closing to the next."""
    grace_ns: float | None
    quorum_wait_ns: float | None
    sync_ns: float | None
    """From closed to settled."""
    effective_step: float | None
    """|outer step| / |merged delta|; lr / (1 - momentum) where merged deltas never change."""
    follows: float | None
    """Cosine of a merged delta with the momentum before it."""
    agreement: float | None
    """Cosine of two learners' contributions to one slot, worked out from theirs with the merged delta."""


def window(view: RunView, slots: int = 0) -> Window:
    """Of the newest `slots`; 0: so many that each piece has its turn a few times."""
    rows = newest(view, slots or max(SLOTS_LEAST, ROUNDS * view.pieces))
    gaps = [after.closed_ns - before.closed_ns for before, after in pairwise(rows)]
    made = [row for row in rows if row.merged]
    return Window(
        rows,
        mean([min(1.0, len(row.merged) / row.ready) for row in rows if row.ready]),
        kept_share(view, rows),
        mean(gaps),
        mean([row.waited_ns for row in rows]),
        mean([row.quorum_wait_ns for row in rows if row.quorum_ns]),
        mean([row.settled_ns - row.closed_ns for row in rows]),
        mean([row.step_norm / row.delta_norm for row in made if row.delta_norm and row.step_norm]),
        mean([row.follows for row in made if row.follows is not None]),
        agreement(made, view.config.merge if view.config is not None else "rda"),
    )


def newest(view: RunView, slots: int) -> list[SlotRow]:
    """The newest regular slots that are settled, oldest first."""
    found: list[SlotRow] = []
    for slot in range(view.slots_closed, 0, -1):
        row = view.history.slots.get(slot)
        if row is not None and row.settled_ns:
            found.append(row)
        if len(found) == slots:
            break
    return found[::-1]


def mean(values: list[float] | list[int]) -> float | None:
    """None of nothing."""
    return fmean(values) if values else None


def kept_share(view: RunView, rows: list[SlotRow]) -> float | None:
    """Merged token-pieces of these slots over the token-pieces computed between their closings, without those that
    learners which have come of late have on the way."""
    if len(rows) < 2:
        return None
    history = view.history
    first = bisect_left(history.loss_ns, rows[0].closed_ns)
    last = bisect_right(history.loss_ns, rows[-1].closed_ns) - 1
    computed = (history.loss_tokens[last] - history.loss_tokens[first]) * view.pieces if last > first else 0
    computed -= round(sum(on_the_way(view, life, rows) for life in view.lives.values() if life.state == "ready"))
    merged = sum(part.c_tokens for row in rows[1:] for part in row.merged)
    return min(1.0, merged / computed) if computed > 0 else None


def on_the_way(view: RunView, life: LifeView, rows: list[SlotRow]) -> float:
    """Token-pieces by which its unmerged work grew over these slots, though all goes well: at first nothing is merged,
    in the round that follows each slot merges one piece and all others wait, later as much is merged as computed."""
    tokens_slot = life.tokens / max(1, view.slots_closed - life.ready_since)
    slot_ns = (rows[-1].closed_ns - rows[0].closed_ns) / (len(rows) - 1)
    silent = 1 + (life.step_ns / slot_ns if slot_ns else 0.0)  # slots until its first contribution

    def waiting(slot: int) -> float:
        there = max(0, slot - life.ready_since)
        slots = min(max(0.0, there - silent), view.pieces)
        return (min(there, silent) + slots) * view.pieces - slots * (slots + 1) / 2

    return tokens_slot * (waiting(rows[-1].slot) - waiting(rows[0].slot))


def agreement(rows: Sequence[SlotRow], merge: str) -> float | None:
    """Mean cosine of two contributions to one slot, pairs by the product of their shares; merge: rda | average.

    The merged delta points where sum a_i u_i does: u_i are the directions, a_i the shares of the weights (of the
    weighted norms, where it is the plain average). With c_i, the cosine of each with it, R = sum a_i c_i is the length
    of that sum, and R^2 = sum a_i^2 + sum over pairs a_i a_j cos_ij. All tensors are taken together, while RDA
    goes tensor by tensor: beside cosines from kept contributions it was off by up to 0.01.
    """
    pairs = alike = 0.0
    for row in rows:
        parts = [(part.weight * (1.0 if merge == "rda" else part.norm), part.cosine) for part in row.merged]
        known = [(weight, cosine) for weight, cosine in parts if cosine is not None]
        total = sum(weight for weight, _ in known)
        if len(known) < 2 or len(known) < len(parts) or total <= 0:
            continue
        square = sum((weight / total) ** 2 for weight, _ in known)
        length = sum(weight / total * cosine for weight, cosine in known)
        pairs += 1 - square
        alike += length**2 - square
    return alike / pairs if pairs > 0 else None
