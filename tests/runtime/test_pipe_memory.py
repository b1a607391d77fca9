"""What a training process and its agent exchange."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.events import FromLearner, Heard, PlaceFreed, SeedOffered, StreamLost, UpdateArrived, UploadDone
from atoll.core.layout import TensorSpec
from atoll.core.messages import Announce, Counters, Leave, Merged, Pace, Report, Timings, Version, Welcome
from atoll.runtime import pipe
from atoll.runtime.memory import PAGE_BYTES, SharedMemory, create_file, make_plan
from atoll.runtime.pipe import AgentCost, Frames, Pipe, PipeError, Setup, decode_frame, encode_frame

ITEMS = [
    Setup("a:1", "", "", "n", "f", (TensorSpec("w", (2, 3), "float32", True, ("v",)),)),
    Heard(Welcome(1, 1, False, (("a", 1), ("b", 0.5), ("c", "x")), 3, 4, "running", (Merged(1, 2),)), 5),
    Heard(Pace(1, 2, 3), 4),
    FromLearner(Report(Counters(1, 2, 3.0, (4,), (5,)), Timings((("lock", 6),), 7, 8, 9))),
    FromLearner(Announce(1, 2, 3, Version(4, 5), 6, 7, 8, Counters(), 9)),
    FromLearner(Leave("x", Counters(), Timings())),
    StreamLost("gone"),
    UpdateArrived(1, Version(2, 3), 4, 5, Merged(6, 7)),
    UploadDone(1, 2, 3, 4, True),
    SeedOffered((1, 2)),
    PlaceFreed(3),
    AgentCost(1, 2, 3),
]


@given(st.lists(st.sampled_from(ITEMS), max_size=8), st.data())
def test_frames__cut_anywhere__come_out_whole(items, data) -> None:
    stream = b"".join(map(encode_frame, items))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    frames = Frames()
    out = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        out += frames.feed(stream[start:stop])
    assert out == items


@given(st.binary(max_size=60))
def test_frame__of_garbage__is_a_pipe_error(data: bytes) -> None:
    with pytest.raises(PipeError):
        decode_frame(data)


PLACES = 4


def test_frames__longer_than_allowed__are_refused_before_memory_is_taken() -> None:
    with pytest.raises(PipeError, match="at most"):
        Frames().feed(b"\xff\xff\xff\xff")


def test_pipe__whose_other_end_reads_nothing__never_blocks_and_is_bounded(monkeypatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        end = Pipe(ours)
        monkeypatch.setattr(pipe, "BACKLOG_BYTES_MAX", 1_000_000)

        def flood() -> None:
            for _ in range(100_000):
                end.send(StreamLost("x" * 100))

        with pytest.raises(PipeError, match="hangs"):
            flood()


def test_pipe__whose_other_end_is_closed__says_so() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        end = Pipe(ours)
        Pipe(theirs).send(PlaceFreed(1))
        theirs.close()
        assert end.receive() == [PlaceFreed(1)]
        with pytest.raises(PipeError, match="ended"):
            end.receive()


def test_memory__seen_from_both_sides() -> None:
    fd = create_file()
    ours, theirs = SharedMemory(fd), SharedMemory(os.dup(fd))
    plan = make_plan((10_000, 6), PLACES)
    assert plan.total_bytes == PAGE_BYTES * (1 + 3 + 1 + 3 * PLACES)
    ours.steps, ours.waiting = 7, True
    theirs.progress_bytes = 9
    assert (theirs.steps, theirs.waiting, ours.progress_bytes) == (7, True, 9)
    for side in (ours, theirs, ours):
        side.grow(plan)
    ours.upload(1)[:] = b"abcdef"
    theirs.place(PLACES - 1, 10_000)[-1:] = b"z"
    assert bytes(theirs.upload(1)) == b"abcdef"
    assert bytes(ours.place(PLACES - 1, 10_000)[-1:]) == b"z"
    os.close(theirs.fd)
    os.close(fd)
