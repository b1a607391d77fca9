"""Versions grow, an update is made of what was whole and fresh, a contribution has one fate (R5, R6, R11, R25)."""

from __future__ import annotations

from collections import Counter, deque
from math import sqrt
from statistics import median
from typing import TYPE_CHECKING

from atoll.core.messages import Life, Version
from atoll.core.records import (
    FateLine,
    GrantLine,
    LifeEndLine,
    MemberLine,
    Merge1,
    NoticeLine,
    PhaseLine,
    Record,
    SlotLine,
)

if TYPE_CHECKING:
    from atoll.sim.syncer import Published
    from atoll.sim.world import World

NORMS_KEPT = 64
NORMS_LEAST = 16
NORM_FACTOR = 10.0
FAR_NORM = "is far above"
ROGUE = "rogue"
"""Names of learners that break the protocol on purpose begin so."""
SPOILT = ("it is not finite", "its bytes do not match")
NOT_FINITE = "the merge was not finite"


class Tape:
    """Counts again what the tape says."""

    def __init__(self, world: World) -> None:
        self._world = world
        pieces = world.config.fragments
        self.merged: Counter[tuple[Life, int]] = Counter()
        """Tokens merged per life and piece."""
        self.merged_in: dict[tuple[Life, int], tuple[int, int]] = {}
        """(life, seq) -> (piece, n of the version that contains it)."""
        self.fated: dict[tuple[Life, int], str] = {}
        self._newest_seq: dict[tuple[Life, int], int] = {}
        self._version = [0] * pieces
        self._slot_of_piece = [0] * pieces
        self._truth: dict[tuple[Life, int, int], tuple[bool, float]] = {}
        self._usual_max = [0.0] * pieces
        self._norms: list[deque[float]] = [deque(maxlen=NORMS_KEPT) for _ in range(pieces)]
        self._judged: dict[int, list[tuple[tuple[Life, int], float, bool]]] = {}
        """Per slot: what had a norm that was judged and was not merged: (key, norm per root step, refused)."""
        self._expected_loss: Counter[Life] = Counter()

    def version_of(self, piece: int) -> int:
        """n of the newest version."""
        return self._version[piece]

    def arrived(self, life: Life, piece: int, seq: int, *, ok: bool, norm: float) -> None:
        self._truth[life, piece, seq] = (ok, norm)

    def read(self, record: Record) -> None:
        if isinstance(record, SlotLine):
            self._slot(record)
        elif isinstance(record, FateLine):
            self._fate(record)
        elif isinstance(record, MemberLine):
            put_out = record.reason.startswith("expelled") and not record.name.startswith(ROGUE)
            assert not put_out, f"an honest learner was put out: {record}"

    # ------------------------------------------------------------ fates

    def _fate(self, record: FateLine) -> None:
        life = Life(record.name, record.generation)
        key = (life, record.seq)
        assert key not in self.merged_in, f"{key} was merged and then {record.fate}"
        assert key not in self.fated, f"{key} has two fates"
        assert record.fate in ("missed", "refused"), record.fate
        self.fated[key] = record.fate
        ok, norm = self._truth.pop((life, record.piece, record.seq), (True, 0.0))
        if record.reason.startswith(SPOILT):
            assert record.fate == "refused", f"{key} is spoilt, and {record.fate}: it would come again for ever"
        far = FAR_NORM in record.reason
        if record.fate == "refused" and not far and record.reason != NOT_FINITE and "weight" not in record.reason:
            assert not ok, f"{key} was whole and finite, and refused: {record.reason}"
        if far or record.reason == NOT_FINITE:
            per_step = norm / sqrt(self._world.checkers.shadow.steps_of(key))
            self._judged.setdefault(record.slot, []).append((key, per_step, far))

    # ------------------------------------------------------------ slots

    def _slot(self, record: SlotLine) -> None:
        piece = record.piece
        assert record.slot > self._slot_of_piece[piece], "commits of one piece happen in slot order"
        self._slot_of_piece[piece] = record.slot
        norms = [(key, self._merge1(record, merged)) for merged in record.merged for key in [self._key(merged)]]
        self._norm_history(record, norms)
        if not record.merged:
            assert record.version == record.base, "an empty slot makes no version"
            return
        assert record.base[1] == self._version[piece], "a merge starts from the newest version"
        assert record.version[1] == self._version[piece] + 1, "versions only grow, by one"
        self._version[piece] = record.version[1]
        ids = [(m.name, m.generation) for m in record.merged]
        assert ids == sorted(set(ids)), "inputs are in id order, one per learner"

    @staticmethod
    def _key(merged: Merge1) -> tuple[Life, int]:
        return Life(merged.name, merged.generation), merged.seq

    def _merge1(self, record: SlotLine, merged: Merge1) -> float:
        """One contribution of a version; returns its norm per root step."""
        key = self._key(merged)
        life, seq = key
        piece = record.piece
        assert key not in self.merged_in, f"{key} was merged twice"
        assert key not in self.fated, f"{key} was merged after its fate"
        ok, norm = self._truth.pop((life, piece, seq), (False, 0.0))
        assert ok, f"{key} was merged, and was not whole and finite"
        age = record.base[1] - merged.anchor[1]
        assert 0 <= age <= self._world.config.stale_max, f"anchor of {key} is {age} versions old"
        assert merged.weight == merged.c_tokens * (merged.c_tokens / merged.c_steps), f"weight of {key}"
        self.merged_in[key] = (piece, record.version[1])
        assert seq > self._newest_seq.get((life, piece), 0), f"{key}: seqs of one life grow"
        self._newest_seq[life, piece] = seq
        self.merged[life, piece] += merged.c_tokens
        return norm / sqrt(merged.c_steps)

    def _norm_history(self, record: SlotLine, merged: list[tuple[tuple[Life, int], float]]) -> None:
        """R25 again: the history of all seen, more than half, one voice (docs/PROTOCOL.md)."""
        others = self._judged.pop(record.slot, [])
        seen = self._norms[record.piece]
        candidates = [(key, norm, False) for key, norm in merged] + others
        middle = median(seen) if len(seen) >= NORMS_LEAST else 0.0
        self._usual_max[record.piece] = most = max(self._usual_max[record.piece], middle)
        outside = {key for key, norm, _ in candidates if middle > 0 and norm > max(NORM_FACTOR * middle, most)}
        if len(outside) > 1 and 2 * len(outside) > len(candidates):
            outside = set()
        refused = {key for key, _, far in candidates if far}
        assert refused == outside, f"slot {record.slot}: norms refused {refused}, by the history {outside}"
        seen.extend(norm for _, norm, _ in sorted(candidates))

    def published(self, piece: int, found: Published) -> None:
        """Only what is committed leaves, and it names what it contains (R6, R11)."""
        world = self._world
        safe = world.syncer.disk.safe(f"commit {piece}")
        assert safe, f"piece {piece} was published and never committed"
        commit = safe[-1]
        version = Version(1, 0) if commit is None else commit.version
        assert found.version == version, f"piece {piece}: {found.version} was published, {version} is on disk"
        assert found.version.n == self._version[piece], "what is published is the newest version"
        for member in world.syncer.core.roster:
            newest = self._newest_seq.get((member.life, piece), 0)
            told = found.merged_for(member.life)
            assert told.seq == newest, f"piece {piece} tells {member.life} of seq {told.seq}, it contains {newest}"

    # ------------------------------------------------------------ the end

    def check_end(self) -> None:
        world = self._world
        ends = [r for r in world.syncer.tape if isinstance(r, LifeEndLine)]
        lives = [Life(r.name, r.generation) for r in ends]
        assert len(set(lives)) == len(lives), "a life ends once"
        granted = {Life(r.name, r.generation) for r in world.syncer.tape if isinstance(r, GrantLine)}
        assert granted == set(lives), f"the books of {sorted(granted ^ set(lives))} are not closed"
        for end, life in zip(ends, lives, strict=True):
            self._check_life(end, life)
        final = world.syncer.core.pieces.versions()
        for learner in world.lives:
            if learner.core.ended is not None and learner.core.ended.kind == "finished":
                learner.body.check_end()
                assert tuple(learner.core.anchors) == final, f"{learner.life} does not hold the final version"
                assert tuple(learner.held) == final, f"{learner.life} did not take the final version"

    def _check_life(self, end: LifeEndLine, life: Life) -> None:
        for piece in range(self._world.config.fragments):
            assert end.merged[piece] == self.merged[life, piece], f"{life} piece {piece}: tape and book differ"
            total = end.merged[piece] + end.overwritten[piece] + end.lost[piece]
            assert total == end.tokens, f"{life} piece {piece}: {total} of {end.tokens} have a fate"
            assert end.lost[piece] >= 0
        if end.reason == "finished":
            self._check_lost(end, life)

    def _check_lost(self, end: LifeEndLine, life: Life) -> None:
        """One that stayed to the end loses only what was refused, or not in when the last round was over (R8)."""
        tape = self._world.syncer.tape
        if any(isinstance(r, NoticeLine) and "did not wait longer" in r.text for r in tape):
            return
        last_round_ns = next(r.now_ns for r in tape if isinstance(r, PhaseLine) and r.phase == "final")
        mine = [r for r in tape if isinstance(r, MemberLine) and Life(r.name, r.generation) == life]
        if not any(r.state == "ready" and r.now_ns < last_round_ns for r in mine):
            return  # Nobody knew that it had begun.
        last = self._world.syncer.core.slots.last
        excused = {
            r.piece
            for r in tape
            if isinstance(r, FateLine)
            and Life(r.name, r.generation) == life
            and (r.fate == "refused" or r.slot > last)
        }
        for piece, lost in enumerate(end.lost):
            assert not lost or piece in excused, f"{life} finished and lost {lost} of piece {piece} without a reason"
