"""The real core.Agent on the virtual clock: a control connection, one upload and one download at a time."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atoll.core import events as ev
from atoll.core.agent import Agent
from atoll.core.messages import PROTOCOL_VERSION, Hello, Life, Merged, Refuse, SyncerMessage, UpdateReady, Welcome
from atoll.sim.clock import Timer
from atoll.sim.learner import SimLearner
from atoll.sim.links import Bulk, Line, Rate, Transfer
from atoll.sim.plan import MS, LearnerSpec

if TYPE_CHECKING:
    from atoll.sim.world import World

NAME_WAIT_NS = 60_000 * MS


class SimAgent:
    """Driver of the agent in virtual time."""

    def __init__(self, world: World, spec: LearnerSpec, past: ev.Past | None = None) -> None:
        self._world = world
        self.spec = spec
        self.core = Agent(name_wait_ns=NAME_WAIT_NS, past=past)
        self._chance = random.Random(f"agent/{world.seed}/{spec.name}/{len(world.processes)}")
        self.alive = True
        self.life: Life | None = None
        self.learner: SimLearner | None = None
        self.stream: int | None = None
        self.up = Line(world.clock, spec.latency_ns)
        self.down = Line(world.clock, spec.latency_ns)
        self.bulk = Bulk(world.clock, self._bulk_moved)
        self.up_rate, self.down_rate = Rate(spec.up_bytes_per_s), Rate(spec.down_bytes_per_s)
        self.uploads: dict[int, Any] = {}
        """Upload buffers: what was captured of each piece."""
        self.places: dict[int, Any] = {}
        """Staging places: what was downloaded."""
        self.refusals: list[str] = []
        self._control_cuts = 0
        self._sleeps = 0
        self._queue: deque[Callable[[], None]] = deque()
        self._upload: Transfer | None = None
        self._upload_id = (0, 0)
        self._timer = Timer(world.clock, lambda: self.feed(ev.Wake()))
        self._bad_until_ns = -1
        self._welcomed = False
        self._performers: dict[type, Callable[[Any], None]] = {
            ev.Connect: self._plan_connect,
            ev.ToSyncer: self._to_syncer,
            ev.ToLearner: lambda action: self._to_learner(action.event),
            ev.StartUpload: self._start_upload,
            ev.StartDownload: self._start_download,
            ev.SetTimer: self._set_timer,
            ev.StopUpload: self._stop_upload,
            ev.AgentDone: lambda action: self._done(),
        }

    @property
    def name(self) -> str:
        return self.spec.name

    def start(self) -> None:
        self._carry_out(self.core.start(now_ns=self._world.clock.now_ns))
        self._world.clock.call_after(self._world.config.heartbeat_interval_ns, self._beat)

    def feed(self, event: ev.AgentEvent) -> None:
        """One event in, or in the queue while the process stands still."""
        self.awake(lambda: self._feed(event))

    def _feed(self, event: ev.AgentEvent) -> None:
        if isinstance(event, ev.DownloadEnded):
            self._world.checkers.transfers.download_ended(self, event)
        elif isinstance(event, ev.UploadEnded):
            self._world.checkers.transfers.upload_ended(self, event)
        if self.alive:
            self._carry_out(self.core.handle(event, now_ns=self._world.clock.now_ns))

    def _carry_out(self, actions: list[ev.AgentAction]) -> None:
        for action in actions:
            self._performers[type(action)](action)

    def _beat(self) -> None:
        if not self.alive:
            return
        learner = self.learner
        steps = learner.core.book.steps if learner is not None else 0
        waiting = learner is not None and learner.blocked
        self._feed(ev.Beat(steps, waiting, 0))
        interval_ns = self._world.config.heartbeat_interval_ns
        self._world.clock.call_after(interval_ns, lambda: self.awake(self._beat))

    # ------------------------------------------------------------ life and death

    def die(self) -> None:
        """The process is gone: the syncer sees the stream close."""
        self.alive = False
        self.bulk.drop()
        self._queue.clear()
        if self.stream is not None:
            self._close_at_syncer(self.stream)

    def _close_at_syncer(self, stream: int) -> None:
        delay_ns = self.spec.latency_ns + self._world.linger_ns
        self._world.clock.call_after(delay_ns, lambda: self._world.syncer.stream_closed(stream))

    def die_alone(self) -> None:
        """kill -9 of the agent; its learner trains on and starts another at its next boundary (R28)."""
        self.die()
        if self.learner is not None:
            self.learner.agent_died()

    def heir(self, past: ev.Past) -> SimAgent:
        """The next agent of the same life: it finds the shared memory as this one left it."""
        agent = SimAgent(self._world, self.spec, past)
        agent.life, agent.learner = self.life, self.learner
        agent.uploads, agent.places = self.uploads, self.places
        agent.up_rate, agent.down_rate = self.up_rate, self.down_rate
        self._world.took_over(self, agent, past)
        agent.start()
        return agent

    def note_line(self) -> None:
        """The way from here to the syncer was held, cut or asleep until now."""
        self._bad_until_ns = self._world.clock.now_ns

    def line_held_since(self, at_ns: int) -> bool:
        """Whether what this agent says has reached the syncer ever since."""
        broken = self._sleeps or self._control_cuts or self.up.held
        return self._welcomed and not broken and self._bad_until_ns < at_ns

    @property
    def asleep(self) -> bool:
        return bool(self._sleeps)

    @property
    def unread(self) -> bool:
        """Something that came while it slept is not read yet."""
        return bool(self._queue)

    def awake(self, act: Callable[[], None]) -> None:
        """Do it now, or when the process goes on."""
        if self._sleeps:
            self._queue.append(act)
        else:
            act()

    def sleep(self) -> None:
        """Agent and training thread stand still."""
        self._sleeps += 1
        self.bulk.hold()

    def wake(self) -> None:
        self._sleeps -= 1
        self.note_line()
        while self._queue and not self._sleeps:
            self._queue.popleft()()
        self.bulk.release()

    # ------------------------------------------------------------ control

    def cut_control(self) -> None:
        """Break the control connection; it cannot be opened until `mend_control`."""
        self._control_cuts += 1
        if self.stream is not None:
            self._close_at_syncer(self.stream)
            self.stream = None
            self.feed(ev.ConnectionLost("cut"))

    def mend_control(self) -> None:
        self._control_cuts -= 1
        self.note_line()

    def _to_syncer(self, action: ev.ToSyncer) -> None:
        stream, message = self.stream, action.message
        if stream is not None:
            self.up.send(lambda: self._arrive(stream, message))

    def _arrive(self, stream: int, message: object) -> None:
        """A message reaches the syncer, unless it was on its way when the connection was cut."""
        if stream == self.stream or not self._world.lossy:
            self._world.syncer.received(stream, message)

    def _done(self) -> None:
        self.alive = False
        if self.stream is not None:
            stream = self.stream
            self.up.send(lambda: self._world.syncer.stream_closed(stream))

    def _plan_connect(self, action: ev.Connect) -> None:
        delay_ns = self._chance.uniform(0.5, 1.0) * action.delay_ns
        self._world.clock.call_after(delay_ns, lambda: self.awake(lambda: self._connect(action.generation)))

    def _connect(self, generation: int) -> None:
        if not self.alive:
            return
        if self._control_cuts:
            self._feed(ev.ConnectionLost("cut"))
            return
        stream = self._world.new_stream()
        self.stream, self._welcomed = stream, False
        hello = self._hello(generation)
        self.up.send(lambda: self._world.syncer.stream_opened(stream, self, hello))

    def _hello(self, generation: int) -> Hello:
        layout = self._world.layout
        return Hello(PROTOCOL_VERSION, "", self.spec.name, generation, layout.fingerprint, layout.tensors())

    def receive(self, stream: int, message: SyncerMessage) -> None:
        """The syncer sent a message on a stream of ours."""
        self.down.send(lambda: self.awake(lambda: self._deliver(stream, message)))

    def _deliver(self, stream: int, message: SyncerMessage) -> None:
        if stream != self.stream or not self.alive:
            return
        if isinstance(message, Welcome):
            self.note_line()
            self._welcomed = True
            life = Life(self.spec.name, message.generation)
            if self.life not in (None, life):
                self._world.checkers.transfers.new_life(self)
            self.life = life
            self._feed(ev.Connected(message))
            return
        if isinstance(message, UpdateReady):
            self._world.checkers.transfers.told(self, message)
        if isinstance(message, Refuse):
            self.refusals.append(message.kind)
        self._feed(ev.FromSyncer(message))

    def stream_closed_by_syncer(self, stream: int) -> None:
        def lost() -> None:
            if stream == self.stream and self.alive:
                self.stream = None
                self._feed(ev.ConnectionLost("closed by the syncer"))

        self.down.send(lambda: self.awake(lost))

    def _to_learner(self, event: ev.LearnerEvent) -> None:
        if self.learner is None and isinstance(event, ev.Heard) and isinstance(event.message, Welcome):
            assert self.life is not None
            self.learner = SimLearner(self._world, self, self.life)
            self._world.lives.append(self.learner)
            for place in range(self._world.config.places):
                self._feed(ev.PlaceFreed(place))
        if self.learner is not None:
            self.learner.push(event)

    def _set_timer(self, action: ev.SetTimer) -> None:
        self._timer.set(action.at_ns)

    # ------------------------------------------------------------ bulk

    def _bulk_moved(self) -> None:
        if self.life is not None:
            self._world.syncer.feed(ev.BulkProgress(self.life))

    def _start_upload(self, action: ev.StartUpload) -> None:
        life, clock, latency_ns = self.life, self._world.clock, self.spec.latency_ns
        assert life is not None
        self._world.checkers.transfers.upload_begins(self, action.piece, action.seq)
        began_ns, piece, seq = clock.now_ns, action.piece, action.seq

        def answer(result: str) -> None:
            if self._upload is not transfer:
                return
            self._upload = None
            duration_ns = max(clock.now_ns + latency_ns - began_ns, 1)
            ended = ev.UploadEnded(piece, seq, result, transfer.moved_bytes, duration_ns)
            clock.call_after(latency_ns, lambda: self.feed(ended))

        def ended(transfer: Transfer) -> None:
            if transfer.broken:
                answer("broken")
            elif transfer.stopped:
                answer("unwanted")
            else:
                payload = self.uploads.get(piece)
                syncer = self._world.syncer
                clock.call_after(latency_ns, lambda: syncer.upload_arrived(life, piece, seq, payload, answer))

        transfer = Transfer(action.size_bytes, [self.up_rate, *self._world.site_rates(self.spec, up=True)], ended)
        self._upload, self._upload_id = transfer, (piece, seq)
        self.bulk.start(transfer)

    def _stop_upload(self, action: ev.StopUpload) -> None:
        """As a cancelled call: it ends at once, wherever its bytes are."""
        if self._upload is not None and self._upload_id == (action.piece, action.seq):
            self.bulk.stop(self._upload)

    def _start_download(self, action: ev.StartDownload) -> None:
        """The request goes out; what the syncer serves when it comes in is on its way back."""
        clock, latency_ns, life = self._world.clock, self.spec.latency_ns, self.life
        assert life is not None
        piece, place = action.piece, action.place
        self._world.checkers.transfers.download_begins(self, piece)

        def ended(transfer: Transfer) -> None:
            if transfer.broken:
                failed = ev.DownloadEnded(piece, place, None, 0, Merged(), True)
                clock.call_after(latency_ns, lambda: self.feed(failed))
                return
            hash_ok = self._world.download_is_whole()
            self.places[place] = found.payload
            done = ev.DownloadEnded(piece, place, found.version, found.slot, merged, hash_ok)
            clock.call_after(latency_ns, lambda: self.feed(done))

        def serve() -> None:
            nonlocal found, merged
            found = self._world.syncer.published[piece]
            merged = found.merged_for(life)
            if self.alive:
                rates = [self.down_rate, *self._world.site_rates(self.spec, up=False)]
                self.bulk.start(Transfer(action.size_bytes, rates, ended))

        found, merged = self._world.syncer.published[piece], Merged()
        clock.call_after(latency_ns, lambda: self._world.syncer.awake(serve))
