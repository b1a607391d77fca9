"""The real core.Agent and core.Learner on the virtual clock, with a link. What they train is a body (bodies.py)."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.core import events as ev
from atoll.core.agent import Agent
from atoll.core.learner import Learner
from atoll.core.messages import PROTOCOL_VERSION, Hello, Life, Report, Timings, Welcome

if TYPE_CHECKING:
    from atoll.sim.world import World

MS = 1_000_000
CHUNKS = 8


@dataclass(slots=True, kw_only=True)
class LearnerSpec:
    """How a learner of the world is made. Rates 0: no limit."""

    name: str
    step_ns: int = 100 * MS
    jitter: float = 0.02
    """Share of a step, uniform to both sides."""
    tokens: int = 1000
    latency_ns: int = 1 * MS
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0


@dataclass(slots=True)
class _Move:
    """A bulk transfer under way."""

    total_bytes: int
    bytes_per_s: float
    done: Callable[[_Move], None]
    stopped: Callable[[], bool]
    moved_bytes: int = 0


class SimAgent:
    """Driver of the agent in virtual time: streams, one upload and one download at a time."""

    def __init__(self, world: World, spec: LearnerSpec) -> None:
        self._world = world
        self.spec = spec
        self.core = Agent(name_wait_ns=60_000 * MS)
        self.alive = True
        self.life: Life | None = None
        self.learner: SimLearner | None = None
        self.stream: int | None = None
        self.cut = False
        """The control connection is down and cannot be opened."""
        self.bulk_cut = False
        self.lossy = False
        """What is in flight when the control connection is cut is lost, not only what comes after."""
        self._stopped: tuple[int, int] | None = None
        self.uploads: dict[int, Any] = {}
        """Upload buffers: what was captured of each piece."""
        self.places: dict[int, Any] = {}
        """Staging places: what was downloaded."""
        self._beating = False

    def start(self) -> None:
        for action in self.core.start(now_ns=self._world.clock.now_ns):
            self._carry_out(action)
        self._world.clock.call_after(self._world.config.heartbeat_interval_ns, self._beat)

    def feed(self, event: ev.AgentEvent) -> None:
        if not self.alive:
            return
        for action in self.core.handle(event, now_ns=self._world.clock.now_ns):
            self._carry_out(action)

    def _beat(self) -> None:
        if not self.alive:
            return
        learner = self.learner
        steps = learner.core.book.steps if learner is not None else 0
        waiting = learner is not None and learner.blocked
        self.feed(ev.Beat(steps, waiting, 0))
        self._world.clock.call_after(self._world.config.heartbeat_interval_ns, self._beat)

    def die(self) -> None:
        """kill -9: the syncer sees the stream close a latency later."""
        self.alive = False
        if self.stream is not None:
            self._close_at_syncer(self.stream)

    def _close_at_syncer(self, stream: int) -> None:
        self._world.clock.call_after(self.spec.latency_ns, lambda: self._world.syncer.stream_closed(stream))

    def cut_control(self, *, cut: bool) -> None:
        """Break the control connection, or let it come back."""
        self.cut = cut
        if cut and self.stream is not None:
            self._close_at_syncer(self.stream)
            self.stream = None
            self.feed(ev.ConnectionLost("cut"))

    # ------------------------------------------------------------ actions

    def _carry_out(self, action: ev.AgentAction) -> None:
        clock = self._world.clock
        match action:
            case ev.Connect(generation, delay_ns):
                clock.call_after(delay_ns, lambda: self._connect(generation))
            case ev.ToSyncer(message):
                stream = self.stream
                if stream is not None:
                    clock.call_after(self.spec.latency_ns, lambda: self._arrive(stream, message))
            case ev.ToLearner(event):
                self._to_learner(event)
            case ev.StartUpload(piece, seq, size_bytes):
                self._start_upload(piece, seq, size_bytes)
            case ev.StartDownload(piece, _, place, size_bytes):
                self._start_download(piece, place, size_bytes)
            case ev.SetTimer(at_ns):
                clock.call_at(at_ns, lambda: self.feed(ev.Wake()))
            case ev.StopUpload(piece, seq):
                self._stopped = (piece, seq)
            case ev.AgentDone():
                self._done()

    def _arrive(self, stream: int, message: object) -> None:
        """A message reaches the syncer, unless it was on its way when the connection was cut."""
        if stream == self.stream or not self.lossy:
            self._world.syncer.received(stream, message)

    def _done(self) -> None:
        self.alive = False
        if self.stream is not None:
            self._close_at_syncer(self.stream)

    def _connect(self, generation: int) -> None:
        if not self.alive:
            return
        if self.cut:
            self.feed(ev.ConnectionLost("cut"))
            return
        stream = self._world.new_stream()
        self.stream = stream
        layout = self._world.layout
        hello = Hello(PROTOCOL_VERSION, "", self.spec.name, generation, layout.fingerprint, layout.tensors())
        self._world.clock.call_after(
            self.spec.latency_ns, lambda: self._world.syncer.stream_opened(stream, self, hello)
        )

    def receive(self, stream: int, message: object) -> None:
        """The syncer sent a message on a stream of ours."""
        self._world.clock.call_after(self.spec.latency_ns, lambda: self._deliver(stream, message))

    def _deliver(self, stream: int, message: object) -> None:
        if stream != self.stream or not self.alive:
            return
        if isinstance(message, Welcome):
            self.life = Life(self.spec.name, message.generation)
            self.feed(ev.Connected(message))
        else:
            self.feed(ev.FromSyncer(message))  # type: ignore[arg-type]

    def stream_closed_by_syncer(self, stream: int) -> None:
        def lost() -> None:
            if stream == self.stream and self.alive:
                self.stream = None
                self.feed(ev.ConnectionLost("closed by the syncer"))

        self._world.clock.call_after(self.spec.latency_ns, lost)

    def _to_learner(self, event: ev.LearnerEvent) -> None:
        if self.learner is None and isinstance(event, ev.Heard) and isinstance(event.message, Welcome):
            assert self.life is not None
            self.learner = SimLearner(self._world, self, self.life)
            self._world.lives.append(self.learner)
            for place in range(self._world.config.places):
                self.feed(ev.PlaceFreed(place))
        if self.learner is not None:
            self.learner.push(event)

    # ------------------------------------------------------------ bulk

    def _move(self, move: _Move) -> None:
        """Move the next chunk; progress is heard by the syncer as a sign of life."""
        clock = self._world.clock
        if not self.alive:
            return
        if self.bulk_cut:
            clock.call_after(100 * MS, lambda: self._move(move))
            return
        if self.life is not None and move.moved_bytes:
            self._world.syncer.feed(ev.BulkProgress(self.life))
        if move.moved_bytes >= move.total_bytes or move.stopped():
            move.done(move)
            return
        chunk_bytes = -(-move.total_bytes // CHUNKS)
        delay_ns = chunk_bytes / move.bytes_per_s * 1e9 if move.bytes_per_s else 0
        move.moved_bytes += chunk_bytes
        clock.call_after(delay_ns, lambda: self._move(move))

    def _start_upload(self, piece: int, seq: int, size_bytes: int) -> None:
        life, clock, latency_ns = self.life, self._world.clock, self.spec.latency_ns
        assert life is not None
        began_ns = clock.now_ns

        def moved(move: _Move) -> None:
            duration_ns = max(clock.now_ns - began_ns, 1)

            def arrive() -> None:
                whole = move.moved_bytes >= size_bytes
                payload = self.uploads.get(piece)
                result = self._world.syncer.upload_arrived(life, piece, seq, payload) if whole else "unwanted"
                ended = ev.UploadEnded(piece, seq, result, min(move.moved_bytes, size_bytes), duration_ns)
                clock.call_after(latency_ns, lambda: self.feed(ended))

            clock.call_after(latency_ns, arrive)

        rate = self.spec.up_bytes_per_s
        self._move(_Move(size_bytes, rate, moved, lambda: self._stopped == (piece, seq)))

    def _start_download(self, piece: int, place: int, size_bytes: int) -> None:
        assert self.life is not None
        found = self._world.syncer.published[piece]
        merged = found.merged_for(self.life)

        def done(move: _Move) -> None:
            self.places[place] = found.payload
            self.feed(ev.DownloadEnded(piece, place, found.version, found.slot, merged, True))

        self._world.clock.call_after(
            2 * self.spec.latency_ns,
            lambda: self._move(_Move(size_bytes, self.spec.down_bytes_per_s, done, lambda: False)),
        )


class SimLearner:
    """Driver of the learner in virtual time: steps, boundaries and waits."""

    def __init__(self, world: World, agent: SimAgent, life: Life) -> None:
        self._world = world
        self._agent = agent
        self.life = life
        self.core = Learner(world.config, world.layout, life.name, life.generation)
        self.body = world.make_body(world, life)
        self.held: list[tuple[int, int]] = [(-1, -1)] * len(world.piece_bytes)
        self.blocked_ns: dict[str, int] = {}
        self.paused_until_ns = 0
        self.hung = False
        self.alive = True
        self._chance = random.Random(f"{world.seed}/{life.name}/{life.generation}")
        self._queue: deque[ev.LearnerEvent] = deque()
        self._blocked_since_ns: int | None = world.clock.now_ns
        self._cause = "parameters"

    @property
    def blocked(self) -> bool:
        """The training thread waits by R9."""
        return self._blocked_since_ns is not None

    def push(self, event: ev.LearnerEvent) -> None:
        """From the agent; read at the next boundary, or now if the thread waits."""
        if not self.alive:
            return
        self._queue.append(event)
        if self.blocked:
            self._drain()
            self._go_on()

    def die(self) -> None:
        self.alive = False

    def _handle(self, event: ev.LearnerEvent) -> None:
        for action in self.core.handle(event, now_ns=self._world.clock.now_ns):
            self._carry_out(action)

    def _drain(self) -> None:
        while self._queue:
            self._handle(self._queue.popleft())

    def _carry_out(self, action: ev.LearnerAction) -> None:
        match action:
            case ev.Capture(announce):
                self._agent.uploads[announce.piece] = self.body.capture(announce)
                self._agent.feed(ev.FromLearner(announce))
            case ev.CaptureSeed():
                self._agent.uploads.update(enumerate(self.body.capture_seed()))
                self._agent.feed(ev.SeedOffered(tuple(self._world.piece_bytes)))
            case ev.Take(piece, version, place, how, subtract):
                assert tuple(version) > self.held[piece], "an update is applied once, versions only grow"
                self.held[piece] = (version[0], version[1])
                self.body.take(piece, self._agent.places[place], how, subtract_sent=subtract)
                self._agent.feed(ev.PlaceFreed(place))
            case ev.Revert(piece):
                self.body.revert(piece)
            case ev.Free(place):
                self._agent.feed(ev.PlaceFreed(place))
            case ev.Tell(message):
                if isinstance(message, Report):
                    message = Report(message.counters, Timings(tuple(sorted(self.blocked_ns.items()))))
                self._agent.feed(ev.FromLearner(message))
            case ev.End(ok, _, _):
                self.alive = False
                if not ok:
                    self._agent.die()

    # ------------------------------------------------------------ steps and waits

    def _go_on(self) -> None:
        """After a boundary or a wait: train the next step, or wait on."""
        if not self.alive or self.core.over:
            return
        now_ns = self._world.clock.now_ns
        cause = self.core.waiting
        if cause is not None:
            if self._blocked_since_ns is None:
                self._blocked_since_ns, self._cause = now_ns, cause
                self._world.clock.call_after(250 * MS, self._wake)
            return
        if self._blocked_since_ns is not None:
            spent_ns = now_ns - self._blocked_since_ns
            self.blocked_ns[self._cause] = self.blocked_ns.get(self._cause, 0) + spent_ns
            self._blocked_since_ns = None
        jitter = 1 + self._agent.spec.jitter * self._chance.uniform(-1, 1)
        self._world.clock.call_after(self._agent.spec.step_ns * jitter, self._stepped)

    def _wake(self) -> None:
        if self.blocked and self.alive:
            self._handle(ev.Wake())
            self._go_on()
            self._world.clock.call_after(250 * MS, self._wake)

    def _stepped(self) -> None:
        if not self.alive:
            return
        now_ns = self._world.clock.now_ns
        if now_ns < self.paused_until_ns:
            self._world.clock.call_at(self.paused_until_ns, self._stepped)
            return
        self._drain()
        if not self.alive:
            return
        tokens = self._agent.spec.tokens
        self.body.step(tokens)
        self._handle(ev.Stepped(tokens, 1.0))
        self._world.check()
        self._go_on()

