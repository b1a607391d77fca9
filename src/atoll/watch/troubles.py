"""What went wrong with single learners: work that was refused, missed, lost, or counted in other units.

The syncer says each of these once, when it happens; here it stays to be seen, in `status`, `report` and `advise`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from atoll.core import remarks
from atoll.core.causes import with_cause
from atoll.core.remarks import SAID_SHARE, STEPS_MIN
from atoll.watch.history import GOOD_ENDS
from atoll.watch.summary import weighted
from atoll.watch.tallies import LifeView
from atoll.watch.view import RunView

TOLD_MOST = 3
"""Learners of a kind that are told one by one."""


def refused(view: RunView) -> Iterator[str]:
    """Work that the syncer did not want, of all lives of a learner."""
    for name, lives in _named(view, lambda life: life.refused > 0):
        count, tokens = sum(life.refused for life in lives), sum(life.tokens for life in lives)
        gone = min(1.0, sum(life.refused_tokens for life in lives) / max(1, view.pieces * tokens))
        what = "contribution" if count == 1 else "contributions"
        why = with_cause(lives[-1].last_refusal)
        yield f"{count} {what} of {name} refused, {gone:.1%} of what these lives computed; the last: {why}"


def missed(view: RunView) -> Iterator[str]:
    """Whole rounds of which nothing was merged."""
    for name, lives in _named(view, lambda life: life.missed_rounds > 0):
        count = sum(life.missed_rounds for life in lives)
        often = "a whole round" if count == 1 else f"{count} whole rounds"
        why = with_cause(lives[-1].last_miss)
        yield f"{name} missed {often}: each fragment once, and nothing was merged meanwhile; the last: {why}"


def other_units(view: RunView) -> Iterator[str]:
    """Learners whose tokens per step are far from the others'. The newest life counts."""
    newest = {name: life for (name, _), life in sorted(view.lives.items()) if life.steps >= STEPS_MIN}
    per_step = {name: life.tokens / life.steps for name, life in newest.items()}
    for name, own in per_step.items():
        middle = remarks.other_units(own, [each for other, each in per_step.items() if other != name])
        if middle is not None:
            yield (
                f"{name} counts {own:.6g} tokens per step, the others {middle:.6g}: tokens are the weight in the "
                "merge, so if the batches are alike let all count the same unit in `step(tokens)`"
            )


def left(view: RunView) -> Iterator[str]:
    """Learners that ended before the run with work that is not merged."""
    for name, lives in _named(view, lambda life: _lost(view, life) > SAID_SHARE * life.tokens):
        lost, tokens = sum(_lost(view, life) for life in lives), sum(life.tokens for life in lives)
        why = lives[-1].end.reason if lives[-1].end is not None else ""
        newest = max(key for key in view.lives if key[0] == name)
        who = name if view.lives[newest] is lives[-1] else f"an earlier life of {name}"
        yield (
            f"{who} ended before the run ({why}) with {lost / tokens:.1%} of its work not merged: {lost:,.0f} of "
            f"{tokens:,} tokens are lost"
        )


def first_ones(told: Iterable[str]) -> list[str]:
    """At most so many, and how many more there are."""
    found = list(told)
    more = len(found) - TOLD_MOST
    return found[:TOLD_MOST] + ([f"the same of {more} more learners: see the report"] if more > 0 else [])


def _lost(view: RunView, life: LifeView) -> float:
    """Tokens, by the size of fragments."""
    ended = life.end is not None and life.end.reason not in GOOD_ENDS
    return weighted(view, life.end.lost) if ended and life.end is not None else 0.0


def _named(view: RunView, wanted: Callable[[LifeView], bool]) -> Iterator[tuple[str, list[LifeView]]]:
    """(name, those lives of it that are wanted, oldest first), for each name that has some."""
    found: dict[str, list[LifeView]] = {}
    for (name, _), life in sorted(view.lives.items()):
        if wanted(life):
            found.setdefault(name, []).append(life)
    yield from found.items()
