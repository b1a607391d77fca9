"""What must have come of a run: warnings shown, work merged, nobody forgotten (R4's bound, hazards 11, 17, 42, 44)."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, prod
from statistics import median
from typing import TYPE_CHECKING

from atoll.core.messages import Life
from atoll.core.records import ClosedLine, FateLine, LifeEndLine, MemberLine, SlotLine
from atoll.sim.plan import TAIL_FACTOR, LearnerSpec

if TYPE_CHECKING:
    from atoll.sim.world import World

THIN_LEAST = 0.15
"""Links below this share of their need are not held to R4's bound: it says little then."""
STALE_MOST, ANNOUNCED_MOST, BYTES_MOST, IN_VAIN_FEW = 0.03, 0.2, 0.33, 3
"""Share of contributions, and number, that may be captured in vain: for predictions that fail, and probes. A margin for
bytes that just suffices is lost in 2.5 merges and found again by one contribution in vain (core.forecast)."""
FAR = 4
"""So many ways to the syncer in a round are few: what closes meanwhile cannot be foreseen then."""
SLACK_ROUNDS = 1
"""For the round in which a window begins in the middle."""


@dataclass(frozen=True, slots=True)
class Calm:
    """A learner that nothing disturbed from `since_ns` on."""

    life: Life
    spec: LearnerSpec
    since_ns: int


class Progress:
    """Looks at the whole run when it is over."""

    def __init__(self, world: World) -> None:
        self._world = world

    def check_end(self) -> None:
        self._warned()
        if not self._world.config.locked:
            for calm in self.calm():
                self._bound(calm)

    def _warned(self) -> None:
        shown = sum("alone filled the last" in notice for notice in self._world.syncer.notices)
        due = self._world.checkers.pace.warnings_due
        assert shown == due, f"one learner alone filled slot after slot {due} times, people were told {shown} times"

    # ------------------------------------------------------------ R4's bound

    def calm(self) -> list[Calm]:
        """Lives that end with the run, from when nothing disturbs them or the syncer any more."""
        world = self._world
        since_ns = world.calm_from("")
        if since_ns is None:
            return []
        ready = {}
        for record in world.records(MemberLine):
            if record.state == "ready":
                ready.setdefault(Life(record.name, record.generation), record.now_ns)
        ends = {Life(e.name, e.generation) for e in world.records(LifeEndLine) if e.reason == "finished"}
        found = []
        for process in world.processes:
            life = process.life
            mine_ns = world.calm_from(process.name)
            if life in ends and life in ready and mine_ns is not None:
                found.append(Calm(life, process.spec, max(since_ns, mine_ns, ready[life])))
        return found

    def _bound(self, calm: Calm) -> None:
        """Merged into each piece once in 2 * ceil(1/f) + 2 rounds, all pieces alike (R4)."""
        world, pieces = self._world, self._world.config.fragments
        closings = [r for r in world.records(ClosedLine) if calm.since_ns <= r.now_ns and r.slot <= world.config.slots]
        if len(closings) < 3:
            return
        first, last = closings[0].slot, closings[-1].slot
        interval_ns = max(1.0, median(b.now_ns - a.now_ns for a, b in pairwise(closings)))
        rounds = self.bound_rounds(calm.spec, interval_ns)
        if rounds is None or last - first < rounds * pieces:
            return
        closed_ns = {r.slot: r.now_ns for r in closings}
        merged = defaultdict(list)
        for record in world.records(SlotLine):
            if first <= record.slot <= last and any(Life(m.name, m.generation) == calm.life for m in record.merged):
                merged[record.piece].append(record.slot)
        for piece in range(pieces):
            slots = [first, *merged[piece], last]
            gap = max(self._rounds(a, b, closed_ns, interval_ns) for a, b in pairwise(slots)) / pieces
            assert gap <= rounds, (
                f"{calm.life} was not merged into piece {piece} for {gap:.1f} rounds; R4's bound is {rounds} "
                f"(slots {first} to {last}: {merged[piece]})"
            )
        merges = sum(map(len, merged.values()))
        self._in_vain(calm, first, last, merges, foreseen=self._can_foresee(calm.spec, interval_ns))
        counts = [len(merged[piece]) for piece in range(pieces)]
        mean = sum(counts) / pieces
        alike = min(counts) >= mean / 2 - 1
        assert alike, f"{calm.life} is merged {counts} times; none may be below half the mean (R4)"

    def _in_vain(self, calm: Calm, first: int, last: int, merged: int, *, foreseen: bool) -> None:
        """R4: it captures only what can still be merged."""
        missed = Counter(
            record.reason.split()[0]
            for record in self._world.records(FateLine)
            if Life(record.name, record.generation) == calm.life and first <= record.slot <= last
        )
        for word, what, share in (
            ("stale:", "anchors too old", STALE_MOST),
            ("slot", "announcements too late", ANNOUNCED_MOST if foreseen else 1.0),
            ("its", "bytes too late", BYTES_MOST),
        ):
            limit = share * (merged + missed.total()) + IN_VAIN_FEW
            assert missed[word] <= limit, f"{calm.life}: {missed[word]} {what}, {merged} merged (R4)"

    def _rounds(self, first: int, last: int, closed_ns: dict[int, int], interval_ns: float) -> float:
        """Slots between two, but no more than their time allows: when all slow ones idle at once, slots fly by."""
        return min(last - first, (closed_ns[last] - closed_ns[first]) / interval_ns)

    def _can_foresee(self, spec: LearnerSpec, interval_ns: float) -> bool:
        """Neither too far away to tell what closes meanwhile, nor on a link that decides when it may capture."""
        near = FAR * spec.latency_ns <= interval_ns * self._world.config.fragments
        return near and not (spec.up_bytes_per_s or spec.down_bytes_per_s)

    def _transfer_ns(self, rate_bytes_per_s: float) -> float:
        return max(self._world.piece_bytes) / rate_bytes_per_s * 1e9 if rate_bytes_per_s else 0.0

    def bound_rounds(self, spec: LearnerSpec, interval_ns: float) -> int | None:
        """R4's bound for a learner in rounds; None where the rules promise none: too thin or shared, too slow."""
        world, pieces = self._world, self._world.config.fragments
        if spec.site:
            return None
        up_ns, down_ns = self._transfer_ns(spec.up_bytes_per_s), self._transfer_ns(spec.down_bytes_per_s)
        transfer_ns = max(up_ns, down_ns) + 3 * spec.latency_ns
        if not world.config.overlap:
            return None
        ways_ns = [ns + 2 * spec.latency_ns for ns in (up_ns, down_ns)]
        both = prod(min(1.0, interval_ns / max(way_ns, 1.0)) for way_ns in ways_ns)
        share = min(both, interval_ns / max(transfer_ns, 1.0))  # It needs a turn of each direction.
        if share < THIN_LEAST:
            return None
        round_ns = pieces * interval_ns
        step_ns = spec.step_ns * (1 + spec.jitter) * (TAIL_FACTOR if spec.tail else 1)
        if world.config.take == "overwrite" and 2 * step_ns > round_ns:
            return None  # Each boundary brings an update, and overwriting leaves no work of that step to send.
        overlap_ns = min(world.config.overlap, world.config.interval / 2) * interval_ns / world.config.slot_steps
        stale_ns = world.config.stale_max * round_ns
        age_ns = down_ns + up_ns + 3 * spec.latency_ns + world.merge_path_ns + step_ns
        if down_ns > interval_ns:
            age_ns += round_ns / 2  # What it fetches has waited for its turn, half a round in the mean.
        if age_ns > stale_ns + overlap_ns:
            return None  # The anchor is too old, or the bytes too late, by the time that they are in.
        away_ns = 2 * step_ns + world.merge_path_ns + 2 * transfer_ns
        return 2 * ceil(1 / share) + 2 + ceil(away_ns / round_ns) + SLACK_ROUNDS
