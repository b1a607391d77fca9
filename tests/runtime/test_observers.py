"""Pulling from a syncer: the published bits, by whoever has the token, beside a run that does not notice."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from atoll.cli import pull
from atoll.cli.main import main
from atoll.core import records
from atoll.core.layout import TensorSpec, make_layout
from atoll.core.messages import Version
from atoll.runtime import observers
from atoll.runtime.observers import OBSERVERS_MAX
from atoll.runtime.workshop import Published
from atoll.store.merged import newest_written
from atoll.store.tape import read_tape
from atoll.wire import atoll_pb2 as pb
from atoll.wire import check, observing
from atoll.wire.channel import MIB
from atoll.wire.check import WireError
from tests.runtime.test_real_run import FAST, address_of
from tests.waiting import wait_for

LIMIT_S = 60.0


def refused(capsys, *argv: str) -> str:
    assert main(["pull", *argv]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("atoll: ")
    return lines[0]


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def test_pull__over_the_network__gives_what_the_directory_gives(start, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("ATOLL_TOKEN", "right")
    syncer = start("syncer", settings={**FAST, "steps": 100_000, "learners": 1})
    address = address_of(syncer)
    to = tmp_path / "to"
    assert f"nothing is merged yet at {address}: no learner has joined" in refused(capsys, address, "--to", str(to))
    monkeypatch.setenv("ATOLL_TOKEN", "wrong")
    told = refused(capsys, address, "--to", str(to))
    assert "the token is missing or wrong; set ATOLL_TOKEN" in told
    assert "wrong-" not in told
    monkeypatch.setenv("ATOLL_TOKEN", "right")
    codes: list[int] = []
    command = ["pull", address, "--to", str(to), "--every", "1s"]
    follower = threading.Thread(target=lambda: codes.append(main(command)))
    follower.start()
    learner = start("learner", address=address, name="a")
    learner.expect("step", lambda line: line["n"] >= 5)
    wait_for(lambda: len(list(to.glob("model-*"))) >= 2, "two models")
    syncer.popen.send_signal(signal.SIGINT)
    done = learner.expect("done")
    assert syncer.wait() == 0
    follower.join(LIMIT_S)
    assert codes == [0]
    assert capsys.readouterr().out.splitlines()[-1] == "the run is over"
    found = newest_written(to)
    assert found is not None
    again = tmp_path / "again"
    assert main(["pull", str(tmp_path / "run"), "--to", str(again)]) == 0
    assert metadata_of(again / found[0].name) == found[1]
    pulled, read = load_file(found[0]), load_file(again / found[0].name)
    assert pulled.keys() == read.keys() == {f"{n}.{part}" for n in range(4) for part in ("weight", "bias")}
    assert all(torch.equal(pulled[name], read[name]) for name in read)
    flat = torch.cat([pulled[f"{n}.{part}"].reshape(-1) for n in range(4) for part in ("weight", "bias")])
    assert check.check_hash("hash", done["hash"]) == hash_of(flat)  # what the learner holds at its end
    tape = [entry.record for entry in read_tape(tmp_path / "run" / "tape.jsonl")]
    assert [line.name for line in tape if isinstance(line, records.GrantLine)] == ["a"]


def hash_of(flat: torch.Tensor) -> str:
    from atoll.tensors.hashing import payload_hash

    return payload_hash(flat.numpy().tobytes())


def test_pull__nobody_there__is_one_line(tmp_path, capsys) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    assert f"no syncer answers at {address} (" in refused(capsys, address, "--to", str(tmp_path))
    told = refused(capsys, str(tmp_path), "--to", str(tmp_path), "--bulk-address", address)
    assert "goes with the HOST:PORT of a syncer" in told
    assert "must be HOST:PORT" in refused(capsys, "127.0.0.1:99999", "--to", str(tmp_path))


class Context:
    """Of a call, as far as observers need it."""

    class Aborted(Exception):
        pass

    def invocation_metadata(self) -> Any:
        return (("authorization", "Bearer t"),)

    async def abort(self, code: Any, details: str) -> None:
        raise Context.Aborted(details)

    async def write(self, chunk: pb.FetchChunk) -> None:
        raise AssertionError("nothing to write")


def test_observers__are_bounded_in_number__and_none_waits_beyond_the_end() -> None:
    class Silent(Context):
        async def write(self, chunk: pb.FetchChunk) -> None:
            assert chunk.header.over

    async def work() -> None:
        served = observers.Observers("r", "t", opened=lambda: None, published=dict, learners_ns=lambda: 0)
        request = pb.FetchRequest(run_id="r", wait_ns=10**15)
        waiting = [asyncio.ensure_future(served.fetch(request, Silent())) for _ in range(OBSERVERS_MAX)]
        await asyncio.sleep(0)
        with pytest.raises(Context.Aborted, match=f"the syncer has {OBSERVERS_MAX} observers, its most"):
            await served.observe(pb.ObserveRequest(protocol=1), Context())
        gone = waiting.pop()
        gone.cancel()
        await asyncio.wait([gone])
        with pytest.raises(Context.Aborted, match="serves another run"):
            await served.fetch(pb.FetchRequest(run_id="other"), Context())
        served.end(over=True)
        await asyncio.gather(*waiting)
        stranger = observers.Observers("r", "x", opened=lambda: None, published=dict, learners_ns=lambda: 0)
        with pytest.raises(Context.Aborted, match="token"):
            await stranger.fetch(request, Context())

    asyncio.run(work())


class Clock:
    """Virtual time for one task at a time."""

    def __init__(self) -> None:
        self.ns = 0

    async def sleep(self, seconds: float) -> None:
        self.ns += int(seconds * 1e9)


class Link(Context):
    """Takes chunks at a rate, in virtual time; records when each was taken."""

    def __init__(self, clock: Clock, bytes_per_s: float) -> None:
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self.writing_ns = 0
        self.received = 0

    async def write(self, chunk: pb.FetchChunk) -> None:
        if chunk.data:
            duration_ns = int(len(chunk.data) / self._bytes_per_s * 1e9)
            self.writing_ns += duration_ns
            self.received += len(chunk.data)
            await self._clock.sleep(duration_ns / 1e9)


def one_piece(size: int) -> dict[int, Published]:
    return {0: Published(Version(1, 1), 3, memoryview(bytes(size)), "0" * 32, {})}


def fetch_all(monkeypatch, *, bytes_per_s: float, learners_move: bool, size: int = 8 * MIB, moving: int = 0) -> Any:
    """One fetch of `size` bytes, `moving` others beside it; (link, virtual ns it took)."""
    clock = Clock()
    monkeypatch.setattr(observers.time, "monotonic_ns", lambda: clock.ns)
    monkeypatch.setattr(observers.asyncio, "sleep", clock.sleep)
    published = one_piece(size)
    learners_ns = (lambda: clock.ns) if learners_move else (lambda: -(10**12))
    served = observers.Observers("r", "t", opened=lambda: None, published=lambda: published, learners_ns=learners_ns)
    served._moving = moving
    link = Link(clock, bytes_per_s)
    served.end(over=True)
    asyncio.run(served.fetch(pb.FetchRequest(run_id="r"), link))
    assert link.received == size
    return link, clock.ns


def test_fetch__has_a_tenth_of_its_link_while_learners_move_bytes(monkeypatch) -> None:
    link, took_ns = fetch_all(monkeypatch, bytes_per_s=2 * MIB, learners_move=True)
    assert took_ns == pytest.approx(10 * link.writing_ns, rel=0.01)
    link, took_ns = fetch_all(monkeypatch, bytes_per_s=2 * MIB, learners_move=False)
    assert took_ns == pytest.approx(link.writing_ns / 0.9, rel=0.01)


@pytest.mark.parametrize("others", [0, 1])
def test_fetch__has_its_part_of_what_all_may_have_where_the_link_is_fast(monkeypatch, others: int) -> None:
    size = 64 * MIB
    for learners_move in (False, True):
        _, took_ns = fetch_all(monkeypatch, bytes_per_s=1e12, learners_move=learners_move, size=size, moving=others)
        rate = size / (took_ns / 1e9)
        assert rate == pytest.approx(observers.BYTES_PER_S / (1 + others), rel=0.01)


def test_observers__at_the_end_of_a_run_are_waited_for__but_not_for_ever(monkeypatch) -> None:
    monkeypatch.setattr(observers, "LAST_FETCH_S", 0.2)

    class Slow(Context):
        go_on = asyncio.Event()

        async def write(self, chunk: pb.FetchChunk) -> None:
            if chunk.data:
                await self.go_on.wait()

    async def work(over: bool) -> list[str]:
        Slow.go_on = asyncio.Event()
        served = observers.Observers(
            "r", "t", opened=lambda: None, published=lambda: one_piece(10), learners_ns=lambda: 0
        )
        said: list[str] = []
        told: list[str] = []
        fetching = asyncio.ensure_future(served.fetch(pb.FetchRequest(run_id="r", wait_ns=10**15), Slow()))
        fetching.add_done_callback(lambda _: said.append("fetched"))
        await asyncio.sleep(0)
        served.end(over=over)
        asyncio.get_running_loop().call_later(0.05 if over else 10, Slow.go_on.set)
        await served.last_fetches(told.append)
        said.append("ended")
        Slow.go_on.clear()
        if over:
            again = asyncio.ensure_future(served.fetch(pb.FetchRequest(run_id="r"), Slow()))
            await asyncio.sleep(0)
            await served.last_fetches(told.append)
            said.append("gave up")
            asyncio.get_running_loop().call_soon(served.give_up)
            monkeypatch.setattr(observers, "LAST_FETCH_S", 60.0)
            await served.last_fetches(told.append)
            assert len(told) == 3
            assert "for 1 who fetch the last model; Ctrl-C ends that" in told[0]
            again.cancel()
            await asyncio.wait([again])
        fetching.cancel()
        await asyncio.wait([fetching])
        return said

    assert asyncio.run(work(over=True)) == ["fetched", "ended", "gave up"]
    assert asyncio.run(work(over=False))[0] == "ended", "a run that breaks off waits for nobody"


def test_fetch__that_nobody_takes__is_ended(monkeypatch) -> None:
    monkeypatch.setattr(observers, "STALL_S", 0.05)

    class Stuck(Context):
        async def write(self, chunk: pb.FetchChunk) -> None:
            if chunk.data:
                await asyncio.Event().wait()

    async def work() -> None:
        published = one_piece(10)
        served = observers.Observers("r", "t", opened=lambda: None, published=lambda: published, learners_ns=lambda: 0)
        served.end(over=True)
        with pytest.raises(Context.Aborted, match="nothing was taken"):
            await served.fetch(pb.FetchRequest(run_id="r"), Stuck())
        assert (served._here, served._moving) == (0, 0)

    asyncio.run(work())


def test_pull__of_a_syncer_that_is_lost__says_so_after_a_while(start, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(pull, "GONE_S", 1.0)
    syncer = start("syncer", settings={**FAST, "steps": 100_000, "learners": 1})
    address = address_of(syncer)
    to = tmp_path / "to"
    learner = start("learner", address=address, name="a")
    learner.expect("step", lambda line: line["n"] >= 5)
    codes: list[int] = []
    follower = threading.Thread(target=lambda: codes.append(main(["pull", address, "--to", str(to), "--every", "1s"])))
    follower.start()
    wait_for(lambda: list(to.glob("model-*")), "a model")
    syncer.popen.kill()
    follower.join(LIMIT_S)
    assert codes == [2]
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert all(f"no syncer answers at {address}" in line for line in told)
    assert "It is looked for again for 1 s" in told[0]
    assert "It was there before: if the run is over, its model is in model/ of its directory" in told[1]
    assert newest_written(to) is not None
    learner.popen.kill()


def test_what_observers_are_told__is_checked() -> None:
    layout = make_layout((TensorSpec("a", (2, 3), "float32"), TensorSpec("b", (4,), "float32")), 2)
    wire = observing.observed_to_wire("r", 7701, "bf16", layout)
    assert observing.observed_from_wire(wire) == observing.Observed("r", 7701, "bf16", layout)
    for field, value in (("payload", "fp8"), ("bulk_port", 0), ("fragments", 9), ("fingerprint", "0" * 32)):
        bent = pb.ObserveResult.FromString(wire.SerializeToString())
        setattr(bent, field, value)
        with pytest.raises(WireError):
            observing.observed_from_wire(bent)
    header = pb.FetchHeader(
        pieces=[pb.PublishedPiece(version=pb.Version(lineage=1, n=2), slot=5, size_bytes=12, hash="0" * 32)]
    )
    assert observing.published_from_wire(header, [12]) == ([(Version(1, 2), 5, "0" * 32)], False)
    for sizes in ([11], [12, 12]):
        with pytest.raises(WireError, match="do not have the sizes"):
            observing.published_from_wire(header, sizes)
