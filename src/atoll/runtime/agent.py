"""Driver of core.agent.Agent: the small process beside each learner, on asyncio and grpc.aio.

It turns frames of the training process and messages of the syncer into events, and actions into I/O; it decides
nothing. Control and bulk have a channel each. Bulk bytes go between shared memory and the link (runtime/transfers.py).
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from atoll.core import events
from atoll.core.agent import Agent
from atoll.core.config import RunConfig
from atoll.core.layout import make_layout
from atoll.core.messages import PROTOCOL_VERSION, Hello, LearnerMessage, Life, Refuse, Welcome
from atoll.errors import AtollError
from atoll.runtime.memory import SharedMemory, make_plan
from atoll.runtime.pipe import AgentCost, BulkTrouble, Pipe, PipeError, Setup
from atoll.runtime.transfers import Transfers
from atoll.wire import atoll_pb2 as pb
from atoll.wire import channel as wire_channel
from atoll.wire import check, convert
from atoll.wire.check import WireError

FIRST_ANSWER_S = 20.0
PARENT_POLL_S = 1.0
PULSE_S = 1.0
FAREWELL_S = 2.0
OUTBOX_MAX = 10_000
SESSION = "/atoll.v1.Control/Session"


def rpc_reason(error: BaseException) -> str:
    """One line about a call that failed."""
    if isinstance(error, grpc.aio.AioRpcError):
        return check.one_line(f"{error.code().name.lower()}: {error.details() or 'no details'}")
    return check.one_line(str(error) or type(error).__name__)


def cpu_ns() -> int:
    """CPU time of this process, user and system."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return int((usage.ru_utime + usage.ru_stime) * 1e9)


class _Session:
    """One control stream. Only the newest one is listened to."""

    def __init__(self) -> None:
        self.call: Any = None
        self.outbox: deque[LearnerMessage] = deque()
        self.writer: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()
        self.fault = ""
        """Why this side ended it."""


class AgentDriver:
    """Owns the loop, the sockets and the clock of one agent."""

    def __init__(self, sock: socket.socket, memory_fd: int, parent_pid: int) -> None:
        self._pipe = Pipe(sock)
        self._memory = SharedMemory(memory_fd)
        self._parent_pid = parent_pid
        self._token = wire_channel.load_token()
        self._setup: Setup | None = None
        self._machine: Agent | None = None
        self._session = _Session()
        self._settings: tuple[tuple[str, str | int | float], ...] | None = None
        self._transfers: Transfers | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._beat_interval_s = 0.0
        self._run_id = ""
        self._start_cpu_ns = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._leaving = False
        self._unreachable_s: float | None = None
        self._performers: dict[type, Callable[[Any], None]] = {
            events.ToSyncer: lambda action: self._say(action.message),
            events.ToLearner: lambda action: self._tell_learner(action.event),
            events.Connect: self._connect,
            events.StartUpload: self._start_upload,
            events.StopUpload: self._stop_upload,
            events.StartDownload: self._start_download,
            events.SetTimer: self._set_timer,
            events.AgentDone: lambda action: self._leave(),
        }

    async def run(self) -> int:
        """Exit code, once the machine is done. The process ends earlier when the training process goes."""
        self._loop = asyncio.get_running_loop()
        self._result: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(self._pipe.sock, self._on_frames)
        self._watch_parent()
        return await self._result

    def _watch_parent(self) -> None:
        # Data loader workers of a killed training process may hold its end of the socket for seconds.
        try:
            self._loop.add_reader(os.pidfd_open(self._parent_pid), os._exit, 0)
        except ProcessLookupError:
            os._exit(0)
        except (AttributeError, OSError):  # not everywhere, and not in every container
            self._look_for_parent()

    def _look_for_parent(self) -> None:
        if os.getppid() != self._parent_pid:
            os._exit(0)
        self._loop.call_later(PARENT_POLL_S, self._look_for_parent)

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self._result.done():
            self._result.set_exception(task.exception())  # type: ignore[arg-type]

    # ------------------------------------------------------------ machine

    def dispatch(self, event: events.AgentEvent) -> None:
        """Hand an event to the machine and carry out what it says."""
        if self._machine is not None and not self._leaving:
            self._perform(self._machine.handle(event, now_ns=time.monotonic_ns()))

    def _perform(self, actions: list[events.AgentAction]) -> None:
        for action in actions:
            self._performers[type(action)](action)

    def _set_timer(self, action: events.SetTimer) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0, action.at_ns - time.monotonic_ns()) / 1e9
        self._timer = self._loop.call_later(delay_s, self.dispatch, events.Wake())

    # ------------------------------------------------------------ training process

    def _on_frames(self) -> None:
        try:
            items = self._pipe.receive()
            for item in items:
                self._on_frame(item)
            self._pipe.flush()
        except PipeError:
            os._exit(0)

    def _on_frame(self, item: Any) -> None:
        if isinstance(item, Setup):
            self._setup = item
            self._run_id = item.run_id
            self._pulse()
            self._machine = Agent(name_wait_ns=item.name_wait_ns, past=item.past)
            self._perform(self._machine.start(now_ns=time.monotonic_ns()))
        else:
            self.dispatch(item)

    def _tell_learner(self, event: Any) -> None:
        try:
            self._pipe.send(event)
        except PipeError:
            os._exit(0)
        if self._pipe.sending:
            self._loop.add_writer(self._pipe.sock, self._flush_pipe)

    def _flush_pipe(self) -> None:
        try:
            self._pipe.flush()
        except PipeError:
            os._exit(0)
        if not self._pipe.sending:
            self._loop.remove_writer(self._pipe.sock)

    # ------------------------------------------------------------ control stream

    def _connect(self, action: events.Connect) -> None:
        self._session = _Session()
        self._spawn(self._run_session(self._session, action))

    async def _run_session(self, session: _Session, action: events.Connect) -> None:
        if action.delay_ns:
            await asyncio.sleep(random.uniform(0.5, 1.0) * action.delay_ns / 1e9)
        assert self._setup is not None
        options = wire_channel.CONTROL_OPTIONS
        async with grpc.aio.insecure_channel(self._setup.address, options=options) as channel:
            reason = ""
            try:
                reason = await self._converse(session, channel, action.generation)
            except (grpc.aio.AioRpcError, AtollError, asyncio.InvalidStateError, TimeoutError) as error:
                reason = rpc_reason(error)
            except asyncio.CancelledError:
                if not session.fault:
                    raise
            session.ended.set()
            reason = session.fault or reason
            if session is self._session:
                self.dispatch(events.ConnectionLost(reason))

    async def _converse(self, session: _Session, channel: grpc.aio.Channel, generation: int) -> str:
        """Run the stream to its end; returns why it ended."""
        open_stream = channel.stream_stream(
            SESSION,
            request_serializer=pb.LearnerEnvelope.SerializeToString,
            response_deserializer=pb.SyncerEnvelope.FromString,
        )
        session.call = open_stream(metadata=wire_channel.credentials_of(self._token))
        await session.call.write(convert.learner_to_wire(self._hello(generation)))
        envelope = await asyncio.wait_for(session.call.read(), FIRST_ANSWER_S)
        while envelope is not grpc.aio.EOF and session is self._session:
            for single in convert.unbatch(envelope):
                if session is self._session:
                    self._hear(single)
            envelope = await session.call.read()
        if session is not self._session:
            return "replaced by a newer stream"
        code = await session.call.code()
        details = await session.call.details()
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return "what answers there is not the control port of a syncer; is it the bulk port, or another service?"
        if code is grpc.StatusCode.OK and not details:
            return "the syncer closed the connection: it ends, or a newer connection took its place"
        return check.one_line(f"{code.name.lower()}: {details or 'no details'}")

    def _hear(self, envelope: pb.SyncerEnvelope) -> None:
        message = convert.syncer_from_wire(envelope)
        if isinstance(message, Welcome):
            if self._settings not in (None, message.settings):
                text = "the syncer there is of another run: its settings are not those that this learner joined by"
                self.dispatch(events.FromSyncer(Refuse("run", text)))
                raise WireError(text)
            self._welcomed(message, convert.bulk_port_of(envelope))
            self.dispatch(events.Connected(message))
        else:
            self.dispatch(events.FromSyncer(message))

    def _hello(self, generation: int) -> Hello:
        assert self._setup is not None
        setup = self._setup
        protocol = setup.protocol or PROTOCOL_VERSION
        return Hello(protocol, self._run_id, setup.name, generation, setup.fingerprint, setup.tensors, setup.extra)

    def _welcomed(self, welcome: Welcome, bulk_port: int) -> None:
        """Before the machine sees it: shared memory as large as the layout says, a bulk channel, heartbeats."""
        assert self._setup is not None
        self._settings = welcome.settings
        config = RunConfig.from_dict(dict(welcome.settings))
        host, _ = wire_channel.parse_address(self._setup.address)
        target = self._setup.bulk_address or wire_channel.format_address(host, bulk_port)
        life = Life(self._setup.name, welcome.generation)
        # A reconnect must find this run again, not another one at the same address.
        self._run_id = config.run_id
        if self._transfers is None:
            layout = make_layout(self._setup.tensors, config.fragments)
            self._memory.grow(make_plan(layout.payload_sizes(config.payload), config.places))
            self._transfers = Transfers(self._memory, self._token)
            self._start_cpu_ns = cpu_ns()
            self._beat_interval_s = config.heartbeat_interval_ns / 1e9
            self._loop.call_later(self._beat_interval_s, self._beat)
            for place in range(config.places) if self._setup.past is None else ():
                self.dispatch(events.PlaceFreed(place))
        self._transfers.aim(target, config.run_id, life)

    def _pulse(self) -> None:
        """The training process sees by it that this one does not hang."""
        self._memory.beat()
        self._loop.call_later(PULSE_S, self._pulse)

    def _beat(self) -> None:
        self._loop.call_later(self._beat_interval_s, self._beat)
        memory = self._memory
        self.dispatch(events.Beat(memory.steps, memory.waiting, memory.progress_bytes))

    def _say(self, message: LearnerMessage) -> None:
        session = self._session
        if session.fault:
            return
        if len(session.outbox) >= OUTBOX_MAX:
            # A new stream says again what matters, so that nothing is left out without a word.
            session.fault = f"the syncer reads nothing: {OUTBOX_MAX:,} messages wait"
            session.call.cancel()
            return
        session.outbox.append(message)
        if session.writer is None:
            session.writer = self._spawn(self._write_outbox(session))

    async def _write_outbox(self, session: _Session) -> None:
        try:
            while session.outbox and not session.ended.is_set():
                count = min(len(session.outbox), convert.BATCH_MAX)
                wire = [convert.learner_to_wire(session.outbox.popleft()) for _ in range(count)]
                await session.call.write(convert.batch(wire))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The reader sees the end of the stream too and tells the machine.
            session.outbox.clear()
        session.writer = None

    def _leave(self) -> None:
        self._leaving = True
        self._spawn(self._farewell())

    async def _farewell(self) -> None:
        """Let what was said be delivered, within bounds; then report what this process cost."""
        session = self._session
        try:
            async with asyncio.timeout(FAREWELL_S):
                if session.writer is not None:
                    await asyncio.wait({session.writer})
                if session.call is not None and not session.ended.is_set():
                    await session.call.done_writing()
                    await session.ended.wait()
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        self._loop.remove_reader(self._pipe.sock)
        self._tell_learner(AgentCost(cpu_ns(), self._start_cpu_ns, self._memory.progress_bytes))
        if not self._result.done():
            self._result.set_result(0)

    # ------------------------------------------------------------ bulk

    def _start_upload(self, action: events.StartUpload) -> None:
        assert self._transfers is not None
        self._spawn(self._run_transfer(self._transfers.upload(action)))

    def _stop_upload(self, action: events.StopUpload) -> None:
        assert self._transfers is not None
        self._transfers.stop_upload(action.piece, action.seq)

    def _start_download(self, action: events.StartDownload) -> None:
        assert self._transfers is not None
        self._spawn(self._run_transfer(self._transfers.download(action)))

    async def _run_transfer(self, transfer: Any) -> None:
        ended = await transfer
        self._tell_trouble()
        self.dispatch(ended)

    def _tell_trouble(self) -> None:
        """The training process learns that the bulk service is not there, and that it is again."""
        assert self._transfers is not None
        reason, was = self._transfers.unreachable, self._unreachable_s
        if reason:
            self._unreachable_s = time.monotonic() if was is None else was
            self._tell_learner(BulkTrouble(self._transfers.target, reason, time.monotonic() - self._unreachable_s))
        elif was is not None:
            self._unreachable_s = None
            self._tell_learner(BulkTrouble(self._transfers.target, "", 0.0))
