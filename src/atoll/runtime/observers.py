"""Observers at the syncer: who may look at the published model without being a member of the run.

An observer has the token and nothing else: no name, no generation, no place in any slot; the core never hears of it.
It asks what is trained (Observe, on the control port) and fetches all pieces as published at one instant (Fetch, on the
bulk port). Both are bounded in number, and learners go first: a fetch has at most a tenth of its link while their bytes
move, and all fetches together have BYTES_PER_S. Memory: what was published when a fetch began lives until it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc

from atoll.core.messages import PROTOCOL_VERSION
from atoll.runtime.lobby import Opened
from atoll.runtime.workshop import Published
from atoll.wire import atoll_pb2 as pb
from atoll.wire import channel as wire_channel
from atoll.wire import check, observing
from atoll.wire.channel import MIB
from atoll.wire.check import WireError
from atoll.wire.pacing import SHARE_PERCENT, Pacer

OBSERVERS_MAX = 8
FETCHES_MAX = 2
"""Of them, so many move bytes at a time; the others wait for their turn."""
BYTES_PER_S = 64 * MIB
OBSERVE_S = 0.2
"""An Observe takes at least so long: with OBSERVERS_MAX a bound on how many there are per second."""
CHUNK_BYTES = 256 * 1024
LAST_FETCH_S = 60.0
"""So long the syncer stays at the end of a run for those who fetch its last model."""
STALL_S = 60.0
"""A chunk that is not taken for so long ends the fetch."""
WAIT_NS_MAX = 366 * 86_400 * 10**9
LEARNERS_BUSY_NS = 300_000_000


class Observers:
    """Handlers of Observe and Fetch. `opened()`, `published()` and `learners_ns()`, when bytes of learners moved last,
    are asked in the event loop."""

    def __init__(
        self,
        run_id: str,
        token: str,
        *,
        opened: Callable[[], Opened | None],
        published: Callable[[], Mapping[int, Published]],
        learners_ns: Callable[[], int],
    ) -> None:
        self._run_id = run_id
        self._token = token
        self._opened = opened
        self._published = published
        self._learners_ns = learners_ns
        self._here = 0
        self._nobody = asyncio.Event()
        self._nobody.set()
        self._turn = asyncio.Semaphore(FETCHES_MAX)
        self._moving = 0
        self._ended = asyncio.Event()
        self._over = False
        self.bulk_port = 0

    def control_handlers(self) -> grpc.GenericRpcHandler:
        """Observe, beside Session."""
        observe = grpc.unary_unary_rpc_method_handler(
            self.observe, pb.ObserveRequest.FromString, pb.ObserveResult.SerializeToString
        )
        return grpc.method_handlers_generic_handler("atoll.v1.Control", {"Observe": observe})

    def bulk_handlers(self) -> grpc.GenericRpcHandler:
        """Fetch, beside the calls of learners."""
        fetch = grpc.unary_stream_rpc_method_handler(
            self.fetch, pb.FetchRequest.FromString, pb.FetchChunk.SerializeToString
        )
        return grpc.method_handlers_generic_handler("atoll.v1.Bulk", {"Fetch": fetch})

    def end(self, *, over: bool) -> None:
        """Nobody waits any longer. over: what is published now is the last."""
        self._over |= over
        self._ended.set()

    async def last_fetches(self, say: Callable[[str], None]) -> None:
        """After the end: until those who are here have what they came for, or `give_up`."""
        if self._over and self._here:
            say(f"up to {LAST_FETCH_S:.0f} s for {self._here} who fetch the last model; Ctrl-C ends that")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._nobody.wait(), LAST_FETCH_S)

    def give_up(self) -> None:
        """`last_fetches` returns now."""
        self._nobody.set()

    # ------------------------------------------------------------ calls

    @asynccontextmanager
    async def _admitted(self, context: Any) -> AsyncIterator[None]:
        if not wire_channel.token_ok(context.invocation_metadata(), self._token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")
        if self._here >= OBSERVERS_MAX:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the syncer has {self._here} observers, its most")
        self._here += 1
        self._nobody.clear()
        try:
            yield
        finally:
            self._here -= 1
            if not self._here:
                self._nobody.set()

    async def observe(self, request: pb.ObserveRequest, context: Any) -> pb.ObserveResult:
        """What is trained, and the port of the bulk service."""
        async with self._admitted(context):
            if request.protocol != PROTOCOL_VERSION:
                await context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"the observer speaks protocol {request.protocol}, the syncer {PROTOCOL_VERSION}; install the same "
                    "version of Atoll on both",
                )
            await asyncio.sleep(OBSERVE_S)
            opened = self._opened()
            if opened is None:
                return pb.ObserveResult(run_id=self._run_id, bulk_port=self.bulk_port)
            return observing.observed_to_wire(self._run_id, self.bulk_port, opened.config.payload, opened.layout)

    async def fetch(self, request: pb.FetchRequest, context: Any) -> None:
        """After a wait: all pieces of one instant that the observer does not hold."""
        async with self._admitted(context):
            if request.run_id != self._run_id:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this syncer serves another run")
            try:
                wait_ns = check.check_number("wait_ns", request.wait_ns, WAIT_NS_MAX)
                have = [check.check_hash("have", digest) for digest in request.have]
            except WireError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
                raise
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), wait_ns / 1e9)
            async with self._turn:
                await self._send(have, context)

    async def _send(self, have: list[str], context: Any) -> None:
        # References to immutable payloads: whatever is published from now on, this set stays as it is.
        pieces = [published for _, published in sorted(self._published().items())]
        await context.write(pb.FetchChunk(header=observing.published_to_wire(pieces, over=self._over)))
        wanted = [p for i, p in enumerate(pieces) if i >= len(have) or have[i] != p.hash]
        pacer = Pacer()
        self._moving += 1
        try:
            for published in wanted:
                for start in range(0, len(published.data), CHUNK_BYTES):
                    chunk = bytes(published.data[start : start + CHUNK_BYTES])
                    before_ns = time.monotonic_ns()
                    await asyncio.wait_for(context.write(pb.FetchChunk(data=chunk)), STALL_S)
                    await asyncio.sleep(self._pause_s(len(chunk), time.monotonic_ns() - before_ns, pacer))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"nothing was taken for {STALL_S:.0f} s")
        finally:
            self._moving -= 1

    def _pause_s(self, size_bytes: int, duration_ns: int, pacer: Pacer) -> float:
        least_s = self._moving * size_bytes / BYTES_PER_S
        pause_ns = pacer.written(size_bytes, duration_ns)
        if pause_ns and time.monotonic_ns() - self._learners_ns() < LEARNERS_BUSY_NS:
            # The same division of the link as among learners and heartbeats, the other way round.
            pause_ns = duration_ns * SHARE_PERCENT // (100 - SHARE_PERCENT)
        return max(least_s, pause_ns / 1e9)
