"""How lives end and follow one another: none gives up early, none is replaced while it is known (R10, R28)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.core import events as ev
from atoll.core.messages import Life, Welcome
from atoll.core.records import MemberLine, Record

if TYPE_CHECKING:
    from atoll.sim.learner import SimLearner
    from atoll.sim.world import World


class Lives:
    """Counts again since when a learner has no syncer, and how the syncer says that lives ended."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._away_since_ns: dict[Life, int] = {}
        self._replaced: set[Life] = set()

    def read(self, record: Record) -> None:
        if isinstance(record, MemberLine) and record.state == "ended" and record.reason == "replaced":
            self._replaced.add(Life(record.name, record.generation))

    def hears(self, learner: SimLearner, event: ev.LearnerEvent) -> None:
        """This learner is about to be told."""
        if isinstance(event, ev.StreamLost):
            self._away_since_ns.setdefault(learner.life, self._world.clock.now_ns)
        elif isinstance(event, ev.Heard) and isinstance(event.message, Welcome):
            self._away_since_ns.pop(learner.life, None)

    def ends(self, learner: SimLearner, end: ev.End) -> None:
        """R28: without a syncer it waits a lease at the end of the run, and longer before it."""
        if end.kind == "syncer lost":
            since_ns = self._away_since_ns.get(learner.life)
            assert since_ns is not None, f"{learner.life} gives up, and has a syncer"
            waited_ns = self._world.clock.now_ns - since_ns
            lease_ns = self._world.config.lease_interval_ns
            assert waited_ns >= lease_ns, f"{learner.life} gives up after {waited_ns / 1e9:.3f} s without a syncer"

    def succeeded(self, before: Life) -> None:
        """The process of this life goes on in a new one, because the syncer did not know it any more."""
        assert before not in self._replaced, f"{before} was known, came back and was replaced by itself"
