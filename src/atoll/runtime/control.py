"""The Control service at the syncer: streams of messages, bounded in number and length."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from atoll.core.messages import Hello, LearnerMessage, Refuse, SyncerMessage
from atoll.wire import atoll_pb2 as pb
from atoll.wire import channel as wire_channel
from atoll.wire import convert
from atoll.wire.check import WireError

HELLO_WAIT_S = 20.0
OUTBOX_MAX = 100_000
"""Messages that one stream may have waiting; a learner that reads none of them is cut off."""


class Stream:
    """One control stream after its Hello."""

    def __init__(self, number: int, hello: Hello, peer: str = "") -> None:
        self.number = number
        self.peer = peer
        self.hello = hello
        self.outbox: deque[SyncerMessage] = deque()
        self.wake = asyncio.Event()
        self.closing = False

    def send(self, message: SyncerMessage) -> None:
        """Queue a message; too many end the stream."""
        if self.closing:
            return
        if len(self.outbox) >= OUTBOX_MAX:
            self.outbox.clear()
            self.close()
            return
        self.outbox.append(message)
        self.wake.set()

    def close(self) -> None:
        """End the stream after what is queued."""
        self.closing = True
        self.wake.set()


class ControlService:
    """Handler of Session. The callbacks run in the event loop: on_open(stream), on_message(number, message),
    on_close(number), on_fault(text) of a learner, on_stranger(peer, text) of one without a token; `pieces()` is P once
    it is known, else 0."""

    def __init__(
        self,
        token: str,
        streams_max: int,
        *,
        on_open: Callable[[Stream], None],
        on_message: Callable[[int, LearnerMessage], None],
        on_close: Callable[[int], None],
        pieces: Callable[[], int],
        on_fault: Callable[[str], None],
        on_stranger: Callable[[str, str], None],
    ) -> None:
        self._token = token
        self._streams_max = streams_max
        self._on_open = on_open
        self._on_message = on_message
        self._on_close = on_close
        self._pieces = pieces
        self._on_fault = on_fault
        self._on_stranger = on_stranger
        self._next = 1
        self._open = 0
        self.bulk_port = 0
        self.streams: dict[int, Stream] = {}

    def handlers(self) -> grpc.GenericRpcHandler:
        """For grpc.aio.Server.add_generic_rpc_handlers."""
        session = grpc.stream_stream_rpc_method_handler(
            self.session, pb.LearnerEnvelope.FromString, pb.SyncerEnvelope.SerializeToString
        )
        return grpc.method_handlers_generic_handler("atoll.v1.Control", {"Session": session})

    async def session(self, _: Any, context: Any) -> None:
        """One stream from Hello to its end."""
        if not wire_channel.token_ok(context.invocation_metadata(), self._token):
            self._on_stranger(
                context.peer(), f"a learner at {context.peer()} came without the right token and was refused"
            )
            await self._refuse(context, "token", "the token is missing or wrong; set ATOLL_TOKEN as for the syncer")
            return
        if self._open >= self._streams_max:
            await self._refuse(context, "settings", f"the syncer has {self._open} streams, its most")
            return
        self._open += 1
        try:
            await self._greet(context)
        finally:
            self._open -= 1

    async def _refuse(self, context: Any, kind: str, message: str) -> None:
        await context.write(convert.syncer_to_wire(Refuse(kind, message)))

    async def _greet(self, context: Any) -> None:
        try:
            envelope = await asyncio.wait_for(context.read(), HELLO_WAIT_S)
            if envelope is grpc.aio.EOF:
                return
            hello = convert.learner_from_wire(envelope, 0)
        except TimeoutError:
            await self._refuse(context, "protocol", f"no Hello came in {HELLO_WAIT_S:.0f} s")
            return
        except WireError as error:
            await self._refuse(context, "protocol", str(error))
            return
        if not isinstance(hello, Hello):
            await self._refuse(context, "protocol", f"the first message is {type(hello).__name__}, not Hello")
            return
        stream = Stream(self._next, hello, context.peer())
        self._next += 1
        self.streams[stream.number] = stream
        reader = asyncio.ensure_future(self._read(stream, context))
        try:
            self._on_open(stream)
            await self._write(stream, context)
        finally:
            reader.cancel()
            del self.streams[stream.number]
            self._on_close(stream.number)

    async def _write(self, stream: Stream, context: Any) -> None:
        while True:
            while stream.outbox:
                count = min(len(stream.outbox), convert.BATCH_MAX)
                messages = [stream.outbox.popleft() for _ in range(count)]
                wire = [convert.syncer_to_wire(message, self.bulk_port) for message in messages]
                await context.write(convert.batch(wire))
            if stream.closing:
                return
            stream.wake.clear()
            await stream.wake.wait()

    async def _read(self, stream: Stream, context: Any) -> None:
        try:
            while not stream.closing:
                envelope = await context.read()
                if envelope is grpc.aio.EOF:
                    break
                for single in convert.unbatch(envelope):
                    message = convert.learner_from_wire(single, self._pieces())
                    if not stream.closing:
                        self._on_message(stream.number, message)
        except WireError as error:
            self._on_fault(f"learner {stream.hello.name} was cut off: {error}")
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            pass
        stream.close()
