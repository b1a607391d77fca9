"""What the syncer keeps of those who are gone, and of those who have no right to be here."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys

import pytest

from atoll.core.messages import Life
from atoll.runtime import bulk
from atoll.runtime.bulk import BulkService
from atoll.runtime.descriptors import reason_of
from atoll.runtime.strangers import AGAIN_S, SOURCES_MAX, Strangers


def held(service: BulkService) -> list[int]:
    tables = (service._discarded, service._progress_ns, service._arrivals, service._pacers, service._incoming)
    return [len(table) for table in tables]


def a_life(service: BulkService, number: int) -> None:
    life = Life(f"l{number}", number)
    for piece in range(4):
        service.accept(life, piece, 1, 10, None)
        service._progress(life)
        service._pacer(life.name)
        service.discard(life, piece, 1)
    service.forget(life)


def test_bulk__a_thousand_lives_leave_no_more_than_three() -> None:
    service = BulkService("r", "", lambda incoming, seal: None, lambda life: None)
    for number in range(3):
        a_life(service, number)
    after_three = held(service)
    for number in range(3, 1000):
        a_life(service, number)
    assert held(service) == after_three


def test_bulk__a_dead_life_that_goes_on_downloading_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "LIVES_MAX", 10)
    service = BulkService("r", "", lambda incoming, seal: None, lambda life: None)
    for number in range(100):
        service._progress(Life("x", number))
    assert len(service._progress_ns) == 10


def test_bulk__an_upload_that_is_cut_off_while_it_waits_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    service = BulkService("r", "", lambda incoming, seal: None, lambda life: None)

    async def cut() -> None:
        waiting = asyncio.ensure_future(service._expected(Life("a", 1), 0, 1))
        while not service._arrivals:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(cut())
    assert not service._arrivals


def test_strangers__are_spoken_of_once_per_source_and_minute() -> None:
    said: list[str] = []
    now_s = [0.0]
    strangers = Strangers(said.append, lambda: now_s[0])
    for port in range(5000, 5100):
        strangers.say(f"ipv4:10.0.0.1:{port}", "a stranger came")
    strangers.say("ipv4:10.0.0.2:5000", "a stranger came")
    assert said == ["a stranger came", "a stranger came"]
    now_s[0] = AGAIN_S
    strangers.say("ipv4:10.0.0.1:5100", "a stranger came")
    assert said[2] == "a stranger came (99 more like it from ipv4:10.0.0.1 since the last line)"


def test_strangers__with_a_token__are_spoken_of_by_name() -> None:
    said: list[str] = []
    strangers = Strangers(said.append, lambda: 0.0)
    for name in ("berlin", "oslo", "berlin"):
        strangers.say("ipv4:10.0.0.1:5000", f"learner {name} was refused", name)
    assert said == ["learner berlin was refused", "learner oslo was refused"]


def test_strangers__of_very_many_addresses_take_bounded_room() -> None:
    said: list[str] = []
    strangers = Strangers(said.append, lambda: 0.0)
    for number in range(10 * SOURCES_MAX):
        strangers.say(f"ipv6:[fd00::{number:x}]:1", "a stranger came")
    assert len(said) == len(strangers._said_s) == SOURCES_MAX


def test_descriptors__a_shortage_is_no_full_disk() -> None:
    assert "too many open files, the disk is not full" in reason_of(OSError(errno.EMFILE, "Too many open files"))
    assert "No space left" in reason_of(OSError(errno.ENOSPC, "No space left on device"))


SHORT = """
import contextlib, os, resource
from atoll.runtime.descriptors import Reserve, raise_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (50, 60))
assert raise_limit() == 60
reserve, taken = Reserve(8), []
with contextlib.suppress(OSError):
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
for _ in range(3):
    with reserve.lent():
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
        for fd in files:
            os.close(fd)
try:
    os.open(os.devnull, os.O_RDONLY)
except OSError:
    print("the rest is taken")
"""


def test_descriptors__some_are_kept_for_the_disk() -> None:
    done = subprocess.run([sys.executable, "-c", SHORT], capture_output=True, text=True, check=False)
    assert done.stdout == "the rest is taken\n", done.stderr
