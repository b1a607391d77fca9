"""How much memory this process may still take: of the machine, and of the control groups that it is in.

Shared memory is taken page by page, as it is touched. Where there is no room for a page, the kernel ends the process
by a bus error or for being out of memory, in the middle of training and without a word. So a join looks first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that are free, and where."""

    free_bytes: int
    where: str


def memory_room(proc: Path = PROC, cgroups: Path = CGROUPS) -> Room | None:
    """The least of all limits; None where the system tells nothing."""
    return min([*_of_machine(proc), *_of_groups(proc, cgroups)], key=lambda room: room.free_bytes, default=None)


def disk_room(fd: int) -> Room:
    """Of the file system that an open file is on."""
    stat = os.fstatvfs(fd)
    return Room(stat.f_bavail * stat.f_frsize, "the temporary folder (TMPDIR)")


def _of_machine(proc: Path) -> Iterator[Room]:
    free = {line.split(":")[0]: line.split()[1] for line in _lines(proc / "meminfo") if ":" in line}
    if "MemAvailable" in free:
        kib = int(free["MemAvailable"]) + int(free.get("SwapFree", 0))
        yield Room(1024 * kib, "this machine's memory")


def _of_groups(proc: Path, cgroups: Path) -> Iterator[Room]:
    """Version 2 (one hierarchy, `0::/path`) and version 1 (`n:memory:/path`); a limit binds all below it."""
    for line in _lines(proc / "self" / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            names, root = ("memory.max", "memory.current", "inactive_file"), cgroups
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = cgroups / "memory"
        else:
            continue
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            yield from _of_group(group, *names)
            if group == root:
                break


def _of_group(group: Path, limit: str, usage: str, cache: str) -> Iterator[Room]:
    """Files that were read and lie idle in memory are given back when memory is short."""
    with contextlib.suppress(ValueError, IndexError):  # "max": no limit; or a file that is not there
        limit_bytes, used_bytes = int(_lines(group / limit)[0]), int(_lines(group / usage)[0])
        idle = [int(line.split()[1]) for line in _lines(group / "memory.stat") if line.startswith(f"{cache} ")]
        yield Room(max(0, limit_bytes - used_bytes + sum(idle)), f"the memory limit of this job ({limit})")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def gib(size_bytes: int) -> str:
    """For people."""
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB / 100 else f"{size_bytes / 2**20:.1f} MiB"
