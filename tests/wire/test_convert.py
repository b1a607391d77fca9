"""Every message survives the wire; nothing that could hurt does."""

from __future__ import annotations

from contextlib import suppress

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from atoll.core import messages as core
from atoll.core.layout import TensorSpec
from atoll.wire import atoll_pb2 as pb
from atoll.wire import check, convert
from atoll.wire.check import WireError

PIECES = 3
numbers = st.integers(0, 2**63 - 1)
counts = st.integers(0, 2**53)
small = st.integers(0, PIECES - 1)
words = st.text("abcdefghij", max_size=20)
lines = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=80)
names = st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True)
hashes = st.one_of(st.just(""), st.text("0123456789abcdef", min_size=32, max_size=32))
floats = st.floats(allow_nan=False, allow_infinity=False)
versions = st.builds(core.Version, numbers, numbers)
merged = st.builds(core.Merged, numbers, numbers)
per_piece = st.tuples(*[numbers] * PIECES)
counters = st.builds(core.Counters, counts, counts, floats, per_piece, per_piece)
timings = st.builds(core.Timings, st.lists(st.tuples(words, numbers), max_size=5).map(tuple), numbers, numbers, numbers)
tensors = st.builds(
    TensorSpec,
    st.text("abc.é", min_size=1, max_size=20),
    st.lists(st.integers(1, 9), max_size=4).map(tuple),
    st.sampled_from(["float32", "bfloat16"]),
    st.booleans(),
    st.lists(words, max_size=3).map(tuple),
)
learner_messages = st.one_of(
    st.builds(
        core.Hello,
        st.integers(0, 9),
        st.one_of(st.just(""), names),
        names,
        numbers,
        hashes,
        st.lists(tensors, max_size=4).map(tuple),
    ),
    st.builds(core.Report, counters, timings),
    st.builds(core.Heartbeat, counts, st.booleans(), numbers),
    st.builds(core.Announce, numbers, small, numbers, versions, counts, counts, counts, counters, numbers),
    st.builds(core.Declare),
    st.builds(core.Leave, lines.map(check.one_line), counters, timings),
)
settings = st.tuples(words, st.one_of(lines, st.integers(-(2**63), 2**63 - 1), floats))
syncer_messages = st.one_of(
    st.builds(
        core.Welcome,
        numbers,
        numbers,
        st.booleans(),
        st.lists(settings, max_size=5).map(tuple),
        numbers,
        numbers,
        words,
        st.lists(merged, max_size=4).map(tuple),
    ),
    st.builds(core.Refuse, words, lines.map(check.one_line)),
    st.builds(core.SeedRequest),
    st.builds(core.Pace, numbers, numbers, numbers),
    st.builds(core.Fate, small, numbers, numbers, words, lines.map(check.one_line)),
    st.builds(core.UpdateReady, small, versions, numbers, numbers, hashes, merged),
    st.builds(core.Finishing, numbers),
    st.builds(core.FinalRound, st.lists(versions, max_size=4).map(tuple)),
    st.builds(core.Finished, st.lists(versions, max_size=4).map(tuple)),
    st.builds(core.Replaced, lines.map(check.one_line)),
)


@given(learner_messages)
def test_learner_message__there_and_back__is_the_same(message: object) -> None:
    data = convert.learner_to_wire(message).SerializeToString()
    assert convert.learner_from_wire(pb.LearnerEnvelope.FromString(data), PIECES) == message


@given(syncer_messages, st.integers(1, 65_535))
def test_syncer_message__there_and_back__is_the_same(message: object, port: int) -> None:
    data = convert.syncer_to_wire(message, port).SerializeToString()
    envelope = pb.SyncerEnvelope.FromString(data)
    assert convert.syncer_from_wire(envelope) == message
    if isinstance(message, core.Welcome):
        assert convert.bulk_port_of(envelope) == port


@given(st.lists(learner_messages, min_size=1, max_size=5))
def test_batch__there_and_back__keeps_the_order(messages) -> None:
    wire = convert.batch([convert.learner_to_wire(message) for message in messages])
    singles = convert.unbatch(pb.LearnerEnvelope.FromString(wire.SerializeToString()))
    assert [convert.learner_from_wire(single, PIECES) for single in singles] == messages


def test_batch__in_a_batch_or_too_long__is_refused() -> None:
    beat = pb.LearnerEnvelope(declare=pb.Declare())
    with pytest.raises(WireError, match="holds a batch"):
        convert.unbatch(pb.LearnerEnvelope(more=[pb.LearnerEnvelope(more=[beat])]))
    with pytest.raises(WireError, match="at most"):
        convert.unbatch(pb.LearnerEnvelope(more=[beat] * (convert.BATCH_MAX + 1)))


@given(names, names, numbers, small, numbers)
def test_contribution_id__there_and_back__is_the_same(
    run: str, name: str, generation: int, piece: int, seq: int
) -> None:
    life = core.Life(name, generation)
    wire = convert.contribution_to_wire(run, life, piece, seq)
    assert convert.contribution_from_wire(wire) == (run, life, piece, seq)


def _decode(data: bytes) -> None:
    with suppress(WireError, DecodeError):
        for single in convert.unbatch(pb.LearnerEnvelope.FromString(data)):
            convert.learner_from_wire(single, PIECES)
    with suppress(WireError, DecodeError):
        for single in convert.unbatch(pb.SyncerEnvelope.FromString(data)):
            convert.syncer_from_wire(single)


@given(st.binary(max_size=200))
def test_decode__of_garbage__raises_only_wire_or_decode_errors(data: bytes) -> None:
    _decode(data)


@given(st.one_of(learner_messages.map(convert.learner_to_wire), syncer_messages.map(convert.syncer_to_wire)), st.data())
def test_decode__of_a_cut_or_bent_message__raises_only_wire_or_decode_errors(envelope: object, data) -> None:
    raw = bytearray(envelope.SerializeToString())
    cut = data.draw(st.integers(0, len(raw)))
    _decode(bytes(raw[:cut]))
    if raw:
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        _decode(bytes(raw))


def _announce(**fields: object) -> pb.LearnerEnvelope:
    return pb.LearnerEnvelope(announce=pb.Announce(**fields))


@pytest.mark.parametrize(
    ("envelope", "message"),
    [
        (pb.LearnerEnvelope(), "unknown kind"),
        (pb.LearnerEnvelope(hello=pb.Hello(name="a b")), "name='a b'"),
        (pb.LearnerEnvelope(hello=pb.Hello(name="x" * 65)), "1 to 64"),
        (pb.LearnerEnvelope(hello=pb.Hello(name="")), "1 to 64"),
        (pb.LearnerEnvelope(hello=pb.Hello(name="a", run_id="../b")), "run="),
        (pb.LearnerEnvelope(hello=pb.Hello(name="a", fingerprint="xyz")), "32 hex"),
        (pb.LearnerEnvelope(hello=pb.Hello(name="a", generation=2**63)), "generation"),
        (pb.LearnerEnvelope(report=pb.Report(counters=pb.Counters(steps=1, tokens=2**53 + 1))), "tokens"),
        (pb.LearnerEnvelope(heartbeat=pb.Heartbeat(steps=2**53 + 1)), "steps"),
        (pb.LearnerEnvelope(hello=pb.Hello(name="a", tensors=[pb.TensorSpec(name="w", shape=[1] * 9)])), "shape"),
        (pb.LearnerEnvelope(report=pb.Report(counters=pb.Counters(loss_sum=float("nan")))), "finite"),
        (pb.LearnerEnvelope(report=pb.Report(counters=pb.Counters(lost=[1, 2]))), "3 fragments"),
        (_announce(piece=3), "piece=3"),
        (pb.LearnerEnvelope(leave=pb.Leave(reason="a\nb")), "one printable line"),
    ],
)
def test_learner_message__that_breaks_a_rule__ends_with_one_line(envelope, message: str) -> None:
    with pytest.raises(WireError, match=message) as caught:
        convert.learner_from_wire(envelope, PIECES)
    assert "\n" not in str(caught.value)


def test_counters__of_zeros__take_no_bytes_and_come_back_whole() -> None:
    message = core.Report(core.Counters(1, 2, 3.0, (0, 0, 0), (0, 0, 0)))
    envelope = convert.learner_to_wire(message)
    assert not envelope.report.counters.lost
    assert convert.learner_from_wire(envelope, PIECES) == message
