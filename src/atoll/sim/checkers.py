"""What must hold at every instant of every run. Kept apart from the system: it reads states, never changes them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from atoll.core.messages import Life
from atoll.core.records import ClosedLine, FateLine, LifeEndLine, MemberLine, QuorumLine, SlotLine

if TYPE_CHECKING:
    from atoll.sim.learner import SimLearner
    from atoll.sim.world import World


class Checkers:
    """`check` after every event, `check_end` when the run is over."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._read = 0
        self._merged: Counter[tuple[Life, int]] = Counter()
        """Tokens merged per life and piece, recounted from commits on the tape."""
        self._seen: set[tuple[Life, int]] = set()
        self._version = [0] * world.config.fragments
        self._slot_of_piece = [0] * world.config.fragments
        self._fated: set[tuple[Life, int]] = set()
        self._closed_slots: set[int] = set()
        self._quorum = 0

    def check(self) -> None:
        """Books, versions, fates."""
        self._read_tape()
        for learner in self._world.lives:
            if learner.alive:
                self._books(learner)
        self._queues()

    # ------------------------------------------------------------ the tape

    def _read_tape(self) -> None:
        tape = self._world.syncer.tape
        while self._read < len(tape):
            record = tape[self._read]
            self._read += 1
            if isinstance(record, SlotLine):
                self._slot(record)
            elif isinstance(record, FateLine):
                key = (Life(record.name, record.generation), record.seq)
                assert key not in self._seen, f"{key} was merged and then {record.fate}"
                assert key not in self._fated, f"{key} has two fates"
                self._fated.add(key)
            elif isinstance(record, MemberLine):
                assert not record.reason.startswith("expelled"), f"an honest learner was put out: {record}"
            elif isinstance(record, ClosedLine):
                assert record.slot not in self._closed_slots, f"slot {record.slot} closed twice"
                self._closed_slots.add(record.slot)
            elif isinstance(record, QuorumLine):
                assert record.slot == self._quorum + 1, "quorums come in slot order"
                self._quorum = record.slot
                assert record.grace_ns < max(record.step_ns, 1), "grace is strictly below one step"

    def _slot(self, record: SlotLine) -> None:
        piece = record.piece
        assert record.slot > self._slot_of_piece[piece], "commits of one piece happen in slot order"
        self._slot_of_piece[piece] = record.slot
        if not record.merged:
            assert record.version == record.base, "an empty slot makes no version"
            return
        assert record.version[1] == self._version[piece] + 1, "versions only grow, by one"
        self._version[piece] = record.version[1]
        ids = [(m.name, m.generation) for m in record.merged]
        assert ids == sorted(set(ids)), "inputs are in id order, one per learner"
        for merged in record.merged:
            key = (Life(merged.name, merged.generation), merged.seq)
            assert key not in self._seen, f"{key} was merged twice"
            assert key not in self._fated, f"{key} was merged after its fate"
            self._seen.add(key)
            age = record.base[1] - merged.anchor[1]
            assert 0 <= age <= self._world.config.stale_max, f"anchor of {key} is {age} versions old"
            self._merged[key[0], piece] += merged.c_tokens

    # ------------------------------------------------------------ books (R8)

    def _books(self, learner: SimLearner) -> None:
        """computed = merged + overwritten + lost + pending, with the syncer's merged and the learner's pending."""
        roster = self._world.syncer.core.roster
        member = roster.by_life(learner.life)
        if member is None:
            return
        core = learner.core
        core.book.check()
        for piece, book in enumerate(core.book.pieces):
            merged = member.account.merged[piece]
            unheard = merged - book.merged
            assert unheard >= 0, f"{learner.life} piece {piece}: the learner counts more merged than the syncer"
            assert unheard in (0, book.in_flight_tokens), (
                f"{learner.life} piece {piece}: syncer merged {merged}, learner knows {book.merged}, "
                f"in flight {book.in_flight_tokens}"
            )
            pending = book.local_tokens + book.in_flight_tokens - unheard
            assert merged + book.overwritten + book.lost + pending == core.book.tokens
            held = book.local_tokens + (0 if book.detached else book.in_flight_tokens)
            learner.body.check(piece, held, over=core.over)
        assert len(core.unsettled) <= self._world.config.fragments

    def _queues(self) -> None:
        """Every queue is bounded."""
        config = self._world.config
        core = self._world.syncer.core
        assert len(core.slots.live) <= 2 * config.fragments + 1, "slots on their way are bounded"
        for member in core.roster:
            assert len(member.open) <= config.fragments

    # ------------------------------------------------------------ the end

    def check_end(self) -> None:
        """After the finish: nothing pending, books equal, every live learner holds the final version."""
        self._read_tape()
        world = self._world
        ends = [r for r in world.syncer.tape if isinstance(r, LifeEndLine)]
        assert len({(r.name, r.generation) for r in ends}) == len(ends)
        for end in ends:
            life = Life(end.name, end.generation)
            for piece in range(world.config.fragments):
                assert end.merged[piece] == self._merged[life, piece], f"{life} piece {piece}: tape and book differ"
                total = end.merged[piece] + end.overwritten[piece] + end.lost[piece]
                assert total == end.tokens, f"{life} piece {piece}: {total} of {end.tokens} have a fate"
                assert end.lost[piece] >= 0
        granted = {Life(r.name, r.generation) for r in ends}
        assert {life for life, _ in self._merged} <= granted
        final = world.syncer.core.slots.versions()
        for learner in world.lives:
            if learner.core.ended is not None and learner.core.ended.ok and learner.core.ended.reason == "finished":
                assert tuple(learner.core.anchors) == final, f"{learner.life} does not hold the final version"
