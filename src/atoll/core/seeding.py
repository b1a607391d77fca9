"""Version 0 (protocol R22): from a file, or from one learner that the syncer names; from another, if it goes or stalls.

A seeder is given a lease in which nothing moves, and twice as long after each turn: copying a large model may take
longer than a lease, and two that are named in turn must not keep each other from ending.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.core.context import Context
from atoll.core.events import CommitSeed, DropSeed, Publish, SeedArrived, SeedCommitted
from atoll.core.members import Member, Roster
from atoll.core.messages import Life, SeedRequest
from atoll.core.pieces import Pieces
from atoll.core.records import SeedLine

TURNS_MAX = 10
"""After so many the time that a seeder is given grows no more."""


class Seeding:
    """Who hands version 0 in, and how far that is. `expel` puts out who hands in what cannot be used."""

    def __init__(self, ctx: Context, roster: Roster, pieces: Pieces, expel: Callable[[Member, str], None]) -> None:
        self._ctx = ctx
        self._roster = roster
        self._pieces = pieces
        self._expel = expel
        self.done = False
        self.from_file = False
        self._seeder: Life | None = None
        self._arrived: set[int] = set()
        self._committing = False
        self._moved_ns = 0
        self._turns = 0

    @property
    def _open(self) -> bool:
        return not (self.done or self.from_file or self._committing)

    def advance(self) -> None:
        """Name a learner, or another."""
        if not self._open:
            return
        current = self._roster.by_life(self._seeder) if self._seeder is not None else None
        present = self._roster.present()
        if current is None or not current.present:
            self._name(present)
        elif self._ctx.now_ns >= self._deadline_ns:
            self._stalled(current, [member for member in present if member is not current])

    def _stalled(self, current: Member, others: list[Member]) -> None:
        """It is here and hands nothing in: the next one is named, in turn."""
        told = f"first parameters are awaited from {current.life.name}, which sent nothing for"
        told += f" {self._patience_ns / 1e9:.0f} s"
        self._moved_ns = self._ctx.now_ns
        self._turns += 1
        if not others:
            self._ctx.notice(f"{told}; nobody else is there")
            return
        later = [member for member in others if member.life > current.life]
        chosen = (later or others)[0]
        self._ctx.notice(f"{told}; now {chosen.life.name} is asked")
        self._name([chosen])

    def _name(self, candidates: list[Member]) -> None:
        """The first of them; what another had handed in is forgotten."""
        if self._seeder is not None:
            self._seeder = None
            self._arrived.clear()
            self._ctx.act(DropSeed())
        for member in candidates[:1]:
            self._seeder = member.life
            self._moved_ns = self._ctx.now_ns
            self._ctx.send(member.stream, SeedRequest())

    def tell_again(self, member: Member) -> None:
        """It is back on a new stream."""
        if self._seeder == member.life:
            self._ctx.send(member.stream, SeedRequest())

    def moved(self, life: Life) -> None:
        """Bytes of this life move."""
        if life == self._seeder:
            self._moved_ns = self._ctx.now_ns

    def overslept(self, gap_ns: int) -> None:
        """The syncer itself stood still."""
        self._moved_ns += gap_ns

    def arrived(self, event: SeedArrived) -> None:
        """A piece of version 0 is whole."""
        if self.done or self._committing or event.life != self._seeder:
            return
        if not (event.hash_ok and event.finite):
            member = self._roster.by_life(event.life) if event.life is not None else None
            if member is not None:
                self._expel(member, "its first parameters are not finite or arrived damaged")
            return
        self._arrived.add(event.piece)
        self._moved_ns = self._ctx.now_ns
        if len(self._arrived) == self._ctx.config.fragments:
            self._committing = True
            self._ctx.act(CommitSeed())

    def committed(self, event: SeedCommitted) -> None:
        """Version 0 is on disk: everybody is told."""
        self.done = True
        self._committing = False
        for index, piece in enumerate(self._pieces):
            piece.update_hash, piece.update_bytes = event.update_hashes[index], event.update_bytes[index]
            self._ctx.act(Publish(index, piece.version))
        source = self._seeder.name if self._seeder is not None else "file"
        self._ctx.write(SeedLine(self._ctx.now_ns, source, event.update_hashes))
        for member in self._roster.present():
            self._pieces.tell_all(member)

    @property
    def _patience_ns(self) -> int:
        return self._ctx.config.lease_interval_ns << min(self._turns, TURNS_MAX)

    @property
    def _deadline_ns(self) -> int:
        return self._moved_ns + self._patience_ns

    def next_deadline_ns(self) -> int | None:
        """When a seeder has had its time."""
        return self._deadline_ns if self._open and self._seeder is not None else None
