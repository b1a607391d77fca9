"""Bulk transfers of one agent: between shared memory and the syncer, in chunks, paced, resumed where they broke."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import grpc

from atoll.core.events import DownloadEnded, StartDownload, StartUpload, UploadEnded
from atoll.core.messages import Life, Merged, Version
from atoll.errors import AtollError
from atoll.runtime.memory import SharedMemory
from atoll.tensors.hashing import PayloadHasher, payload_hash
from atoll.wire import atoll_pb2 as pb
from atoll.wire import channel as wire_channel
from atoll.wire import check, convert
from atoll.wire.check import WireError
from atoll.wire.pacing import WHOLE_NS, Pacer

BROKEN = (grpc.aio.AioRpcError, AtollError, asyncio.InvalidStateError, asyncio.CancelledError)
SERVICE = "/atoll.v1.Bulk/"
STATE_S = 30.0
FAST_NS = 100_000_000


@dataclass(slots=True)
class _Partial:
    """A download that broke: what was there, and where it lies."""

    piece: int
    place: int
    version: Version
    offset: int
    hasher: Any


class Transfers:
    """The bulk channel of one agent, with at most one upload and one download at a time."""

    def __init__(self, memory: SharedMemory, token: str) -> None:
        self._memory = memory
        self._metadata = wire_channel.credentials_of(token)
        self._target = ""
        self._channel: grpc.aio.Channel | None = None
        self._pacer = Pacer()
        self._run_id = ""
        self._life = Life("", 0)
        self._uploading: tuple[int, int] | None = None
        self._upload_call: Any = None
        self._moved_bytes = 0
        self._partial: _Partial | None = None
        self.unreachable = ""
        """Why the newest transfer found no connection; empty: it did."""
        self._fast = False
        """Downloads take no time to speak of: then one that fits a chunk is one operation of gRPC."""

    def aim(self, target: str, run_id: str, life: Life) -> None:
        """Where transfers that start from now on go, and for whom."""
        self._run_id, self._life = run_id, life
        if target == self._target:
            return
        self._target = target
        channel = grpc.aio.insecure_channel(target, options=wire_channel.BULK_OPTIONS)
        self._channel = channel
        self._open_state = channel.unary_unary(
            SERVICE + "UploadState", pb.ContributionId.SerializeToString, pb.UploadStateResult.FromString
        )
        # What fits one chunk is one message: gRPC then does the whole call in one operation.
        self._open_whole_upload = channel.unary_unary(
            SERVICE + "Upload", pb.UploadChunk.SerializeToString, pb.UploadResult.FromString
        )
        self._open_upload = channel.stream_unary(
            SERVICE + "Upload", pb.UploadChunk.SerializeToString, pb.UploadResult.FromString
        )
        self._open_whole_download = channel.unary_unary(
            SERVICE + "Download", pb.DownloadRequest.SerializeToString, pb.DownloadChunk.FromString
        )
        self._open_download = channel.unary_stream(
            SERVICE + "Download", pb.DownloadRequest.SerializeToString, pb.DownloadChunk.FromString
        )

    # ------------------------------------------------------------ upload

    async def upload(self, action: StartUpload) -> UploadEnded:
        """Send the upload buffer of a piece."""
        key = (action.piece, action.seq)
        started_ns = time.monotonic_ns()
        self._uploading, self.unreachable = key, ""
        self._moved_bytes = 0
        try:
            result = await self._upload(action)
        except BROKEN as error:
            self._note(error)
            result = "unwanted" if self._uploading is None else "broken"
        self._uploading = self._upload_call = None
        duration_ns = time.monotonic_ns() - started_ns
        return UploadEnded(action.piece, action.seq, result, self._moved_bytes, duration_ns)

    def stop_upload(self, piece: int, seq: int) -> None:
        """End the running upload, if it is this one; it ends as unwanted."""
        if self._uploading == (piece, seq):
            self._uploading = None
            if self._upload_call is not None:
                self._upload_call.cancel()

    async def _upload(self, action: StartUpload) -> str:
        name = convert.contribution_to_wire(self._run_id, self._life, action.piece, action.seq)
        offset = 0
        if action.again:
            state = await self._open_state(name, metadata=self._metadata, timeout=STATE_S)
            if state.unwanted:
                return "unwanted"
            offset = check.check_number("offset", state.offset, action.size_bytes)
        if self._uploading is None:
            return "unwanted"
        if offset == 0 and action.size_bytes <= self._pacer.chunk_bytes:
            return await self._send_whole(name, action)
        call = self._upload_call = self._open_upload(metadata=self._metadata)
        try:
            await self._send_chunks(call, name, action, offset)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The syncer may have answered before all was sent: then that answer counts.
            if self._uploading is None:
                return "unwanted"
        answer = await call
        return "unwanted" if answer.unwanted else "ok"

    @property
    def target(self) -> str:
        """Where transfers go."""
        return self._target

    def _note(self, error: BaseException) -> None:
        gone = isinstance(error, grpc.aio.AioRpcError) and error.code() == grpc.StatusCode.UNAVAILABLE
        self.unreachable = check.one_line(error.details() or "unavailable") if gone else ""

    def _moved(self, size_bytes: int) -> None:
        self._moved_bytes += size_bytes
        self._memory.progress_bytes += size_bytes

    async def _send_whole(self, name: pb.ContributionId, action: StartUpload) -> str:
        data = bytes(self._memory.upload(action.piece)[: action.size_bytes])
        header = pb.UploadHeader(id=name, size_bytes=action.size_bytes)
        chunk = pb.UploadChunk(header=header, data=data, seal=payload_hash(data))
        before_ns = time.monotonic_ns()
        self._upload_call = self._open_whole_upload(chunk, metadata=self._metadata)
        answer = await self._upload_call
        pause_ns = self._pacer.whole(time.monotonic_ns() - before_ns)
        self._moved(action.size_bytes)
        if pause_ns:
            await asyncio.sleep(pause_ns / 1e9)
        return "unwanted" if answer.unwanted else "ok"

    async def _send_chunks(self, call: Any, name: pb.ContributionId, action: StartUpload, offset: int) -> None:
        view = self._memory.upload(action.piece)[: action.size_bytes]
        hasher = PayloadHasher(view[:offset])
        header: pb.UploadHeader | None = pb.UploadHeader(id=name, size_bytes=action.size_bytes, offset=offset)
        while True:
            stop = min(offset + self._pacer.chunk_bytes, action.size_bytes)
            part = view[offset:stop]
            hasher.update(part)
            last = stop == action.size_bytes
            chunk = pb.UploadChunk(header=header, data=bytes(part), seal=hasher.hexdigest() if last else "")
            before_ns = time.monotonic_ns()
            await call.write(chunk)
            pause_ns = self._pacer.written(stop - offset, time.monotonic_ns() - before_ns)
            self._moved(stop - offset)
            if last:
                return
            offset, header = stop, None
            if pause_ns:
                await asyncio.sleep(pause_ns / 1e9)

    # ------------------------------------------------------------ download

    async def download(self, action: StartDownload) -> DownloadEnded:
        """Fetch the newest version of a piece into a place."""
        progress, self.unreachable = self._resume(action), ""
        started_ns = time.monotonic_ns()
        try:
            header = await self._download(action, progress)
            self._fast = time.monotonic_ns() - started_ns < (WHOLE_NS if self._fast else FAST_NS)
            ok = progress.hasher.hexdigest() == header.hash
            merged = convert.merged_from_wire(header.merged)
            return DownloadEnded(action.piece, action.place, progress.version, header.slot, merged, ok)
        except BROKEN as error:
            self._note(error)
            self._fast = False
            if progress.offset:
                self._partial = progress
            return DownloadEnded(action.piece, action.place, None, 0, Merged(), False)

    def _resume(self, action: StartDownload) -> _Partial:
        """Where to go on: after what an earlier try left, if that was of this piece."""
        old, self._partial = self._partial, None
        if old is None or old.piece != action.piece:
            hasher = PayloadHasher()
            return _Partial(action.piece, action.place, Version(0, 0), 0, hasher)
        if old.place != action.place:
            target = self._memory.place(action.place, action.size_bytes)
            target[: old.offset] = self._memory.place(old.place, action.size_bytes)[: old.offset]
            old.place = action.place
        return old

    async def _download(self, action: StartDownload, progress: _Partial) -> pb.DownloadHeader:
        request = pb.DownloadRequest(
            run_id=self._run_id,
            name=self._life.name,
            generation=self._life.generation,
            piece=action.piece,
            version=convert.version_to_wire(action.version),
            resume_version=convert.version_to_wire(progress.version),
            resume_offset=progress.offset,
        )
        if self._fast and not progress.offset and action.size_bytes <= wire_channel.CHUNK_BYTES_MAX:
            request.whole = True
            chunk = await self._open_whole_download(request, metadata=self._metadata)
            self._begin(action, progress, chunk.header)
            self._store(action, progress, chunk.data)
            return self._complete(action, progress, chunk.header)
        call = self._open_download(request, metadata=self._metadata)
        chunk = await call.read()
        if chunk is grpc.aio.EOF or not chunk.HasField("header"):
            raise WireError(f"download of fragment {action.piece} has no header")
        header = chunk.header
        self._begin(action, progress, header)
        while chunk is not grpc.aio.EOF:
            self._store(action, progress, chunk.data)
            chunk = await call.read()
        return self._complete(action, progress, header)

    def _store(self, action: StartDownload, progress: _Partial, data: bytes) -> None:
        stop = progress.offset + len(data)
        if stop > action.size_bytes:
            raise WireError(f"download of fragment {action.piece} is longer than {action.size_bytes} bytes")
        self._memory.place(action.place, action.size_bytes)[progress.offset : stop] = data
        progress.hasher.update(data)
        progress.offset = stop
        self._memory.progress_bytes += len(data)

    def _complete(self, action: StartDownload, progress: _Partial, header: pb.DownloadHeader) -> pb.DownloadHeader:
        if progress.offset != action.size_bytes:
            raise WireError(f"download of fragment {action.piece} ended at {progress.offset}/{action.size_bytes} bytes")
        return header

    def _begin(self, action: StartDownload, progress: _Partial, header: pb.DownloadHeader) -> None:
        """Check the header; start anew where the syncer has another version."""
        if header.size_bytes != action.size_bytes:
            raise WireError(f"fragment {action.piece} has {header.size_bytes} bytes, not {action.size_bytes}")
        check.check_number("slot", header.slot)
        version = convert.version_from_wire(header.version)
        if header.offset == 0:
            progress.version, progress.offset = version, 0
            progress.hasher = PayloadHasher()
        elif header.offset != progress.offset or version != progress.version:
            raise WireError(f"download of fragment {action.piece} goes on at {header.offset}, not {progress.offset}")
