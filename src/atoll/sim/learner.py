"""The real core.Learner on the virtual clock: steps, boundaries and waits. What it trains is a body (bodies.py)."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from atoll.core import events as ev
from atoll.core.learner import Learner
from atoll.core.messages import Life, Report, Timings, Welcome
from atoll.sim.plan import MS, TAIL_FACTOR

if TYPE_CHECKING:
    from atoll.sim.agent import SimAgent
    from atoll.sim.world import World

WAKE_NS = 250 * MS
"""As the real driver: a thread that waits looks up so often."""


class SimLearner:
    """Driver of the learner in virtual time."""

    def __init__(self, world: World, agent: SimAgent, life: Life, before: SimLearner | None = None) -> None:
        """before: the life that the syncer did not know any more; this one goes on in its place (R28)."""
        self._world = world
        self.agent = agent
        self.life = life
        self.core = Learner(
            world.config,
            world.layout,
            life.name,
            life.generation,
            in_place=before is not None,
            progress_steps=0 if before is None else before.core.progress_steps,
        )
        self.body = world.make_body(world, life)
        self.held: list[tuple[int, int]] = [(-1, -1)] * len(world.piece_bytes)
        self.blocked_ns: dict[str, int] = {}
        self.hung_until_ns = 0
        self.slow = 1.0
        self.alive = True
        self._chance = random.Random(f"{world.seed}/{life.name}/{life.generation}")
        self._queue: deque[ev.LearnerEvent] = deque()
        self._blocked_since_ns: int | None = world.clock.now_ns
        self._cause = "parameters"
        self._interrupted = False
        self._busy = False
        self._agent_died = False
        self._performers: dict[type, Callable[[Any], None]] = {
            ev.Capture: self._capture,
            ev.CaptureSeed: self._capture_seed,
            ev.Take: self._take,
            ev.Revert: lambda action: self.body.revert(action.piece),
            ev.Free: lambda action: self.agent.feed(ev.PlaceFreed(action.place)),
            ev.Tell: self._tell,
            ev.End: self._end,
        }

    @property
    def blocked(self) -> bool:
        """The training thread waits by R9."""
        return self._blocked_since_ns is not None

    @property
    def queued(self) -> Iterable[ev.LearnerEvent]:
        """Events that wait for the next boundary."""
        return self._queue

    @property
    def cause(self) -> str:
        """Of the newest wait."""
        return self._cause

    def push(self, event: ev.LearnerEvent) -> None:
        """From the agent; read at the next boundary, or now if the thread waits."""
        if not self.alive:
            return
        self._queue.append(event)
        if self.blocked and not self._busy:
            self._drain()
            self._go_on()

    def die(self) -> None:
        self.alive = False

    def interrupt(self) -> None:
        """SIGTERM: the script leaves at its next boundary, or now if it waits."""
        self._interrupted = True
        if self.blocked:
            self.agent.awake(self._leave)

    def _leave(self) -> None:
        if self.alive and not self.core.over:
            self._handle(ev.Interrupted("terminated"))

    def _handle(self, event: ev.LearnerEvent) -> None:
        self._world.checkers.touched(self)
        self._world.checkers.lives.hears(self, event)
        self._busy = True
        for action in self.core.handle(event, now_ns=self._world.clock.now_ns):
            self._performers[type(action)](action)
        self._busy = False

    def _drain(self) -> None:
        while self._queue and self.alive:
            if self._is_another_life(self._queue[0]):
                self._begin_life()
                return
            self._handle(self._queue.popleft())
        if self._agent_died and self.alive:
            self._agent_died = False
            self.agent = self.agent.heir(self.core.past())
            self._handle(ev.AgentRestarted())

    # ------------------------------------------------------------ other agents, other lives (R28)

    def agent_died(self) -> None:
        self._agent_died = True
        self.push(ev.StreamLost("the agent ended"))

    def _is_another_life(self, event: ev.LearnerEvent) -> bool:
        message = event.message if isinstance(event, ev.Heard) else None
        return isinstance(message, Welcome) and message.generation != self.life.generation

    def _begin_life(self) -> None:
        """The syncer granted another generation: the process goes on in that one."""
        self.alive = False
        self._world.checkers.lives.succeeded(self.life)
        welcome = self._queue[0]
        assert isinstance(welcome, ev.Heard)
        assert isinstance(welcome.message, Welcome)
        life = Life(self.life.name, welcome.message.generation)
        heir = SimLearner(self._world, self.agent, life, self)
        self.agent.learner = heir
        self._world.lives.append(heir)
        heir.hung_until_ns, heir.slow, heir._interrupted = self.hung_until_ns, self.slow, self._interrupted
        self.agent.feed(ev.LifeBegun(life.generation))
        for place in self.core.staged():
            self.agent.feed(ev.PlaceFreed(place))
        heir._queue = self._queue
        heir._drain()
        heir._go_on()

    # ------------------------------------------------------------ actions

    def _capture(self, action: ev.Capture) -> None:
        announce = action.announce
        self._world.checkers.captured(self, announce)
        self.agent.uploads[announce.piece] = self.body.capture(announce)
        self.agent.feed(ev.FromLearner(announce))

    def _capture_seed(self, action: ev.CaptureSeed) -> None:
        self.agent.uploads.update(enumerate(self.body.capture_seed()))
        self.agent.feed(ev.SeedOffered(tuple(self._world.piece_bytes)))

    def _take(self, action: ev.Take) -> None:
        assert tuple(action.version) > self.held[action.piece], "an update is applied once, versions only grow"
        self.held[action.piece] = (action.version.lineage, action.version.n)
        payload = self.agent.places[action.place]
        self.body.take(action.piece, payload, action.how, subtract_sent=action.subtract_sent)
        self.agent.feed(ev.PlaceFreed(action.place))

    def _tell(self, action: ev.Tell) -> None:
        message = action.message
        if isinstance(message, Report):
            message = Report(message.counters, Timings(tuple(sorted(self.blocked_ns.items()))))
        self.agent.feed(ev.FromLearner(message))

    def _end(self, action: ev.End) -> None:
        self._world.checkers.lives.ends(self, action)
        self.alive = False
        if not action.ok:
            self.agent.die()

    # ------------------------------------------------------------ steps and waits

    def _go_on(self) -> None:
        """After a boundary or a wait: train the next step, or wait on."""
        if not self.alive or self.core.over:
            return
        now_ns = self._world.clock.now_ns
        cause = self.core.waiting
        if cause is not None:
            self._world.checkers.waits_for(self, cause)
            if self._blocked_since_ns is None:
                self._world.clock.call_after(WAKE_NS, self._wake)
            elif cause != self._cause:
                self._book_wait(self._blocked_since_ns)
            if self._blocked_since_ns is None or cause != self._cause:
                self._blocked_since_ns, self._cause = now_ns, cause
            return
        if self._blocked_since_ns is not None:
            self._book_wait(self._blocked_since_ns)
            self._blocked_since_ns = None
        self._world.checkers.waits.begins(self)
        self._world.clock.call_after(self._step_ns(), self._stepped)

    def _book_wait(self, since_ns: int) -> None:
        spent_ns = self._world.clock.now_ns - since_ns
        self.blocked_ns[self._cause] = self.blocked_ns.get(self._cause, 0) + spent_ns

    def _step_ns(self) -> float:
        spec = self.agent.spec
        factor = self.slow * (1 + spec.jitter * self._chance.uniform(-1, 1))
        if spec.tail and self._chance.random() < spec.tail:
            factor *= TAIL_FACTOR
        return spec.step_ns * factor

    def _wake(self) -> None:
        self.agent.awake(self._look_up)

    def _look_up(self) -> None:
        if self.blocked and self.alive:
            self._handle(ev.Wake())
            self._drain()
            self._go_on()
            self._world.clock.call_after(WAKE_NS, self._wake)

    def _stepped(self) -> None:
        self.agent.awake(self._boundary)

    def _boundary(self) -> None:
        if not self.alive:
            return
        now_ns = self._world.clock.now_ns
        if now_ns < self.hung_until_ns:
            self._world.clock.call_at(self.hung_until_ns, self._stepped)
            return
        self._drain()
        if self._interrupted:
            self._leave()
        if not self.alive:
            return
        tokens = self.agent.spec.tokens
        if self.core.counts:
            self._world.checkers.steps(self)
            self.body.step(tokens)
        self._handle(ev.Stepped(tokens, 1.0))
        self._world.after_learner(self)
        if self.core.waiting is not None:
            self._drain()
        self._go_on()
