"""A small virtual world around the real core: one syncer, learners of any speed, links, crashes and returns.

One seed decides everything. Nothing here sleeps or opens a socket, and torch is never imported.

    world = World(seed=7, learners=[LearnerSpec(name="l1"), LearnerSpec(name="l2", step_ns=200 * MS)], steps=240)
    world.at(5 * S, lambda: world.crash("l1", back_after_ns=3 * S))
    world.run()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from atoll.core import events as ev
from atoll.core.config import RunConfig
from atoll.core.layout import Layout, TensorSpec, make_layout
from atoll.core.messages import Announce, Life
from atoll.sim.agent import SimAgent
from atoll.sim.bodies import Body, Shop, StandIn, StandInShop
from atoll.sim.checkers import Checkers
from atoll.sim.clock import Clock
from atoll.sim.learner import SimLearner
from atoll.sim.links import Rate
from atoll.sim.plan import MS, LearnerSpec, S, Site
from atoll.sim.syncer import SimSyncer

__all__ = ["MS", "LearnerSpec", "S", "World"]
EVENTS_MAX = 20_000_000


def even_layout(fragments: int, values: int) -> Layout:
    """A layout of equal pieces."""
    return make_layout([TensorSpec(f"t{i:03d}", (values,), "float32") for i in range(fragments)], fragments)


class World:
    """Build it, schedule faults with `at`, then `run`."""

    def __init__(
        self,
        *,
        seed: int,
        learners: Sequence[LearnerSpec],
        expected: int | None = None,
        sites: Sequence[Site] = (),
        steps: int = 240,
        fragments: int = 8,
        interval: int = 24,
        piece_values: int = 50_000,
        merge_ns: int = 2 * MS,
        commit_ns: int = 1 * MS,
        learners_max: int = 0,
        linger_ns: int = 0,
        lossy: bool = False,
        layout: Layout | None = None,
        make_body: Callable[[World, Life], Body] = StandIn,
        make_shop: Callable[[World], Shop] = StandInShop,
        **settings: Any,
    ) -> None:
        self.seed = seed
        self.make_body = make_body
        self.make_shop = make_shop
        self.linger_ns = linger_ns
        self.merge_path_ns = 2 * merge_ns + 2 * commit_ns
        """What the syncer takes from whole bytes to a published version."""
        self.lossy = lossy
        self.config = RunConfig(
            run_id=f"sim-{seed}",
            steps=steps,
            fragments=fragments,
            interval=interval,
            learners=len(learners) if expected is None else expected,
            **settings,
        )
        self.layout = layout if layout is not None else even_layout(fragments, piece_values)
        width = 2 if self.config.payload == "bf16" else 4
        self.piece_bytes = [size * width for size in self.layout.piece_sizes]
        self.clock = Clock()
        self.lives: list[SimLearner] = []
        self.agents: dict[str, SimAgent] = {}
        """The newest process of each name."""
        self.processes: list[SimAgent] = []
        self._sites = {s.name: (Rate(s.up_bytes_per_s), Rate(s.down_bytes_per_s)) for s in sites}
        self._streams = 0
        self.checkers = Checkers(self)
        self.syncer = SimSyncer(self, merge_ns=merge_ns, commit_ns=commit_ns, learners_max=learners_max)
        self.syncer.start()
        for spec in learners:
            self.clock.call_at(spec.joins_at_ns, lambda spec=spec: self.join(spec))  # type: ignore[misc]
        while self.clock.due():
            self.clock.run_next()

    # ------------------------------------------------------------ making things happen

    def new_stream(self) -> int:
        self._streams += 1
        return self._streams

    def site_rates(self, spec: LearnerSpec, *, up: bool) -> list[Rate]:
        """The shared link of a learner's site, if it has one."""
        return [self._sites[spec.site][0 if up else 1]] if spec.site else []

    def join(self, spec: LearnerSpec) -> SimAgent:
        """A learner process starts now."""
        agent = self.join_beside(spec)
        self.agents[spec.name] = agent
        return agent

    def join_beside(self, spec: LearnerSpec) -> SimAgent:
        """Another process under a name that may be in use; it takes over only if the first is gone."""
        agent = SimAgent(self, spec)
        self.processes.append(agent)
        agent.start()
        return agent

    def took_over(self, old: SimAgent, new: SimAgent, past: ev.Past) -> None:
        """Another agent of the same life has begun."""
        if self.agents.get(old.name) is old:
            self.agents[old.name] = new
        self.processes.append(new)
        self.checkers.transfers.took_over(new, past)

    def at(self, at_ns: int, action: Callable[[], None]) -> None:
        """Do something at a virtual time."""
        self.clock.call_at(at_ns, action)

    def crash(self, name: str, *, back_after_ns: int | None = None) -> None:
        """kill -9 of a learner and its agent; optionally a new life under the same name later."""
        agent = self.agents[name]
        agent.die()
        if agent.learner is not None:
            agent.learner.die()
        if back_after_ns is not None:
            self.clock.call_after(back_after_ns, lambda: self.join(agent.spec))

    def hang(self, name: str, for_ns: int) -> None:
        """The training thread hangs while its agent lives (compile, gc, a debugger)."""
        learner = self.agents[name].learner
        if learner is not None:
            learner.hung_until_ns = self.clock.now_ns + for_ns

    # ------------------------------------------------------------ what chance may spoil

    def fault_of(self, announce: Announce) -> tuple[bool, bool, float]:
        """(hash ok, finite, norm) of a contribution that arrives."""
        return True, True, 1.0

    def merge_is_finite(self) -> bool:
        """Whether a merge of finite inputs is finite."""
        return True

    def download_is_whole(self) -> bool:
        """Whether a download's bytes match their hash."""
        return True

    def calm_from(self, name: str) -> int | None:
        """From when on nothing disturbs this learner (empty: the syncer); None: that is not known."""
        return None

    def was_disturbed(self, name: str) -> bool:
        """Whether anything has happened to this learner or to the syncer."""
        return True

    # ------------------------------------------------------------ called by the drivers

    def after_syncer(self, event: ev.SyncerEvent) -> None:
        """The syncer has taken an event and its actions are carried out."""
        self.checkers.after_syncer(event)

    def after_learner(self, learner: SimLearner) -> None:
        """A learner has passed a boundary."""
        self.checkers.after_learner(learner)

    # ------------------------------------------------------------ running

    def run_until(self, done: Callable[[], bool], *, limit_s: float) -> None:
        """Run until `done()`; AssertionError with the seed and the reason when virtual time runs out."""
        limit_ns = self.clock.now_ns + int(limit_s * S)
        for _ in range(EVENTS_MAX):
            if done():
                return
            if self.clock.now_ns > limit_ns or not self.clock.run_next():
                break
        raise AssertionError(f"seed {self.seed}: not done after {self.clock.now_ns / S:.1f} s: {self.why_pending()}")

    def run(self, *, limit_s: float = 3600) -> None:
        """Run to the end of the run and check what must hold then."""
        self.run_until(lambda: self.syncer.over, limit_s=limit_s)
        self.checkers.check_end()

    def why_pending(self) -> str:
        """Why the run is not over, in words."""
        core = self.syncer.core
        members = ", ".join(f"{m.life} {m.state} clock {m.clock}" for m in core.roster)
        slots = ", ".join(f"{s.number} {s.state}" for s in core.slots.live.values())
        waits = ", ".join(f"{x.life} waits: {x.cause}" for x in self.lives if x.alive and x.blocked)
        return f"phase {core.finish.phase}, T={core.slots.reached}, slots [{slots}], members [{members}], [{waits}]"

    # ------------------------------------------------------------ reading the outcome

    def records(self, kind: type) -> list[Any]:
        """Tape records of one kind, in order."""
        return [r for r in self.syncer.tape if isinstance(r, kind)]
