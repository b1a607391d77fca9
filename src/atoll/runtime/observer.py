"""An observer's side: `NetworkReader` pulls the merged model from a syncer, without being a member of its run.

What comes in was written by somebody else: the layout, every size and every hash is checked, and memory is taken only
as bytes arrive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from atoll.core.layout import Layout
from atoll.core.messages import PROTOCOL_VERSION
from atoll.errors import OR_EVERY, JoinError, NothingMergedError, SyncerGoneError
from atoll.store.merged import MergedModel, MergedPiece, assemble
from atoll.tensors.hashing import payload_hash
from atoll.wire import atoll_pb2 as pb
from atoll.wire import channel as wire_channel
from atoll.wire import check, observing
from atoll.wire.check import WireError

ANSWER_S = 20.0
SERVICE = "/atoll.v1."


class NetworkReader:
    """Reads the merged model of a run from its syncer, again and again. The token comes from the environment."""

    def __init__(self, address: str, bulk_address: str | None = None) -> None:
        self._host, _ = wire_channel.parse_address(address)
        if bulk_address is not None:
            wire_channel.parse_address(bulk_address)
        self._address = address
        self._bulk_address = bulk_address
        self._metadata = wire_channel.credentials_of(wire_channel.load_token())
        self.run_id = ""
        self._layout: Layout | None = None
        self._payload = ""
        self._bulk = ""
        self._held: list[MergedPiece] = []
        self._hashes: list[str] = []

    def read(self, wait_s: float = 0.0, is_known: Callable[[str, list[Any]], bool] | None = None) -> tuple[Any, bool]:
        """(model, the run is over) as published `wait_s` from now, or earlier at the end of the run.

        The model is None where `is_known(run id, versions)`. NothingMergedError before version 0; SyncerGoneError where
        nobody answers; JoinError where the syncer refuses or breaks the protocol.
        """
        try:
            if self._layout is None:
                self._observe()
            return self._fetch(wait_s, is_known)
        except grpc.RpcError as error:
            raise self._explain(error) from error
        except WireError as error:
            raise JoinError(f"the syncer at {self._address} broke the protocol: {error}; is it a syncer?") from error

    def _explain(self, error: Any) -> JoinError:
        code, details = error.code(), check.one_line(error.details() or "no details")
        if code == grpc.StatusCode.UNAUTHENTICATED:
            return JoinError(
                f"the syncer at {self._address} refused: {details}; set ATOLL_TOKEN, or ATOLL_TOKEN_FILE, as for it"
            )
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return JoinError(f"the syncer at {self._address} knows no observers; install the same version of Atoll")
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            return JoinError(f"the syncer at {self._address} refused: {details}; try later, or pull from its directory")
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
            # One that comes back may have another bulk port.
            self._layout, self._held, self._hashes = None, [], []
            return SyncerGoneError(
                f"no syncer answers at {self._address} ({details}); is it running, are both of its ports open?"
            )
        return JoinError(f"the syncer at {self._address} refused: {details}; pull from its directory")

    def _observe(self) -> None:
        with grpc.insecure_channel(self._address, options=wire_channel.CONTROL_OPTIONS) as channel:
            call = channel.unary_unary(
                SERVICE + "Control/Observe", pb.ObserveRequest.SerializeToString, pb.ObserveResult.FromString
            )
            result = call(pb.ObserveRequest(protocol=PROTOCOL_VERSION), metadata=self._metadata, timeout=ANSWER_S)
        observed = observing.observed_from_wire(result)
        self.run_id = observed.run_id
        if observed.layout is None:
            raise NothingMergedError(
                f"nothing is merged yet at {self._address}: no learner has joined; try again later{OR_EVERY}"
            )
        self._layout, self._payload = observed.layout, observed.payload
        self._bulk = self._bulk_address or wire_channel.format_address(self._host, observed.bulk_port)

    def _fetch(self, wait_s: float, is_known: Callable[[str, list[Any]], bool] | None) -> tuple[Any, bool]:
        assert self._layout is not None
        sizes = list(self._layout.payload_sizes(self._payload))
        request = pb.FetchRequest(run_id=self.run_id, have=self._hashes, wait_ns=int(wait_s * 1e9))
        with grpc.insecure_channel(self._bulk, options=wire_channel.BULK_OPTIONS) as channel:
            fetch = channel.unary_stream(
                SERVICE + "Bulk/Fetch", pb.FetchRequest.SerializeToString, pb.FetchChunk.FromString
            )
            call = fetch(request, metadata=self._metadata)
            with contextlib.closing(_Cancelling(call)):
                header, over = observing.published_from_wire(next(call, pb.FetchChunk()).header, sizes)
                if not header:
                    if over:
                        raise JoinError(f"the run at {self._address} ended before anything was merged")
                    raise NothingMergedError(
                        f"nothing is merged yet at {self._address}: version 0 is not there; try again later{OR_EVERY}"
                    )
                if is_known is not None and is_known(self.run_id, [version for version, _, _ in header]):
                    return None, over
                model = self._receive(header, sizes, call)
        return model, over

    def _receive(self, header: list[Any], sizes: list[int], call: Iterator[pb.FetchChunk]) -> MergedModel:
        assert self._layout is not None
        pieces: list[MergedPiece] = []
        for index, (version, slot, digest) in enumerate(header):
            if self._hashes and self._hashes[index] == digest:
                data: bytes | memoryview = self._held[index].data
            else:
                data = _read_payload(call, index, sizes[index])
                if payload_hash(data) != digest:
                    raise WireError(f"the bytes of fragment {index} do not match their hash")
            pieces.append(MergedPiece(version, slot, data))
        self._held, self._hashes = pieces, [digest for _, _, digest in header]
        return assemble(self.run_id, self._layout, self._payload, pieces)


def _read_payload(call: Iterator[pb.FetchChunk], index: int, size_bytes: int) -> memoryview:
    """No chunk spans two pieces."""
    buffer = bytearray()
    while len(buffer) < size_bytes:
        chunk = next(call, None)
        if chunk is None or not chunk.data or len(buffer) + len(chunk.data) > size_bytes:
            raise WireError(f"fragment {index} does not have its {size_bytes} bytes")
        buffer += chunk.data
    return memoryview(buffer)


class _Cancelling:
    """Ends a call that may not have been read to its end."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def close(self) -> None:
        self._call.cancel()
