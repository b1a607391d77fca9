"""What people are told of learners that count other units than the rest, or leave with work that is not merged."""

from __future__ import annotations

from statistics import median
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


def remark_on_units(ctx: Context, roster: Roster, member: Member) -> None:
    """Once per life: it counts far more or far fewer tokens per step than the median of the others."""
    own = _tokens_per_step(member)
    if own is None or member.units_told:
        return
    others = [each for m in roster if m is not member and (each := _tokens_per_step(m)) is not None]
    middle = median(others) if others else 0.0
    if not middle or not own or 1 / UNITS_FACTOR < own / middle < UNITS_FACTOR:
        return
    member.units_told = True
    ctx.notice(
        f"learner {member.life.name} counts {own:.6g} tokens per step, the others {middle:.6g}: tokens are its weight "
        "in the merge, so if the batches are alike let all count the same unit in `step(tokens)`"
    )


def remark_on_leaving(ctx: Context, member: Member) -> None:
    """How much of an ended life is not merged, by the size of fragments."""
    heard, sizes = member.account.heard, ctx.layout.piece_sizes
    lost = sum(size * gone for size, gone in zip(sizes, member.account.lost_at_end(), strict=True))
    whole = heard.tokens * sum(sizes)
    if lost > SAID_SHARE * whole:
        ctx.notice(
            f"learner {member.life.name} ended ({member.end_reason}) with {100 * lost / whole:.1f}% of its work not "
            f"merged: {lost // sum(sizes)} of {heard.tokens} tokens are lost"
        )
