"""What observers are told, between wire messages and our own, both ways; checked as in convert."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.core import messages as core
from atoll.core.config import PAYLOADS
from atoll.core.layout import EXTRA_LENGTH_MAX, TENSORS_MAX, Layout, make_layout
from atoll.errors import AtollError
from atoll.wire import atoll_pb2 as pb
from atoll.wire.check import WireError, check_count, check_hash, check_name, check_number, check_text
from atoll.wire.convert import (
    PIECES_MAX,
    PORT_MAX,
    tensor_from_wire,
    tensor_to_wire,
    version_from_wire,
    version_to_wire,
)


@dataclass(frozen=True, slots=True)
class Observed:
    """What an observer is told of a run. layout None: no learner has joined yet."""

    run_id: str
    bulk_port: int
    payload: str
    layout: Layout | None


def observed_to_wire(run_id: str, bulk_port: int, payload: str, layout: Layout) -> pb.ObserveResult:
    """What is trained."""
    return pb.ObserveResult(
        run_id=run_id,
        bulk_port=bulk_port,
        payload=payload,
        fragments=len(layout.pieces),
        fingerprint=layout.fingerprint,
        tensors=map(tensor_to_wire, layout.tensors()),
        extra=layout.extra,
    )


def observed_from_wire(m: pb.ObserveResult) -> Observed:
    """The inverse; WireError too where the tensors are no model, or not the one that the fingerprint names."""
    run_id = check_name("run", m.run_id)
    port = check_number("bulk_port", m.bulk_port, PORT_MAX)
    tensors = tuple(map(tensor_from_wire, check_count("tensors", m.tensors, TENSORS_MAX)))
    if not tensors:
        return Observed(run_id, port, "", None)
    if m.payload not in PAYLOADS or not port:
        raise WireError(f"payload={m.payload[:40]!r} and bulk_port={port} cannot be used")
    extra = check_text("extra", m.extra, EXTRA_LENGTH_MAX)
    try:
        layout = make_layout(tensors, check_number("fragments", m.fragments, PIECES_MAX), extra)
    except AtollError as error:
        raise WireError(str(error)) from error
    if layout.fingerprint != check_hash("fingerprint", m.fingerprint):
        raise WireError("the tensors do not have the fingerprint that comes with them")
    return Observed(run_id, port, m.payload, layout)


def published_to_wire(pieces: Iterable[Any], *, over: bool) -> pb.FetchHeader:
    """What is published (version, slot, data, hash), per piece."""
    rows = (
        pb.PublishedPiece(version=version_to_wire(p.version), slot=p.slot, size_bytes=len(p.data), hash=p.hash)
        for p in pieces
    )
    return pb.FetchHeader(pieces=rows, over=over)


def published_from_wire(m: pb.FetchHeader, sizes: Sequence[int]) -> tuple[list[tuple[core.Version, int, str]], bool]:
    """(per piece its version, slot and hash; over). Empty where version 0 is not there. `sizes`: bytes per piece."""
    if not m.pieces:
        return [], m.over
    if [piece.size_bytes for piece in m.pieces] != list(sizes):
        raise WireError(f"the {len(m.pieces)} fragments that are published do not have the sizes of the layout")
    rows = [(version_from_wire(p.version), check_number("slot", p.slot), check_hash("hash", p.hash)) for p in m.pieces]
    return rows, m.over
