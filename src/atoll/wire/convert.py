"""Between wire messages (atoll_pb2) and core messages, both ways.

What comes in was written by somebody else: every name, length, number and hash is checked here (wire.check), before
anything else sees it. A violation raises WireError, whose one line ends the stream. Unknown fields are ignored, unknown
kinds are violations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from atoll.core import messages as core
from atoll.core.layout import (
    CONSTANTS_BYTES_MAX,
    DIMENSIONS_MAX,
    EXTRA_LENGTH_MAX,
    NAME_LENGTH_MAX,
    PARAMETER,
    TENSORS_MAX,
    TensorSpec,
)
from atoll.wire import atoll_pb2 as pb
from atoll.wire.check import (
    COUNT_MAX,
    WireError,
    check_blob,
    check_count,
    check_finite,
    check_hash,
    check_name,
    check_number,
    check_text,
    one_line,
)

PORT_MAX = 65_535
PIECES_MAX = TENSORS_MAX
ALIASES_MAX = 64
CAUSES_MAX = 32
SETTINGS_MAX = 256
BATCH_MAX = 64
WORD_LENGTH_MAX = 32

Envelope = TypeVar("Envelope", pb.LearnerEnvelope, pb.SyncerEnvelope)


# ------------------------------------------------------------------------------------------------ parts


def version_to_wire(version: core.Version) -> pb.Version:
    return pb.Version(lineage=version.lineage, n=version.n)


def version_from_wire(message: pb.Version) -> core.Version:
    return core.Version(check_number("lineage", message.lineage), check_number("version", message.n))


def merged_to_wire(merged: core.Merged) -> pb.Merged:
    return pb.Merged(generation=merged.generation, seq=merged.seq)


def merged_from_wire(message: pb.Merged) -> core.Merged:
    return core.Merged(check_number("generation", message.generation), check_number("seq", message.seq))


def _numbers(what: str, values: Any) -> tuple[int, ...]:
    numbers = tuple(check_count(what, values, PIECES_MAX))
    if numbers:
        check_number(what, max(numbers))
    return numbers


def _counters_to_wire(counters: core.Counters) -> pb.Counters:
    return pb.Counters(
        steps=counters.steps,
        tokens=counters.tokens,
        loss_sum=counters.loss_sum,
        overwritten=counters.overwritten if any(counters.overwritten) else (),
        lost=counters.lost if any(counters.lost) else (),
    )


def _counters_from_wire(message: pb.Counters, pieces: int) -> core.Counters:
    return core.Counters(
        steps=check_number("steps", message.steps, COUNT_MAX),
        tokens=check_number("tokens", message.tokens, COUNT_MAX),
        loss_sum=check_finite("loss_sum", message.loss_sum),
        overwritten=_per_piece("overwritten", message.overwritten, pieces),
        lost=_per_piece("lost", message.lost, pieces),
    )


def _per_piece(what: str, values: Any, pieces: int) -> tuple[int, ...]:
    numbers = _numbers(what, values)
    if not numbers:
        return (0,) * pieces
    if pieces and len(numbers) != pieces:
        raise WireError(f"{what} has {len(numbers)} entries; the run has {pieces} fragments")
    return numbers


def _timings_to_wire(timings: core.Timings) -> pb.Timings:
    return pb.Timings(
        blocked=[pb.Blocked(cause=cause, ns=ns) for cause, ns in timings.blocked_ns],
        step_ns=timings.step_ns,
        step_ns_max=timings.step_ns_max,
        gap_ns_max=timings.gap_ns_max,
    )


def _timings_from_wire(message: pb.Timings) -> core.Timings:
    blocked = check_count("blocked", message.blocked, CAUSES_MAX)
    return core.Timings(
        blocked_ns=tuple(
            (check_text("cause", b.cause, WORD_LENGTH_MAX), check_number("blocked_ns", b.ns)) for b in blocked
        ),
        step_ns=check_number("step_ns", message.step_ns),
        step_ns_max=check_number("step_ns_max", message.step_ns_max),
        gap_ns_max=check_number("gap_ns_max", message.gap_ns_max),
    )


def tensor_to_wire(tensor: TensorSpec) -> pb.TensorSpec:
    return pb.TensorSpec(
        name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        averaged=tensor.averaged,
        aliases=tensor.aliases,
        kind="" if tensor.kind == PARAMETER else tensor.kind,
        value=tensor.value,
    )


def tensor_from_wire(message: pb.TensorSpec) -> TensorSpec:
    shape = tuple(check_count("shape", message.shape, DIMENSIONS_MAX))
    aliases = check_count("aliases", message.aliases, ALIASES_MAX)
    return TensorSpec(
        name=check_text("tensor name", message.name, NAME_LENGTH_MAX),
        shape=tuple(check_number("dimension", n, 2**48) for n in shape),
        dtype=check_text("dtype", message.dtype, WORD_LENGTH_MAX),
        averaged=message.averaged,
        aliases=tuple(check_text("alias", alias, NAME_LENGTH_MAX) for alias in aliases),
        kind=check_text("kind", message.kind, WORD_LENGTH_MAX) or PARAMETER,
        value=check_blob("value", message.value, CONSTANTS_BYTES_MAX),
    )


def _constant_from_wire(message: pb.Constant) -> tuple[str, bytes]:
    return check_text("tensor name", message.name, NAME_LENGTH_MAX), check_blob(
        "value", message.value, CONSTANTS_BYTES_MAX
    )


def _setting_to_wire(name: str, value: str | int | float) -> pb.Setting:
    if isinstance(value, str):
        return pb.Setting(name=name, text=value)
    if isinstance(value, int):
        return pb.Setting(name=name, number=value)
    return pb.Setting(name=name, real=value)


def _setting_from_wire(message: pb.Setting) -> tuple[str, str | int | float]:
    name = check_text("setting", message.name, WORD_LENGTH_MAX)
    kind = message.WhichOneof("value")
    if kind == "text":
        return name, check_text(name, message.text)
    if kind == "number":
        return name, message.number
    if kind == "real":
        return name, check_finite(name, message.real)
    raise WireError(f"setting {name!r} has no value")


def _versions(values: Any) -> tuple[core.Version, ...]:
    return tuple(version_from_wire(value) for value in check_count("versions", values, PIECES_MAX))


# ------------------------------------------------------------------------------------------------ learner -> syncer


def _hello_to_wire(m: core.Hello) -> pb.LearnerEnvelope:
    hello = pb.Hello(
        protocol=m.protocol,
        run_id=m.run_id,
        name=m.name,
        generation=m.generation,
        fingerprint=m.fingerprint,
        tensors=map(tensor_to_wire, m.tensors),
        extra=m.extra,
    )
    return pb.LearnerEnvelope(hello=hello)


def _hello_from_wire(m: pb.Hello, pieces: int) -> core.Hello:
    return core.Hello(
        protocol=m.protocol,
        run_id=check_name("run", m.run_id, empty=True),
        name=check_name("name", m.name),
        generation=check_number("generation", m.generation),
        fingerprint=check_hash("fingerprint", m.fingerprint),
        tensors=tuple(map(tensor_from_wire, check_count("tensors", m.tensors, TENSORS_MAX))),
        extra=check_text("extra", m.extra, EXTRA_LENGTH_MAX),
    )


def _report_to_wire(m: core.Report) -> pb.LearnerEnvelope:
    report = pb.Report(
        counters=_counters_to_wire(m.counters), timings=_timings_to_wire(m.timings), sent_ns=m.sent_ns
    )
    return pb.LearnerEnvelope(report=report)


def _report_from_wire(m: pb.Report, pieces: int) -> core.Report:
    counters, timings = _counters_from_wire(m.counters, pieces), _timings_from_wire(m.timings)
    return core.Report(counters, timings, check_number("sent_ns", m.sent_ns))


def _heartbeat_to_wire(m: core.Heartbeat) -> pb.LearnerEnvelope:
    return pb.LearnerEnvelope(heartbeat=pb.Heartbeat(steps=m.steps, waiting=m.waiting, progress_bytes=m.progress_bytes))


def _heartbeat_from_wire(m: pb.Heartbeat, pieces: int) -> core.Heartbeat:
    steps = check_number("steps", m.steps, COUNT_MAX)
    return core.Heartbeat(steps, m.waiting, check_number("progress_bytes", m.progress_bytes))


def _announce_to_wire(m: core.Announce) -> pb.LearnerEnvelope:
    announce = pb.Announce(
        seq=m.seq,
        piece=m.piece,
        slot=m.slot,
        anchor=version_to_wire(m.anchor),
        own_step=m.own_step,
        c_steps=m.c_steps,
        c_tokens=m.c_tokens,
        counters=_counters_to_wire(m.counters),
        size_bytes=m.size_bytes,
        final=m.final,
    )
    return pb.LearnerEnvelope(announce=announce)


def _announce_from_wire(m: pb.Announce, pieces: int) -> core.Announce:
    return core.Announce(
        seq=check_number("seq", m.seq),
        piece=check_number("piece", m.piece, pieces - 1 if pieces else PIECES_MAX),
        slot=check_number("slot", m.slot),
        anchor=version_from_wire(m.anchor),
        own_step=check_number("own_step", m.own_step, COUNT_MAX),
        c_steps=check_number("c_steps", m.c_steps, COUNT_MAX),
        c_tokens=check_number("c_tokens", m.c_tokens, COUNT_MAX),
        counters=_counters_from_wire(m.counters, pieces),
        size_bytes=check_number("size_bytes", m.size_bytes),
        final=m.final,
    )


def _leave_to_wire(m: core.Leave) -> pb.LearnerEnvelope:
    leave = pb.Leave(
        reason=one_line(m.reason),
        counters=_counters_to_wire(m.counters),
        timings=_timings_to_wire(m.timings),
    )
    return pb.LearnerEnvelope(leave=leave)


def _leave_from_wire(m: pb.Leave, pieces: int) -> core.Leave:
    return core.Leave(
        reason=check_text("reason", m.reason),
        counters=_counters_from_wire(m.counters, pieces),
        timings=_timings_from_wire(m.timings),
    )


_LEARNER_TO_WIRE: dict[type, Callable[[Any], pb.LearnerEnvelope]] = {
    core.Hello: _hello_to_wire,
    core.Report: _report_to_wire,
    core.Heartbeat: _heartbeat_to_wire,
    core.Announce: _announce_to_wire,
    core.Declare: lambda m: pb.LearnerEnvelope(declare=pb.Declare()),
    core.Leave: _leave_to_wire,
}

_LEARNER_FROM_WIRE: dict[str, Callable[[Any, int], Any]] = {
    "hello": _hello_from_wire,
    "report": _report_from_wire,
    "heartbeat": _heartbeat_from_wire,
    "announce": _announce_from_wire,
    "declare": lambda m, pieces: core.Declare(),
    "leave": _leave_from_wire,
}


def learner_to_wire(message: core.LearnerMessage) -> pb.LearnerEnvelope:
    """A learner's message as it goes on the control stream."""
    return _LEARNER_TO_WIRE[type(message)](message)


def learner_from_wire(envelope: pb.LearnerEnvelope, pieces: int) -> core.LearnerMessage:
    """The inverse; `pieces`: P of the run, 0 while it is unknown (then per-piece tuples may have any length)."""
    kind = envelope.WhichOneof("message")
    if kind is None:
        raise WireError("a message of an unknown kind came from the learner; do the versions of Atoll match?")
    message: core.LearnerMessage = _LEARNER_FROM_WIRE[kind](getattr(envelope, kind), pieces)
    return message


# ------------------------------------------------------------------------------------------------ syncer -> learner


def _welcome_to_wire(m: core.Welcome, bulk_port: int) -> pb.SyncerEnvelope:
    welcome = pb.Welcome(
        generation=m.generation,
        epoch=m.epoch,
        resumed=m.resumed,
        settings=[_setting_to_wire(name, value) for name, value in m.settings],
        slot=m.slot,
        slot_interval_ns=m.slot_interval_ns,
        phase=m.phase,
        merged=map(merged_to_wire, m.merged),
        bulk_port=bulk_port,
        constants=[pb.Constant(name=name, value=value) for name, value in m.constants],
    )
    return pb.SyncerEnvelope(welcome=welcome)


def _welcome_from_wire(m: pb.Welcome) -> core.Welcome:
    return core.Welcome(
        generation=check_number("generation", m.generation),
        epoch=check_number("epoch", m.epoch),
        resumed=m.resumed,
        settings=tuple(map(_setting_from_wire, check_count("settings", m.settings, SETTINGS_MAX))),
        slot=check_number("slot", m.slot),
        slot_interval_ns=check_number("slot_interval_ns", m.slot_interval_ns),
        phase=check_text("phase", m.phase, WORD_LENGTH_MAX),
        merged=tuple(map(merged_from_wire, check_count("merged", m.merged, PIECES_MAX))),
        constants=tuple(map(_constant_from_wire, check_count("constants", m.constants, TENSORS_MAX))),
    )


def _refuse_from_wire(m: pb.Refuse) -> core.Refuse:
    return core.Refuse(check_text("kind", m.kind, WORD_LENGTH_MAX), check_text("message", m.message))


def _fate_to_wire(m: core.Fate) -> pb.SyncerEnvelope:
    reason = one_line(m.reason)
    fate = pb.Fate(piece=m.piece, seq=m.seq, slot=m.slot, fate=m.fate, reason=reason, late=m.late)
    return pb.SyncerEnvelope(fate=fate)


def _fate_from_wire(m: pb.Fate) -> core.Fate:
    return core.Fate(
        piece=check_number("piece", m.piece, PIECES_MAX),
        seq=check_number("seq", m.seq),
        slot=check_number("slot", m.slot),
        fate=check_text("fate", m.fate, WORD_LENGTH_MAX),
        reason=check_text("reason", m.reason),
        late=check_text("late", m.late, WORD_LENGTH_MAX),
    )


def _update_to_wire(m: core.UpdateReady) -> pb.SyncerEnvelope:
    update = pb.UpdateReady(
        piece=m.piece,
        version=version_to_wire(m.version),
        slot=m.slot,
        size_bytes=m.size_bytes,
        hash=m.hash,
        merged=merged_to_wire(m.merged),
    )
    return pb.SyncerEnvelope(update_ready=update)


def _update_from_wire(m: pb.UpdateReady) -> core.UpdateReady:
    return core.UpdateReady(
        piece=check_number("piece", m.piece, PIECES_MAX),
        version=version_from_wire(m.version),
        slot=check_number("slot", m.slot),
        size_bytes=check_number("size_bytes", m.size_bytes),
        hash=check_hash("hash", m.hash),
        merged=merged_from_wire(m.merged),
    )


def _pace_from_wire(m: pb.Pace) -> core.Pace:
    return core.Pace(
        slot=check_number("slot", m.slot),
        slot_interval_ns=check_number("slot_interval_ns", m.slot_interval_ns),
        slack_ns=check_number("slack_ns", m.slack_ns),
        echo_ns=check_number("echo_ns", m.echo_ns),
        echo_age_ns=check_number("echo_age_ns", m.echo_age_ns),
    )


def _pace_to_wire(m: core.Pace) -> pb.SyncerEnvelope:
    pace = pb.Pace(
        slot=m.slot,
        slot_interval_ns=m.slot_interval_ns,
        slack_ns=m.slack_ns,
        echo_ns=m.echo_ns,
        echo_age_ns=m.echo_age_ns,
    )
    return pb.SyncerEnvelope(pace=pace)


def _final_round(m: core.FinalRound) -> pb.SyncerEnvelope:
    return pb.SyncerEnvelope(final_round=pb.FinalRound(versions=map(version_to_wire, m.versions)))


def _finished(m: core.Finished) -> pb.SyncerEnvelope:
    return pb.SyncerEnvelope(finished=pb.Finished(versions=map(version_to_wire, m.versions)))


_SYNCER_TO_WIRE: dict[type, Callable[[Any], pb.SyncerEnvelope]] = {
    core.Refuse: lambda m: pb.SyncerEnvelope(refuse=pb.Refuse(kind=m.kind, message=one_line(m.message))),
    core.SeedRequest: lambda m: pb.SyncerEnvelope(seed_request=pb.SeedRequest()),
    core.Pace: _pace_to_wire,
    core.Fate: _fate_to_wire,
    core.UpdateReady: _update_to_wire,
    core.Finishing: lambda m: pb.SyncerEnvelope(finishing=pb.Finishing(slot=m.slot)),
    core.FinalRound: _final_round,
    core.Finished: _finished,
    core.Replaced: lambda m: pb.SyncerEnvelope(replaced=pb.Replaced(reason=one_line(m.reason))),
}

_SYNCER_FROM_WIRE: dict[str, Callable[[Any], Any]] = {
    "welcome": _welcome_from_wire,
    "refuse": _refuse_from_wire,
    "seed_request": lambda m: core.SeedRequest(),
    "pace": _pace_from_wire,
    "fate": _fate_from_wire,
    "update_ready": _update_from_wire,
    "finishing": lambda m: core.Finishing(check_number("slot", m.slot)),
    "final_round": lambda m: core.FinalRound(_versions(m.versions)),
    "finished": lambda m: core.Finished(_versions(m.versions)),
    "replaced": lambda m: core.Replaced(check_text("reason", m.reason)),
}


def syncer_to_wire(message: core.SyncerMessage, bulk_port: int = 0) -> pb.SyncerEnvelope:
    """A syncer's message as it goes on the control stream; `bulk_port` goes into Welcome."""
    if isinstance(message, core.Welcome):
        return _welcome_to_wire(message, bulk_port)
    return _SYNCER_TO_WIRE[type(message)](message)


def syncer_from_wire(envelope: pb.SyncerEnvelope) -> core.SyncerMessage:
    """The inverse of `syncer_to_wire`; Welcome's port is read by `bulk_port_of`."""
    kind = envelope.WhichOneof("message")
    if kind is None:
        raise WireError("a message of an unknown kind came from the syncer; do the versions of Atoll match?")
    message: core.SyncerMessage = _SYNCER_FROM_WIRE[kind](getattr(envelope, kind))
    return message


def bulk_port_of(envelope: pb.SyncerEnvelope) -> int:
    """Port of the Bulk service that Welcome tells; WireError where it could not be one."""
    port = check_number("bulk_port", envelope.welcome.bulk_port, PORT_MAX)
    if not port:
        raise WireError("bulk_port=0 cannot be connected to")
    return port


# ------------------------------------------------------------------------------------------------ batches


def batch(envelopes: Sequence[Envelope]) -> Envelope:
    """Several envelopes, in order, as one that is written at once. At least one, at most BATCH_MAX."""
    first = envelopes[0]
    if len(envelopes) > 1:
        first.more.extend(envelopes[1:])  # type: ignore[arg-type]
    return first


def unbatch(envelope: Envelope) -> list[Envelope]:
    """The inverse of `batch`."""
    more = check_count("batch", envelope.more, BATCH_MAX)
    if any(len(inner.more) for inner in more):
        raise WireError("a message inside a batch holds a batch")
    return [envelope, *more]


# ------------------------------------------------------------------------------------------------ bulk


def contribution_to_wire(run_id: str, life: core.Life, piece: int, seq: int) -> pb.ContributionId:
    """Name of a contribution; seq 0: the piece of version 0."""
    return pb.ContributionId(run_id=run_id, name=life.name, generation=life.generation, piece=piece, seq=seq)


def contribution_from_wire(message: pb.ContributionId) -> tuple[str, core.Life, int, int]:
    """(run id, life, piece, seq)."""
    return (
        check_name("run", message.run_id),
        core.Life(check_name("name", message.name), check_number("generation", message.generation)),
        check_number("piece", message.piece, PIECES_MAX),
        check_number("seq", message.seq),
    )
