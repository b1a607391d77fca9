"""The committed state of every piece, in handles, and what members are told of it (protocol R6)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from atoll.core.context import Context
from atoll.core.contributions import NormHistory
from atoll.core.members import Member, Roster
from atoll.core.messages import Life, Merged, UpdateReady, Version


@dataclass(slots=True)
class PieceState:
    """The committed state of a piece."""

    version: Version
    slot: int = 0
    """That made this version."""
    settled_slot: int = 0
    """Newest that is settled, empty ones too."""
    update_hash: str = ""
    update_bytes: int = 0
    newest_merged: dict[Life, int] = field(default_factory=dict)
    history: NormHistory = field(default_factory=NormHistory)


class Pieces:
    """All pieces of the model, by index."""

    def __init__(self, ctx: Context, roster: Roster) -> None:
        self._ctx = ctx
        self._roster = roster
        self._states = [PieceState(Version(1, 0)) for _ in range(ctx.config.fragments)]

    def __getitem__(self, index: int) -> PieceState:
        return self._states[index]

    def __iter__(self) -> Iterator[PieceState]:
        return iter(self._states)

    def versions(self) -> tuple[Version, ...]:
        """The newest committed version of every piece."""
        return tuple(state.version for state in self._states)

    def newest_merged(self, life: Life) -> tuple[Merged, ...]:
        """What the current version of every piece contains of this life."""
        return tuple(self._merged_of(life, state) for state in self._states)

    def _merged_of(self, life: Life, state: PieceState) -> Merged:
        seq = state.newest_merged.get(life)
        return Merged() if seq is None else Merged(life.generation, seq)

    def tell(self, member: Member, index: int) -> None:
        """The newest committed version of a piece, with the receiver's newest merged seq."""
        state = self._states[index]
        merged = self._merged_of(member.life, state)
        self._ctx.send(
            member.stream,
            UpdateReady(index, state.version, state.settled_slot, state.update_bytes, state.update_hash, merged),
        )

    def tell_all(self, member: Member) -> None:
        """Every piece, to one who may have heard of none."""
        for index in range(len(self._states)):
            self.tell(member, index)

    def tell_everyone(self, index: int) -> None:
        """One piece, to all who are there."""
        for member in self._roster.present():
            self.tell(member, index)
