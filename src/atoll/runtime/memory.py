"""Memory that a training process and its agent share: bulk bytes never pass through the socket between them.

    page 0            four int64: own steps (training process), waiting by R9 (training process),
                      bulk bytes moved (agent), heartbeats (agent)
    upload buffers    one per piece: the contribution that is unsettled, or the piece of version 0
    some places       each as large as the largest piece: updates that arrived and wait for a step boundary

Without torch: both sides see flat memoryviews. An anonymous file (memfd, else an unlinked temporary one) is inherited
by its descriptor, so that nothing has a name that outlives a crash.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.errors import JoinError
from atoll.runtime.room import disk_room, gib, memory_room

PAGE_BYTES = 4096
_STEPS, _WAITING, _PROGRESS, _BEATS = 0, 1, 2, 3


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Plan:
    """Where everything lies, in bytes. Both processes compute it from the layout."""

    upload_bytes: tuple[int, ...]
    upload_offsets: tuple[int, ...]
    place_bytes: int
    place_offsets: tuple[int, ...]
    total_bytes: int


def make_plan(upload_bytes: Sequence[int], places: int) -> Plan:
    """Plan for pieces of so many bytes on the wire, and so many staging places."""
    uploads = tuple(upload_bytes)
    offset = PAGE_BYTES
    upload_offsets = []
    for size in uploads:
        upload_offsets.append(offset)
        offset += _aligned(size)
    place = max(uploads)
    place_offsets = []
    for _ in range(places):
        place_offsets.append(offset)
        offset += _aligned(place)
    return Plan(uploads, tuple(upload_offsets), place, tuple(place_offsets), offset)


def create_file() -> int:
    """Descriptor of a new anonymous file of one page."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("atoll", os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp(prefix="atoll-")
        os.unlink(path)
    os.ftruncate(fd, PAGE_BYTES)
    return fd


def _no_room(plan: Plan, why: str) -> str:
    uploads, places = sum(plan.upload_bytes), len(plan.place_offsets)
    return (
        f"this learner needs {gib(plan.total_bytes)} of shared memory ({gib(uploads)} for what it sends, "
        f"{places} places of {gib(plan.place_bytes)} for what it gets), and {why}; give it more, or train a smaller "
        "part of the model"
    )


class SharedMemory:
    """One side's view of the shared file."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._page = mmap.mmap(fd, PAGE_BYTES)
        self._numbers = memoryview(self._page).cast("q")
        self._data: memoryview | None = None
        self.plan: Plan | None = None

    def grow(self, plan: Plan) -> None:
        """Map everything; both sides may do it, in any order. A second call with the same plan changes nothing."""
        if self.plan == plan:
            return
        assert self.plan is None, "the layout of a life never changes"
        if os.fstat(self.fd).st_size < plan.total_bytes:
            os.ftruncate(self.fd, plan.total_bytes)
        self._data = memoryview(mmap.mmap(self.fd, plan.total_bytes))
        self.plan = plan

    def reserve(self, plan: Plan) -> None:
        """`grow`, with all pages taken now: JoinError where there is no room for them, never a bus error later."""
        room = memory_room() if hasattr(os, "memfd_create") else disk_room(self.fd)
        if room is not None and room.free_bytes < plan.total_bytes:
            raise JoinError(_no_room(plan, f"{room.where} has {gib(room.free_bytes)} left"))
        try:
            os.posix_fallocate(self.fd, 0, plan.total_bytes)
        except OSError as error:
            raise JoinError(_no_room(plan, error.strerror or str(error))) from error
        self.grow(plan)

    def release(self) -> None:
        """Give back all of it, and the descriptor; what somebody still looks at goes when that is dropped."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self._numbers.release()
        self._page.close()
        self._data = None

    def upload(self, piece: int) -> memoryview:
        """The upload buffer of a piece."""
        assert self._data is not None
        assert self.plan is not None
        start = self.plan.upload_offsets[piece]
        return self._data[start : start + self.plan.upload_bytes[piece]]

    def place(self, place: int, size_bytes: int) -> memoryview:
        """The first `size_bytes` of a download place."""
        assert self._data is not None
        assert self.plan is not None
        assert 0 <= size_bytes <= self.plan.place_bytes
        start = self.plan.place_offsets[place]
        return self._data[start : start + size_bytes]

    @property
    def steps(self) -> int:
        """Own steps of this life."""
        return self._numbers[_STEPS]

    @steps.setter
    def steps(self, value: int) -> None:
        self._numbers[_STEPS] = value

    @property
    def waiting(self) -> bool:
        """True while the training thread waits by R9."""
        return bool(self._numbers[_WAITING])

    @waiting.setter
    def waiting(self, value: bool) -> None:
        self._numbers[_WAITING] = int(value)

    @property
    def progress_bytes(self) -> int:
        """Bulk bytes that the agent has moved."""
        return self._numbers[_PROGRESS]

    @progress_bytes.setter
    def progress_bytes(self, value: int) -> None:
        self._numbers[_PROGRESS] = value

    @property
    def beats(self) -> int:
        """Grows while the agent lives and does not hang."""
        return self._numbers[_BEATS]

    def beat(self) -> None:
        """Of the agent."""
        self._numbers[_BEATS] += 1
