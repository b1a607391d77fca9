"""Driver of core.syncer.Syncer: `serve(options)` runs a syncer process to the end of its run.

Bytes come in through the Control and Bulk services (runtime/control.py, runtime/bulk.py), become events, and the
machine's actions become messages, tape lines and work for the one worker thread (runtime/workshop.py). Before the first
learner has said what its model looks like there is no machine: that is the lobby (runtime/lobby.py).
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import torch

from atoll.core import events
from atoll.core.messages import Life, Refuse, SeedRequest, Welcome
from atoll.core.records import LifeEndLine, NoticeLine, Record
from atoll.core.syncer import Syncer
from atoll.errors import RunError
from atoll.runtime.bulk import BulkService, Incoming
from atoll.runtime.control import ControlService, Stream
from atoll.runtime.descriptors import Reserve, raise_limit, reason_of
from atoll.runtime.ending import write_at_last
from atoll.runtime.journal import Journal
from atoll.runtime.lobby import Lobby, Opened
from atoll.runtime.observers import Observers
from atoll.runtime.options import Listening, SyncerOptions
from atoll.runtime.scheduling import yield_to_training
from atoll.runtime.strangers import Strangers
from atoll.runtime.workshop import Checked, Published, Workshop
from atoll.store.rundir import gone_text, is_gone
from atoll.streams import Asked, Told, ending_signals
from atoll.wire import channel as wire_channel

FLUSH_INTERVAL_S = 1.0
TICKS = 5
"""Signs of its own life within the time that says that the syncer stood still."""
DEFAULT_OVERSLEPT_NS = 1_250_000_000
"""Until the settings are known."""
SEED_RETRY_S = 2.0
GOODBYE_S = 3.0
INTERRUPTED = 130

__all__ = ["Listening", "SyncerOptions", "serve"]


def serve(options: SyncerOptions) -> int:
    """Run a syncer until its run is over; the process's exit status. AtollError where it cannot begin."""
    yield_to_training()
    gc.freeze()
    raise_limit()
    torch.set_num_threads(options.torch_threads)
    return asyncio.run(SyncerServer(options).run())


class SyncerServer:
    """Owns the loop, the ports, the disk and the clock of one syncer."""

    def __init__(self, options: SyncerOptions) -> None:
        self._options = options
        self._token = wire_channel.load_token()
        wire_channel.check_listening(options.host, self._token)
        self._lobby = Lobby(options)
        self._run_id = self._lobby.run_id
        self._machine: Syncer | None = None
        self._opened: Opened | None = None
        self._queue: deque[events.SyncerEvent] = deque()
        self._busy = False
        self._awake_ns = time.monotonic_ns()
        self._overslept_ns = DEFAULT_OVERSLEPT_NS
        self._told = Told()
        self._journal = Journal(self._show, self._on_record)
        self._troubles: set[str] = set()
        self._lined_slots: set[int] = set()
        self._committed: dict[int, Published] = {}
        self._seeder: Life | None = None
        self._lives: dict[int, Life] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._reserve = Reserve()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="atoll-worker")
        self._strangers = Strangers(self._show)
        self._control = ControlService(
            self._token,
            options.streams_max,
            on_open=self._on_open,
            on_message=lambda number, message: self.dispatch(events.Received(number, message)),
            on_close=self._on_close,
            pieces=lambda: 0 if self._opened is None else len(self._opened.layout.pieces),
            on_fault=self._notice,
            on_stranger=self._strangers.say,
        )
        self._bulk = BulkService(
            self._run_id,
            self._token,
            self._on_upload,
            lambda life: self.dispatch(events.BulkProgress(life)),
        )
        self._observers = Observers(
            self._run_id,
            self._token,
            opened=lambda: self._opened,
            published=lambda: self._bulk.published,
            learners_ns=lambda: self._bulk.learners_ns,
        )
        self._performers: dict[type, Callable[[Any], None]] = {
            events.Send: self._send,
            events.CloseStream: self._close_stream,
            events.Write: lambda action: self._write(action.record, sync=action.sync),
            events.Merge: self._merge,
            events.Commit: self._commit,
            events.CommitSeed: lambda action: self._commit_seed(),
            events.DropSeed: lambda action: self._drop_seed(),
            events.Publish: self._publish,
            events.Accept: self._accept,
            events.Discard: lambda action: self._discard(action),
            events.SetTimer: self._set_timer,
            events.Notice: lambda action: self._show(action.text),
            events.RunOver: lambda action: self._spawn(self._run_over()),
        }

    # ------------------------------------------------------------ life of the process

    async def run(self) -> int:
        """Open the ports, serve, close."""
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[int] = self._loop.create_future()
        self._tasks: set[asyncio.Task[Any]] = set()
        # Before anything is awaited: asyncio's own handler would cancel what it meets.
        self._handle_signals()
        # Ports first: one that is in use must not leave a directory behind that looks like a run.
        handlers = (self._control.handlers(), self._observers.control_handlers())
        control, port = self._bind(handlers, self._options.port, "port", control=True)
        bulk_handlers = (self._bulk.handlers(), self._observers.bulk_handlers())
        bulk, bulk_port = self._bind(bulk_handlers, self._options.bulk_port, "bulk_port")
        self._control.bulk_port = self._observers.bulk_port = bulk_port
        rundir, self._epoch = self._lobby.open_directory()
        self._inode, self._gone = rundir.path.stat().st_ino, False
        self._journal.open(rundir.tape)
        try:
            await control.start()
            await bulk.start()
            if self._options.on_listening is not None:
                self._options.on_listening(Listening(self._run_id, self._options.host, port, bulk_port))
            self._loop.call_later(FLUSH_INTERVAL_S, self._flush_regularly)
            self._stay_awake()
            return await self._done
        finally:
            for stream in self._control.streams.values():
                stream.close()
            self._observers.end(over=False)
            await self._observers.last_fetches(self._show)
            await asyncio.gather(*(server.stop(GOODBYE_S) for server in (control, bulk)))
            self._worker.shutdown()
            self._journal.close()
            self._reserve.close()

    def _bind(
        self, handlers: tuple[grpc.GenericRpcHandler, ...], port: int, name: str, *, control: bool = False
    ) -> tuple[grpc.aio.Server, int]:
        options = wire_channel.CONTROL_OPTIONS if control else wire_channel.BULK_OPTIONS
        server = grpc.aio.server(
            options=options + wire_channel.SERVER_OPTIONS,
            maximum_concurrent_rpcs=4 * self._options.streams_max,
        )
        server.add_generic_rpc_handlers(handlers)
        target = wire_channel.format_address(self._options.host, port)
        try:
            bound = server.add_insecure_port(target)
        except RuntimeError:
            bound = 0
        if not bound:
            raise RunError(f"{name}={port} of {self._options.host} cannot be opened; is it in use? choose another")
        return server, bound

    def _handle_signals(self) -> None:
        if self._options.handle_signals:
            for number in ending_signals():
                self._loop.add_signal_handler(number, self._on_signal, number)
        self._asked = Asked()

    def _on_signal(self, number: int) -> None:
        if self._asked.count == self._asked.hear(number):
            return
        if self._asked.count > 1:
            os._exit(INTERRUPTED)
        if self._done.done():
            self._observers.give_up()
        elif self._machine is None:
            self._finish(INTERRUPTED)
        elif is_gone(self._options.run_dir, self._inode):
            self._fail(RunError(f"{gone_text(self._options.run_dir)}, and it was stopped"))
        else:
            self._notice("stopping: learners hand in their last work; once more ends at once")
            self.dispatch(events.StopRequested())

    def _finish(self, code: int) -> None:
        if not self._done.done():
            self._done.set_result(code)

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception())

    def _fail(self, error: BaseException | None) -> None:
        if error is not None and not self._done.done():
            self._done.set_exception(error)

    def _stay_awake(self) -> None:
        """Every tick, so that a long gap between two of them says that this process stood still."""
        self._loop.call_later(self._overslept_ns / TICKS / 1e9, self._stay_awake)
        if time.monotonic_ns() - self._awake_ns > self._overslept_ns:
            self.dispatch(events.Wake())
        self._awake_ns = time.monotonic_ns()

    def _flush_regularly(self) -> None:
        self._loop.call_later(FLUSH_INTERVAL_S, self._flush_regularly)
        self._look_for_directory()
        self._look_for_descriptors()
        self._spawn(self._flush())

    def _look_for_directory(self) -> None:
        gone, self._gone = self._gone, is_gone(self._options.run_dir, self._inode)
        if self._gone and not gone:
            self._show(f"{gone_text(self._options.run_dir)}; it goes on where it comes back, and a signal ends it")

    def _look_for_descriptors(self) -> None:
        """gRPC waits without a word for one that is free."""
        short = self._reserve.shortage()
        if short is not None:
            self._strangers.say("descriptors:", f"new connections wait: {reason_of(short)}")

    async def _flush(self) -> None:
        try:
            await self._loop.run_in_executor(self._worker, self._journal.flush)
        except OSError as error:
            self._trouble("the tape cannot be written", error)
        else:
            self._trouble("the tape cannot be written", None)

    # ------------------------------------------------------------ machine

    def dispatch(self, event: events.SyncerEvent) -> None:
        """Hand an event to the machine and carry out what it says, one event at a time."""
        if self._machine is None or self._done.done():
            return
        now_ns = time.monotonic_ns()
        if now_ns - self._awake_ns > self._overslept_ns:
            self._queue.append(events.Overslept(now_ns - self._awake_ns))
        self._awake_ns = now_ns
        self._queue.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._queue:
                self._perform(self._machine.handle(self._queue.popleft(), now_ns=time.monotonic_ns()))
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._busy = False

    def _perform(self, actions: list[events.SyncerAction]) -> None:
        for action in actions:
            if not isinstance(action, events.Write):
                self._journal.sync()
            self._performers[type(action)](action)
        self._journal.sync()

    def _set_timer(self, action: events.SetTimer) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0, action.at_ns - time.monotonic_ns()) / 1e9
        self._timer = self._loop.call_later(delay_s, self.dispatch, events.Wake())

    # ------------------------------------------------------------ tape and people

    def _write(self, record: Record, *, sync: bool = False) -> None:
        self._journal.write(record, sync=sync)
        if isinstance(record, LifeEndLine):
            self._bulk.forget(Life(record.name, record.generation))

    def _on_record(self, record: Record) -> None:
        if self._options.on_record is not None:
            self._told(self._options.on_record, record)

    def _notice(self, text: str) -> None:
        self._show(text)
        if self._machine is not None:
            self._write(NoticeLine(time.monotonic_ns(), text))

    def _trouble(self, what: str, error: OSError | None) -> None:
        """Said once, until it is over."""
        if error is None:
            self._troubles.discard(what)
        elif what not in self._troubles:
            self._troubles.add(what)
            self._notice(f"{what}: {reason_of(error)}")

    def _show(self, text: str) -> None:
        self._told(self._options.on_notice or _to_stderr, text)

    # ------------------------------------------------------------ streams

    def _on_open(self, stream: Stream) -> None:
        try:
            if self._machine is None:
                self._open_run(stream)
        except Exception as error:
            # gRPC would swallow it: a bug of ours must end the process, not one stream.
            self._fail(error)
            raise
        if self._machine is not None:
            self.dispatch(events.StreamOpened(stream.number, stream.hello))

    def _open_run(self, stream: Stream) -> None:
        """The lobby: the first Hello that fits decides the layout."""
        result = self._lobby.open_run(stream.hello)
        if not isinstance(result, Opened):
            stream.send(result)
            stream.close()
            self._refused(stream, result)
            return
        self._opened = result
        rundir, epoch = self._lobby.rundir, self._epoch
        keep = self._options.keep_contributions
        self._workshop = Workshop(result.config, result.layout, rundir, epoch.number, keep=keep)
        for record in self._lobby.first_lines(result, epoch, time.monotonic_ns()):
            self._write(record, sync=True)
        self._machine = Syncer(result.config, result.layout)
        self._overslept_ns = result.config.overslept_ns
        for warning in result.warnings:
            self._notice(warning)
        self.dispatch(events.Started(epoch.number, result.init is not None))
        if result.init is not None:
            for piece, finite in enumerate(self._workshop.seed_from_file(result.init)):
                self.dispatch(events.SeedArrived(None, piece, True, finite))

    def _on_close(self, number: int) -> None:
        self._lives.pop(number, None)
        self.dispatch(events.StreamClosed(number))

    def _send(self, action: events.Send) -> None:
        stream = self._control.streams.get(action.stream)
        if stream is None:
            return
        if isinstance(action.message, Welcome):
            self._lives[action.stream] = Life(stream.hello.name, action.message.generation)
        if isinstance(action.message, SeedRequest):
            self._expect_seed(self._lives[action.stream])
        stream.send(action.message)
        if isinstance(action.message, Refuse):
            self._refused(stream, action.message)

    def _refused(self, stream: Stream, refusal: Refuse) -> None:
        """For people here too, once per learner and minute, since it asks again. Who is put out was told already."""
        if refusal.kind == "put out":
            return
        name = stream.hello.name
        self._strangers.say(stream.peer, f"learner {name} was refused: {refusal.message}", name)

    def _close_stream(self, action: events.CloseStream) -> None:
        stream = self._control.streams.get(action.stream)
        if stream is not None:
            stream.close()

    # ------------------------------------------------------------ bulk

    def _accept(self, action: events.Accept) -> None:
        announce = action.announce
        self._bulk.accept(action.life, announce.piece, announce.seq, announce.size_bytes, announce)

    def _discard(self, action: events.Discard) -> None:
        self._bulk.discard(action.life, action.piece, action.seq)

    def _publish(self, action: events.Publish) -> None:
        published = self._committed[action.piece]
        assert published.version == action.version
        self._bulk.publish(action.piece, published)

    def _in_worker(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Run `work` in the worker thread, `then` with its result in the loop. Works in the order of calls."""
        future = self._loop.run_in_executor(self._worker, work)
        future.add_done_callback(lambda done: self._worked(done, then))

    def _worked(self, done: asyncio.Future[Any], then: Callable[[Any], None]) -> None:
        if done.cancelled() or self._done.done():
            return
        if done.exception() is not None:
            self._fail(done.exception())
        else:
            then(done.result())

    def _on_upload(self, incoming: Incoming, seal: str) -> None:
        life, piece, seq, announce = incoming.life, incoming.piece, incoming.seq, incoming.announce
        if announce is None:
            self._in_worker(
                lambda: self._workshop.check_seed(incoming.buffer, piece, seal),
                lambda checked: self._seed_checked(incoming, checked),
            )
            return

        def checked_event(checked: Checked) -> None:
            incoming.hash, incoming.norms = checked.hash, checked.norms
            known = (checked.hash, checked.hash_ok, checked.finite, checked.norm)
            self.dispatch(events.ContributionArrived(life, piece, seq, *known))

        self._in_worker(lambda: self._workshop.check_contribution(life, announce, incoming.buffer, seal), checked_event)

    # ------------------------------------------------------------ version 0

    def _expect_seed(self, life: Life) -> None:
        assert self._opened is not None
        self._seeder = life
        for piece, size in enumerate(self._opened.payload_sizes):
            self._bulk.accept(life, piece, 0, size, None)

    def _seed_checked(self, incoming: Incoming, checked: Checked) -> None:
        incoming.buffer = b""
        if incoming.life == self._seeder:
            self.dispatch(events.SeedArrived(incoming.life, incoming.piece, checked.hash_ok, checked.finite))

    def _drop_seed(self) -> None:
        assert self._opened is not None
        if self._seeder is not None:
            for piece in range(len(self._opened.layout.pieces)):
                self._bulk.discard(self._seeder, piece, 0)
            if self._seeder not in self._lives.values():
                self._bulk.forget(self._seeder)
            self._seeder = None
        self._in_worker(self._workshop.drop_seed, lambda _: None)

    def _commit_seed(self) -> None:
        self._in_worker(self._try_commit_seed, self._seed_committed)

    def _try_commit_seed(self) -> list[Published] | OSError:
        try:
            with self._reserve.lent():
                return self._workshop.commit_seed()
        except OSError as error:
            return error

    def _seed_committed(self, result: list[Published] | OSError) -> None:
        if isinstance(result, OSError):
            self._notice(f"version 0 cannot be written: {reason_of(result)}; trying again")
            self._loop.call_later(SEED_RETRY_S, self._commit_seed)
            return
        self._committed = dict(enumerate(result))
        hashes = tuple(published.hash for published in result)
        self.dispatch(events.SeedCommitted(hashes, tuple(len(published.data) for published in result)))

    # ------------------------------------------------------------ merge, commit, end

    def _merge(self, action: events.Merge) -> None:
        inputs = [self._bulk.payload(i.life, action.piece, i.seq) for i in action.inputs]

        def work() -> events.MergeDone:
            payloads, norms = [i.buffer for i in inputs], [i.norms for i in inputs]
            return self._workshop.merge(action, payloads, norms)

        def keep() -> None:
            for incoming in inputs:
                assert incoming.announce is not None
                self._workshop.keep(incoming.life, incoming.announce, incoming.buffer, incoming.hash)

        self._in_worker(work, self.dispatch)
        self._in_worker(lambda: _os_error_of(keep), self._kept)

    def _kept(self, error: OSError | None) -> None:
        self._trouble("a contribution cannot be kept for replay", error)

    def _commit(self, action: events.Commit) -> None:
        """The slot's line, synced, and then the commit file, synced (R11)."""
        try:
            if action.slot not in self._lined_slots:
                self._journal.write_now(action.record)
                self._lined_slots.add(action.slot)
        except OSError as error:
            reason = reason_of(error)
            self._loop.call_soon(lambda: self.dispatch(events.CommitFailed(action.slot, reason)))
            return
        self._in_worker(lambda: self._try_commit(action), lambda result: self._commit_ended(action, result))

    def _try_commit(self, action: events.Commit) -> Published | OSError:
        try:
            with self._reserve.lent():
                return self._workshop.commit(action, self._journal.tape)
        except OSError as error:
            return error

    def _commit_ended(self, action: events.Commit, result: Published | OSError) -> None:
        if isinstance(result, OSError):
            self.dispatch(events.CommitFailed(action.slot, reason_of(result)))
            return
        self._lined_slots.discard(action.slot)
        self._committed[action.piece] = result
        self.dispatch(events.CommitDone(action.slot))

    async def _run_over(self) -> None:
        self._observers.end(over=True)
        self._reserve.close()
        where = self._options.run_dir
        await write_at_last("the end of the tape", self._write_last_lines, where, self._show)
        path = await write_at_last("the model", self._export, where, self._show)
        if path is not None:
            self._show(f"the model is in {path}")
        self._finish(0)

    async def _write_last_lines(self) -> None:
        self._journal.write_kept()

    async def _export(self) -> str | None:
        return await self._loop.run_in_executor(self._worker, self._workshop.export)


def _to_stderr(text: str) -> None:
    print(f"atoll: {text}", file=sys.stderr, flush=True)


def _os_error_of(work: Callable[[], None]) -> OSError | None:
    try:
        work()
    except OSError as error:
        return error
    return None
