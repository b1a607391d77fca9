"""The Bulk service at the syncer: uploads of what was accepted, downloads of what is published.

Memory is taken only for contributions that the core accepted, and only as much as the layout says. A partial upload is
kept until its contribution is discarded; the learner asks for its offset and goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from atoll.core.messages import Announce, Life, Merged
from atoll.runtime.workshop import Published
from atoll.wire import atoll_pb2 as pb
from atoll.wire import channel as wire_channel
from atoll.wire import check, convert
from atoll.wire.check import WireError
from atoll.wire.pacing import Pacer

ACCEPT_WAIT_S = 5.0
"""An upload may overtake its announcement on the other connection; so long it waits for it."""
PROGRESS_NS = 100_000_000
PACERS_MAX = 8192
LIVES_MAX = 8192
ARRIVALS_MAX = 8192
"""Uploads that wait for their announcement."""

Key = tuple[Life, int, int]


@dataclass(slots=True, eq=False)
class Incoming:
    """A contribution, or a piece of version 0 (announce None), that is expected or here."""

    life: Life
    piece: int
    seq: int
    size_bytes: int
    announce: Announce | None
    buffer: bytes | bytearray = b""
    received_bytes: int = 0
    owner: int = 0
    complete: bool = False
    hash: str = ""
    norms: tuple[float, ...] = ()


class BulkService:
    """Handlers of the three calls. `on_complete(incoming, seal)` and `on_progress(life)` run in the event loop."""

    def __init__(
        self,
        run_id: str,
        token: str,
        on_complete: Callable[[Incoming, str], None],
        on_progress: Callable[[Life], None],
    ) -> None:
        self._run_id = run_id
        self._token = token
        self._on_complete = on_complete
        self._on_progress = on_progress
        self._incoming: dict[Key, Incoming] = {}
        self._discarded: dict[Life, dict[int, int]] = {}
        """Newest discarded seq per life and piece; gone with the life."""
        self._arrivals: dict[Key, asyncio.Event] = {}
        self._published: dict[int, Published] = {}
        self._pacers: dict[str, Pacer] = {}
        self._progress_ns: dict[Life, int] = {}
        self.learners_ns = 0
        """When bytes of a learner moved last."""

    def handlers(self) -> grpc.GenericRpcHandler:
        """For grpc.aio.Server.add_generic_rpc_handlers."""
        table = {
            "UploadState": grpc.unary_unary_rpc_method_handler(
                self.upload_state, pb.ContributionId.FromString, pb.UploadStateResult.SerializeToString
            ),
            "Upload": grpc.stream_unary_rpc_method_handler(
                self.upload, pb.UploadChunk.FromString, pb.UploadResult.SerializeToString
            ),
            "Download": grpc.unary_stream_rpc_method_handler(
                self.download, pb.DownloadRequest.FromString, pb.DownloadChunk.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler("atoll.v1.Bulk", table)

    # ------------------------------------------------------------ what the core says

    def accept(self, life: Life, piece: int, seq: int, size_bytes: int, announce: Announce | None) -> None:
        """Expect these bytes. Again, after a reconnect: what is here already stays."""
        key = (life, piece, seq)
        if key not in self._incoming:
            self._incoming[key] = Incoming(life, piece, seq, size_bytes, announce)
        waiter = self._arrivals.pop(key, None)
        if waiter is not None:
            waiter.set()

    def discard(self, life: Life, piece: int, seq: int) -> Incoming | None:
        """Free the bytes; a running upload of them ends."""
        newest = self._discarded.setdefault(life, {})
        newest[piece] = max(newest.get(piece, -1), seq)
        incoming = self._incoming.pop((life, piece, seq), None)
        if incoming is not None:
            incoming.owner += 1
        return incoming

    def forget(self, life: Life) -> None:
        """This life is over and nothing of it is expected any more."""
        self._discarded.pop(life, None)
        self._progress_ns.pop(life, None)
        self._pacers.pop(life.name, None)

    def payload(self, life: Life, piece: int, seq: int) -> Incoming:
        """A complete contribution."""
        incoming = self._incoming[life, piece, seq]
        assert incoming.complete
        return incoming

    @property
    def published(self) -> Mapping[int, Published]:
        """What is served now, by piece."""
        return self._published

    def publish(self, piece: int, published: Published) -> None:
        """Serve this version from now on; downloads that run go on with theirs."""
        self._published[piece] = published

    # ------------------------------------------------------------ calls

    async def _guard(self, context: Any, run_id: str) -> None:
        if not wire_channel.token_ok(context.invocation_metadata(), self._token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")
        if run_id != self._run_id:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this syncer serves another run")

    async def upload_state(self, request: pb.ContributionId, context: Any) -> pb.UploadStateResult:
        """How much of an upload is here."""
        try:
            run_id, life, piece, seq = convert.contribution_from_wire(request)
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        await self._guard(context, run_id)
        incoming = await self._expected(life, piece, seq)
        if incoming is None:
            return pb.UploadStateResult(unwanted=True)
        return pb.UploadStateResult(offset=incoming.received_bytes)

    async def upload(self, _: Any, context: Any) -> pb.UploadResult:
        """Take an upload in."""
        chunk = await context.read()
        if chunk is grpc.aio.EOF or not chunk.HasField("header"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an upload begins with a header")
        try:
            run_id, life, piece, seq = convert.contribution_from_wire(chunk.header.id)
            await self._guard(context, run_id)
            incoming = await self._expected(life, piece, seq)
            if incoming is None:
                return pb.UploadResult(unwanted=True)
            if not incoming.complete:
                return await self._receive(incoming, chunk, context)
            return pb.UploadResult()
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise

    async def _expected(self, life: Life, piece: int, seq: int) -> Incoming | None:
        """What was accepted under this name, waiting a little for it; None where it is not wanted."""
        key = (life, piece, seq)
        if key not in self._incoming and seq > self._discarded.get(life, {}).get(piece, -1):
            if key not in self._arrivals and len(self._arrivals) >= ARRIVALS_MAX:
                return None
            waiter = self._arrivals.setdefault(key, asyncio.Event())
            try:
                await asyncio.wait_for(waiter.wait(), ACCEPT_WAIT_S)
            except TimeoutError:
                pass
            finally:
                if self._arrivals.get(key) is waiter:
                    del self._arrivals[key]
        return self._incoming.get(key)

    async def _receive(self, incoming: Incoming, chunk: pb.UploadChunk, context: Any) -> pb.UploadResult:
        header = chunk.header
        if header.size_bytes != incoming.size_bytes:
            raise WireError(f"upload of {header.size_bytes} bytes must have {incoming.size_bytes}")
        if header.offset > incoming.received_bytes:
            raise WireError(f"upload goes on at {header.offset}; only {incoming.received_bytes} bytes are here")
        # A newer call takes over: the older one is a connection that died without a word.
        incoming.owner += 1
        owner = incoming.owner
        incoming.received_bytes = header.offset
        while chunk is not grpc.aio.EOF:
            self._append(incoming, chunk.data)
            if chunk.seal:
                return self._seal(incoming, check.check_hash("seal", chunk.seal))
            chunk = await context.read()
            if incoming.owner != owner:
                return pb.UploadResult(unwanted=True)
        raise WireError(f"upload ended at {incoming.received_bytes} of {incoming.size_bytes} bytes")

    def _append(self, incoming: Incoming, data: bytes) -> None:
        start = incoming.received_bytes
        stop = start + len(data)
        if stop > incoming.size_bytes:
            raise WireError(f"upload is longer than the {incoming.size_bytes} bytes that were announced")
        if len(data) == incoming.size_bytes:
            incoming.buffer = data
        else:
            if not isinstance(incoming.buffer, bytearray):
                incoming.buffer = bytearray(incoming.size_bytes)
            incoming.buffer[start:stop] = data
        incoming.received_bytes = stop
        self._progress(incoming.life)

    def _seal(self, incoming: Incoming, seal: str) -> pb.UploadResult:
        if incoming.received_bytes != incoming.size_bytes:
            raise WireError(f"upload is sealed at {incoming.received_bytes} of {incoming.size_bytes} bytes")
        incoming.complete = True
        self._on_complete(incoming, seal)
        return pb.UploadResult()

    def _progress(self, life: Life) -> None:
        now_ns = self.learners_ns = time.monotonic_ns()
        if now_ns - self._progress_ns.get(life, 0) >= PROGRESS_NS:
            if life not in self._progress_ns and len(self._progress_ns) >= LIVES_MAX:
                self._progress_ns.pop(next(iter(self._progress_ns)))  # a life that has ended may still download
            self._progress_ns[life] = now_ns
            self._on_progress(life)

    async def download(self, request: pb.DownloadRequest, context: Any) -> None:
        """Send the newest version of a piece, from where the receiver stopped if it has that version."""
        try:
            life = Life(check.check_name("name", request.name), check.check_number("g", request.generation))
            wanted = convert.version_from_wire(request.version)
            resume = convert.version_from_wire(request.resume_version)
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        await self._guard(context, request.run_id)
        published = self._published.get(request.piece)
        if published is None or published.version < wanted:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this version is not published")
            return
        size = len(published.data)
        offset = request.resume_offset if resume == published.version and request.resume_offset < size else 0
        await self._send(published, life, offset, context, whole=request.whole)

    async def _send(self, published: Published, life: Life, offset: int, context: Any, *, whole: bool) -> None:
        seq = published.newest_merged.get(life, 0)
        size = len(published.data)
        header: pb.DownloadHeader | None = pb.DownloadHeader(
            version=convert.version_to_wire(published.version),
            slot=published.slot,
            size_bytes=size,
            hash=published.hash,
            merged=convert.merged_to_wire(Merged(life.generation, seq) if seq else Merged()),
            offset=offset,
        )
        pacer = self._pacer(life.name)
        chunk_bytes_least = wire_channel.CHUNK_BYTES_MAX if whole else 0
        while True:
            stop = min(offset + max(pacer.chunk_bytes, chunk_bytes_least), size)
            before_ns = time.monotonic_ns()
            await context.write(pb.DownloadChunk(header=header, data=bytes(published.data[offset:stop])))
            pause_ns = pacer.written(stop - offset, time.monotonic_ns() - before_ns)
            self._progress(life)
            if stop == size:
                return
            offset, header = stop, None
            if pause_ns:
                await asyncio.sleep(pause_ns / 1e9)

    def _pacer(self, name: str) -> Pacer:
        if name not in self._pacers and len(self._pacers) >= PACERS_MAX:
            self._pacers.pop(next(iter(self._pacers)))
        return self._pacers.setdefault(name, Pacer())
