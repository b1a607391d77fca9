"""What agents move: each update once it is wanted, who waits longest first; each upload once; no place is lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.core import events as ev
from atoll.core.messages import Announce, UpdateReady, Version

if TYPE_CHECKING:
    from atoll.sim.agent import SimAgent
    from atoll.sim.world import World

LEFT_MAX = 2
TOLERATED = 1


@dataclass(slots=True)
class _Seen:
    """What one agent was told and did."""

    wanted: dict[int, tuple[int, Version]] = field(default_factory=dict)
    """Per piece: since when (a count), and the newest version that it was told of."""
    delivered: dict[int, Version] = field(default_factory=dict)
    turns: int = 0
    answered: set[tuple[int, int]] = field(default_factory=set)
    """Uploads that the syncer has answered."""
    fetching: bool = False
    void: bool = False
    """What is being fetched was begun by the life before: it counts for nothing."""
    timed: bool = False
    """An upload has moved bytes and ended, whole or stopped, so that the rate is known."""


class Transfers:
    """Checks agents at each transfer that begins or ends."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen: dict[int, _Seen] = {}

    def took_over(self, agent: SimAgent, past: ev.Past) -> None:
        """It goes on with a life: what that holds it need not fetch."""
        self._of(agent).delivered.update(past.held)

    def new_life(self, agent: SimAgent) -> None:
        """It fetches everything anew."""
        seen = self._of(agent)
        seen.wanted.clear()
        seen.delivered.clear()
        seen.answered.clear()
        seen.void = seen.fetching

    def _of(self, agent: SimAgent) -> _Seen:
        return self._seen.setdefault(id(agent), _Seen())

    # ------------------------------------------------------------ downloads

    def told(self, agent: SimAgent, message: UpdateReady) -> None:
        """The syncer told of an update."""
        seen = self._of(agent)
        if message.version <= seen.delivered.get(message.piece, Version(0, 0)):
            return
        since, newest = seen.wanted.get(message.piece, (seen.turns, message.version))
        seen.turns += 1
        seen.wanted[message.piece] = (since, max(newest, message.version))

    def download_begins(self, agent: SimAgent, piece: int) -> None:
        """Who waits longest goes first (hazard 17)."""
        seen = self._of(agent)
        seen.fetching, wanted = True, seen.wanted
        assert piece in wanted, f"{agent.name} fetches piece {piece}, and nothing of it is new"
        longest = min(wanted, key=lambda p: wanted[p][0])
        assert piece == longest, f"{agent.name} fetches piece {piece} while piece {longest} waits longer"

    def download_ended(self, agent: SimAgent, event: ev.DownloadEnded) -> None:
        seen = self._of(agent)
        void, seen.fetching, seen.void = seen.void, False, False
        if event.version is None or not event.hash_ok or void:
            return
        seen.delivered[event.piece] = event.version
        found = seen.wanted.pop(event.piece, None)
        if found is not None and found[1] > event.version:
            seen.turns += 1
            seen.wanted[event.piece] = (seen.turns, found[1])

    def places(self, agent: SimAgent) -> None:
        """Every staging place is free, being filled, or holds what its learner has not taken."""
        learner = agent.learner
        if learner is None or not learner.alive or not agent.alive or agent.asleep:
            return
        on_its_way = sum(isinstance(event, ev.UpdateArrived) for event in learner.queued)
        held = len(learner.core.staged()) + on_its_way + len(agent.core._places)
        held += agent.core._download is not None
        assert held == self._world.config.places, f"{agent.name} knows of {held} places of {self._world.config.places}"

    # ------------------------------------------------------------ uploads

    def upload_begins(self, agent: SimAgent, piece: int, seq: int) -> None:
        assert seq == 0 or (piece, seq) not in self._of(agent).answered, (
            f"{agent.name}: the upload of piece {piece}, seq {seq} was answered, and begins again"
        )

    def upload_ended(self, agent: SimAgent, event: ev.UploadEnded) -> None:
        seen = self._of(agent)
        seen.timed = seen.timed or event.result == "ok" or event.moved_bytes > 0
        if event.result != "broken":
            seen.answered.add((event.piece, event.seq))

    def captured(self, agent: SimAgent, announce: Announce) -> None:
        """R4: the uplink holds the transfer in progress and at most one more when the next boundary comes."""
        spec, world = agent.spec, self._world
        steady = spec.up_bytes_per_s and not spec.site and spec.jitter <= 0.02 and not spec.tail
        if world.config.locked or announce.final or not steady or not self._of(agent).timed:
            return
        if world.was_disturbed(agent.name):
            return
        sizes = Counter(world.piece_bytes)
        transfer_ns = max(sizes) / spec.up_bytes_per_s * 1e9 + 2 * spec.latency_ns
        waiting = len(agent.core._uploads) + (agent.core._upload is not None) + 1
        left = waiting - int(spec.step_ns / transfer_ns)
        assert left <= LEFT_MAX + TOLERATED, f"{agent.name}: {left} transfers will be left at the next boundary (R4)"
