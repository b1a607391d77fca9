"""Hundreds of connections that say nothing, at a syncer with few descriptors: merges go on, and who is real gets in."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator

import pytest

from tests.runtime.conftest import Start

FEW, CROWD = 256, 300
SETTINGS = {"steps": 100_000, "interval": 4, "fragments": 1, "heartbeat_interval_ns": 100_000_000}
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""What opens an HTTP/2 session, with empty settings."""


@pytest.fixture
def crowd() -> Iterator[list[socket.socket]]:
    sockets: list[socket.socket] = []
    yield sockets
    for each in sockets:
        each.close()


@pytest.mark.parametrize("first_words", [pytest.param(b"", marks=pytest.mark.slow), PREFACE], ids=["silent", "http2"])
def test_crowd__of_strangers__stops_no_merge_and_keeps_nobody_out_for_long(
    start: Start, crowd: list[socket.socket], first_words: bytes
) -> None:
    syncer = start("syncer", {"ATOLL_TOKEN": "right"}, settings=SETTINGS)
    where = syncer.expect("listening")
    resource.prlimit(syncer.popen.pid, resource.RLIMIT_NOFILE, (FEW, FEW))
    address = f"127.0.0.1:{where['port']}"
    inside = start("learner", {"ATOLL_TOKEN": "right"}, address=address, name="inside")
    inside.expect("step", lambda line: line["progress"] > 0)
    for port in (where["port"], where["bulk_port"]):
        for _ in range(CROWD):
            each = socket.socket()
            crowd.append(each)
            each.settimeout(0.2)
            with contextlib.suppress(OSError):  # the queue of the port is full
                each.connect(("127.0.0.1", port))
                each.sendall(first_words)
    syncer.expect("notice", lambda line: "too many open files, the disk is not full" in line["text"])
    seen = inside.expect("step")["progress"]
    inside.expect("step", lambda line: line["progress"] > seen + 10 * 4 / SETTINGS["steps"])
    outside = start("learner", {"ATOLL_TOKEN": "right"}, address=address, name="outside")
    outside.expect("joined")
    seen = inside.expect("step")["progress"]
    inside.expect("step", lambda line: line["progress"] > seen + 10 * 4 / SETTINGS["steps"])
