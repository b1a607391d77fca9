"""What becomes of a contribution, and how its learner hears of it (protocol R6).

Merged is told by the update that contains it. Missed and refused go on the tape and to the learner, now and whenever it
announces the same again.
"""

from __future__ import annotations

from typing import NamedTuple

from atoll.core.causes import FAR_NORM, is_power_of_two, likely_cause, with_cause
from atoll.core.context import Context
from atoll.core.contributions import Contribution
from atoll.core.events import Discard
from atoll.core.members import Member, Roster
from atoll.core.messages import LATE_ANNOUNCEMENT, LATE_BYTES, Announce, Fate
from atoll.core.records import FateLine


class Verdict(NamedTuple):
    """Why a contribution is not merged."""

    fate: str
    reason: str
    late: str = ""
    """What came too late, for the learner's forecast."""


ENDING = Verdict("missed", "the run is ending")
BYTES_LATE = Verdict("missed", "its bytes were not in when collecting ended", LATE_BYTES)
DAMAGED = Verdict("refused", "its bytes do not match their hash")
NOT_FINITE = Verdict("refused", "it is not finite")
MERGE_NOT_FINITE = Verdict("refused", "the merge was not finite")


def had_closed(slot: int) -> Verdict:
    """It was announced for a slot that no longer takes any."""
    return Verdict("missed", f"slot {slot} had closed", LATE_ANNOUNCEMENT)


class Fates:
    """Ends contributions; each gets exactly one fate."""

    def __init__(self, ctx: Context, roster: Roster) -> None:
        self._ctx = ctx
        self._roster = roster

    def settle(self, contribution: Contribution, verdict: Verdict) -> None:
        """Missed or refused: on the tape, told to the learner, bytes freed."""
        contribution.move(verdict.fate)
        member = self._close(contribution)
        self.tell(member, contribution.announce, verdict)
        self._roster.close_books(member)

    def raised(self, contribution: Contribution, usual: float) -> None:
        """Its norm is far above what is usual now, and it is taken (R25): said at the first and at each doubling."""
        member = self._roster.by_life(contribution.life)
        assert member is not None, "a life outlives its open contributions"
        member.raised += 1
        if is_power_of_two(member.raised):
            times = contribution.norm_per_step / usual
            self._ctx.notice(
                f"work of learner {member.life.name} on fragment {contribution.announce.piece} is {times:.0f} times as "
                f"large as is usual now, and taken, as the run has seen as much before; {member.raised} so far "
                f"({likely_cause(FAR_NORM)})"
            )

    def merged(self, contribution: Contribution) -> None:
        """Its slot is committed and it is part of it."""
        contribution.move("merged")
        member = self._close(contribution)
        member.account.merged[contribution.announce.piece] += contribution.announce.c_tokens
        member.missed_pieces.clear()
        self._roster.close_books(member)

    def tell(self, member: Member, announce: Announce, verdict: Verdict) -> None:
        """On the tape and to the learner; remembered, in case that it asks again."""
        self._ctx.write(
            FateLine(
                self._ctx.now_ns,
                announce.slot,
                announce.piece,
                member.life.name,
                member.life.generation,
                announce.seq,
                announce.c_tokens,
                verdict.fate,
                verdict.reason,
            )
        )
        self._say(member, announce, verdict)
        message = Fate(announce.piece, announce.seq, announce.slot, *verdict)
        member.last_fate[announce.piece] = message
        self._ctx.send(member.stream, message)

    def _say(self, member: Member, announce: Announce, verdict: Verdict) -> None:
        """For people: the first refusal of a life and each doubling; once for a round in which all was missed."""
        name, fragments = member.life.name, self._ctx.config.fragments
        if verdict.fate == "refused":
            member.refusals += 1
            if is_power_of_two(member.refusals):
                self._ctx.notice(
                    f"work of learner {name} was refused: {announce.c_tokens} tokens on fragment {announce.piece}, "
                    f"{member.refusals} so far: {with_cause(verdict.reason)}"
                )
        elif verdict is not ENDING and member.state != "ended":
            before = len(member.missed_pieces)
            member.missed_pieces.add(announce.piece)
            if before < len(member.missed_pieces) == fragments and fragments > 1:
                self._ctx.notice(
                    f"learner {name} missed a whole round: nothing of it was merged while each of {fragments} "
                    f"fragments was missed; the last: {with_cause(verdict.reason)}"
                )

    def _close(self, contribution: Contribution) -> Member:
        """Nothing more is expected of it."""
        piece = contribution.announce.piece
        self._ctx.act(Discard(contribution.life, piece, contribution.announce.seq))
        member = self._roster.by_life(contribution.life)
        assert member is not None, "a life outlives its open contributions"
        found = member.open.pop(piece, None)
        assert found is contribution, "one contribution per piece has no fate"
        return member
