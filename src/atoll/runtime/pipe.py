"""Frames between a training process and its agent: 4 bytes of length, then msgpack [kind, body, at_ns].

Bodies are the core's dataclasses. `Heard` and `FromLearner` only wrap a message; their kind is the message's class
name after a mark, so that every body has one type and is checked while it is decoded. at_ns: of Heard, else 0. No torch
and no gRPC here.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from atoll.core import messages
from atoll.core.events import (
    FromLearner,
    Heard,
    LifeBegun,
    Past,
    PlaceFreed,
    SeedOffered,
    StreamLost,
    UpdateArrived,
    UploadDone,
)
from atoll.core.layout import TensorSpec
from atoll.errors import AtollError

FRAME_BYTES_MAX = 64 * 1024 * 1024
BACKLOG_BYTES_MAX = 64 * 1024 * 1024
RECEIVE_BYTES = 256 * 1024
_LENGTH = struct.Struct("<I")


class PipeError(AtollError):
    """The other process ended, or sent what it never should."""


@dataclass(frozen=True, slots=True)
class Setup:
    """First frame to the agent: where to go, and what Hello says."""

    address: str
    bulk_address: str
    """Empty: the host of `address` with the port that Welcome tells."""
    run_id: str
    name: str
    fingerprint: str
    tensors: tuple[TensorSpec, ...]
    extra: str = ""
    name_wait_ns: int = 0
    """How long a name that is in use is asked for again."""
    past: Past | None = None
    """Of the life that goes on, where an agent before this one ended."""
    protocol: int = 0
    """For tests: speak another protocol version."""


@dataclass(frozen=True, slots=True)
class AgentCost:
    """Last frame of the agent: its CPU time, user and system, and what it did for it."""

    cpu_ns: int
    """Since the process began."""
    start_cpu_ns: int
    """Part of it before the first Welcome: interpreter, imports, connecting. Does not grow with the run."""
    bulk_bytes: int


@dataclass(frozen=True, slots=True)
class BulkTrouble:
    """From the agent: since when transfers find no connection; reason empty: one has moved again."""

    target: str
    reason: str
    lasted_s: float


_HEARD, _FROM_LEARNER = "<", ">"
_BODIES = (
    *(StreamLost, UpdateArrived, UploadDone, SeedOffered, PlaceFreed, LifeBegun, Setup, AgentCost, BulkTrouble),
    *get_args(messages.SyncerMessage),
    *get_args(messages.LearnerMessage),
)

_encoder = msgspec.msgpack.Encoder()
_frame_decoder = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw, int])
_decoders = {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in _BODIES}


def encode_frame(item: Any) -> bytes:
    """A frame with its length."""
    if isinstance(item, Heard):
        frame = (_HEARD + type(item.message).__name__, item.message, item.at_ns)
    elif isinstance(item, FromLearner):
        frame = (_FROM_LEARNER + type(item.message).__name__, item.message, 0)
    else:
        frame = (type(item).__name__, item, 0)
    data = _encoder.encode(frame)
    assert len(data) <= FRAME_BYTES_MAX
    return _LENGTH.pack(len(data)) + data


def decode_frame(data: bytes | bytearray | memoryview) -> Any:
    """The item of one frame, without its length; PipeError where it is none."""
    try:
        kind, raw, at_ns = _frame_decoder.decode(data)
        body = _decoders[kind.lstrip("<>")].decode(raw)
    except (msgspec.DecodeError, KeyError, RecursionError) as error:
        raise PipeError(f"a frame of {len(data)} bytes cannot be read: {error}") from error
    if kind[0] == _HEARD:
        return Heard(body, at_ns)
    return FromLearner(body) if kind[0] == _FROM_LEARNER else body


class Frames:
    """Splits a stream of bytes into items."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Items that are whole now, in order."""
        self._buffer += data
        items = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            if size > FRAME_BYTES_MAX:
                raise PipeError(f"a frame of {size} bytes is announced; at most {FRAME_BYTES_MAX} are allowed")
            stop = start + _LENGTH.size + size
            if len(self._buffer) < stop:
                break
            items.append(decode_frame(bytes(self._buffer[start + _LENGTH.size : stop])))
            start = stop
        del self._buffer[:start]
        return items


class Pipe:
    """One end of the socket pair; never blocks. What the other side does not take yet is kept, bounded."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._frames = Frames()
        self._backlog = bytearray()

    @property
    def sending(self) -> bool:
        """True while something is kept: call `flush` when the socket can be written."""
        return bool(self._backlog)

    def send(self, item: Any) -> None:
        """Hand an item over. PipeError where the other side is gone, or takes nothing at all."""
        self.put(item)
        self.flush()

    def put(self, item: Any) -> None:
        """Hand an item over at the next `flush`: several then wake the other side once."""
        frame = encode_frame(item)
        if len(self._backlog) + len(frame) > BACKLOG_BYTES_MAX:
            raise PipeError(f"the other process took nothing for {len(self._backlog)} bytes; it hangs")
        self._backlog += frame

    def flush(self) -> None:
        """Write what can be written now."""
        while self._backlog:
            try:
                sent = self.sock.send(self._backlog)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise PipeError(f"the other process is gone: {error}") from error
            del self._backlog[:sent]

    def receive(self) -> list[Any]:
        """Items that have come. PipeError at the end of the stream."""
        items: list[Any] = []
        while True:
            try:
                data = self.sock.recv(RECEIVE_BYTES)
            except (BlockingIOError, InterruptedError):
                return items
            except OSError as error:
                raise PipeError(f"the other process is gone: {error}") from error
            if not data:
                if items:
                    return items
                raise PipeError("the other process ended")
            items += self._frames.feed(data)
            if len(data) < RECEIVE_BYTES:
                return items

    def close(self) -> None:
        """Close the socket; the other side sees the end of the stream."""
        self.sock.close()
