"""A thousand joins and closes of one process: nothing of them stays, at the learner's side or at the syncer's."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import atoll
from tests.runtime.conftest import DEADLINE_S, Start

SETTINGS = {"steps": 1_000_000, "interval": 4, "fragments": 2, "heartbeat_interval_ns": 100_000_000}
MIB = 2**20
GROWTH_MAX_BYTES = 24 * MIB
"""Allocators and caches settle; a leak of what one join takes would be far more."""


def held(process: psutil.Process) -> dict[str, int]:
    if process.pid == os.getpid():  # what the allocator keeps of what was given back is no leak
        ctypes.CDLL(None).malloc_trim(0)
    memory = process.memory_full_info()
    return {
        "descriptors": process.num_fds(),
        "children": len(process.children(recursive=True)),
        "threads": process.num_threads(),
        "bytes": memory.uss,
        "maps": sum("atoll" in line for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()),
    }


def joins(count: int, first: int, address: str, names: int) -> None:
    for index in range(first, first + count):
        model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with atoll.join(
            model, optimizer, address=address, name=f"n{index % names}", timeout_s=60.0, name_wait_s=30.0
        ) as learner:
            assert learner.step(3, 1.0)
    gc.collect()


def grown(process: psutil.Process, before: dict[str, int]) -> dict[str, tuple[int, int]]:
    after = held(process)
    room = dict.fromkeys(before, 0) | {"bytes": GROWTH_MAX_BYTES}
    return {what: (before[what], after[what]) for what in before if after[what] > before[what] + room[what]}


def is_as_before(process: psutil.Process, before: dict[str, int]) -> None:
    """The last connections and threads take a moment to end."""
    deadline = time.monotonic() + DEADLINE_S
    while (more := grown(process, before)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not more


@pytest.mark.slow
@pytest.mark.parametrize("count", [10, 1000])
def test_joins_and_closes__leave_no_more_than_three(
    start: Start, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="atoll")  # what is captured is held
    syncer: Any = start("syncer", settings=SETTINGS)
    address = f"127.0.0.1:{syncer.expect('listening')['port']}"
    ours, theirs = psutil.Process(os.getpid()), psutil.Process(syncer.popen.pid)
    joins(3, 0, address, 5)
    before = held(ours), held(theirs)
    joins(count, 3, address, 5)
    for process, then in zip((ours, theirs), before, strict=True):
        is_as_before(process, then)
