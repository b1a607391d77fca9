"""What people are told of learners that count other units than the rest, or leave with work that is not merged."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_high, median_low
from typing import TYPE_CHECKING

from atoll.core.context import Context

if TYPE_CHECKING:
    from atoll.core.members import Member, Roster

UNITS_FACTOR = 8
"""Tokens per step so far from the others' are other units."""
SAID_SHARE = 0.01
"""Of a life's work: what the end of a run always leaves is not worth a line."""
STEPS_MIN = 8
"""Before so many steps a mean says nothing."""


def _tokens_per_step(member: Member) -> float | None:
    heard = member.account.heard
    return heard.tokens / heard.steps if heard.steps >= STEPS_MIN else None


def other_units(own: float | None, others: Sequence[float]) -> float | None:
    """Tokens per step in the middle of the others, where `own` is of other units than these; else None.

    Of two middles the nearer one counts: one of three that is wrong must not make the other two look it.
    """
    if not own or not others:
        return None
    for middle in (median_low(others), median_high(others)):
        if not middle or 1 / UNITS_FACTOR < own / middle < UNITS_FACTOR:
            return None
    return median_low(others)


def remark_on_units(ctx: Context, roster: Roster, member: Member) -> None:
    """Once per life: it counts far more or far fewer tokens per step than the others."""
    own = _tokens_per_step(member)
    if own is None or member.units_told:
        return
    others = [(m, each) for m in roster if m is not member and (each := _tokens_per_step(m)) is not None]
    middle = other_units(own, [each for _, each in others])
    if middle is None:
        return
    member.units_told = True
    whom = "the others"
    if len(others) == 1:  # which of the two is wrong, nobody knows: one line for both
        [(other, _)] = others
        other.units_told, whom = True, f"learner {other.life.name}"
    ctx.notice(
        f"learner {member.life.name} counts {own:.6g} tokens per step, {whom} {middle:.6g}: tokens are the weight in "
        "the merge, so if the batches are alike let all count the same unit in `step(tokens)`"
    )


def _refused(count: int) -> str:
    return f"; {count} contribution{'' if count == 1 else 's'} of it had been refused" if count else ""


def remark_on_leaving(ctx: Context, member: Member) -> None:
    """How much of an ended life is not merged, by the size of fragments."""
    heard, sizes = member.account.heard, ctx.layout.piece_sizes
    lost = sum(size * gone for size, gone in zip(sizes, member.account.lost_at_end(), strict=True))
    whole = heard.tokens * sum(sizes)
    if lost > SAID_SHARE * whole:
        ctx.notice(
            f"learner {member.life.name} ended ({member.end_reason}) with {100 * lost / whole:.1f}% of its work not "
            f"merged: {lost / sum(sizes):,.0f} of {heard.tokens:,} tokens are lost{_refused(member.refusals)}"
        )
