"""Shared memory is looked for and taken at join: too little is one line, never a bus error."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import atoll
from atoll.errors import JoinError
from atoll.runtime import memory
from atoll.runtime.memory import SharedMemory, create_file, make_plan
from atoll.runtime.room import Room, memory_room
from tests.runtime.conftest import ROOT, Start
from tests.runtime.test_one_process import serving, small_model

GIB = 2**30


def tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


MEMINFO = "MemTotal: 99 kB\nMemAvailable:    8388608 kB\nSwapFree: 1048576 kB\n"
V2 = "cgroup/job/step/memory"
V1 = "cgroup/memory/job/step/memory"


@pytest.mark.parametrize(
    ("files", "free", "where"),
    [
        ({}, 9 * GIB, "machine"),
        ({f"{V2}.max": "max\n", f"{V2}.current": "5\n"}, 9 * GIB, "machine"),
        ({f"{V2}.max": f"{GIB}", f"{V2}.current": f"{GIB // 4}"}, 3 * GIB // 4, "memory.max"),
        (
            {f"{V2}.max": f"{GIB}", f"{V2}.current": f"{GIB}", f"{V2}.stat": f"anon 7\ninactive_file {GIB // 2}\n"},
            GIB // 2,
            "memory.max",
        ),
        ({"cgroup/job/memory.max": f"{GIB}", "cgroup/job/memory.current": "0", f"{V2}.max": "max"}, GIB, "memory.max"),
        ({"cgroup/memory.max": f"{GIB}", "cgroup/memory.current": f"{2 * GIB}"}, 0, "memory.max"),
        ({f"{V1}.limit_in_bytes": f"{2 * GIB}", f"{V1}.usage_in_bytes": f"{GIB}"}, GIB, "limit_in_bytes"),
        ({f"{V1}.limit_in_bytes": "9223372036854771712", f"{V1}.usage_in_bytes": "0"}, 9 * GIB, "machine"),
        ({f"{V2}.max": "not a number", f"{V2}.current": "5"}, 9 * GIB, "machine"),
    ],
)
def test_room__is_the_least_of_all_limits(tmp_path: Path, files: dict[str, str], free: int, where: str) -> None:
    tree(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "4:cpu,memory:/job/step\n0::/job/step\n"} | files)
    room = memory_room(tmp_path / "proc", tmp_path / "cgroup")
    assert room is not None
    assert room.free_bytes == free
    assert where in room.where


def test_room__of_a_system_that_tells_nothing__is_not_known(tmp_path: Path) -> None:
    assert memory_room(tmp_path, tmp_path) is None


def test_too_little_memory__join_says_so_and_leaves_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    address = serving(start)
    monkeypatch.setattr(memory, "memory_room", lambda: Room(1000, "the memory limit of this job (memory.max)"))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(JoinError, match=r"needs 0\.0 MiB of shared memory .* \(memory\.max\) has 0\.0 MiB left; give"):
        atoll.join(*small_model(), address=address, name="a", timeout_s=30.0)
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.undo()
    atoll.join(*small_model(), address=address, name="a", timeout_s=30.0, name_wait_s=20.0).close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no small file system can be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


CHILD = """
import os, sys
del os.memfd_create
from atoll.errors import JoinError
from atoll.runtime import memory
from atoll.runtime.room import Room
if sys.argv[1] == "unseen":
    memory.disk_room = lambda fd: None
shared = memory.SharedMemory(memory.create_file())
plan = memory.make_plan([int(sys.argv[2])] * 2, 4)
try:
    shared.reserve(plan)
except JoinError as error:
    print(error)
else:
    shared.upload(1)[:] = bytes(len(shared.upload(1)))
    print("whole")
"""


@pytest.mark.parametrize(
    ("look", "size", "said"),
    [("seen", 2**20, "(TMPDIR) has 1.0 MiB left"), ("unseen", 2**20, "No space left"), ("seen", 2**16, "whole")],
)
def test_without_memfd__the_temporary_folder_must_hold_it(small_disk: Path, look: str, size: int, said: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(small_disk)}
    command = [sys.executable, "-c", CHILD, look, str(size)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{done.returncode} {done.stderr}"
    assert said in done.stdout


def test_reserved_pages__are_taken_at_once() -> None:
    shared = SharedMemory(create_file())
    plan = make_plan([10 * mmap.PAGESIZE] * 3, 4)
    shared.reserve(plan)
    assert os.fstat(shared.fd).st_blocks * 512 >= plan.total_bytes
    shared.release()
