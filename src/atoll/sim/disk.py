"""A disk in virtual time: what was not synced is lost at a crash, all or a part of it, the last block perhaps torn.

Writes are blocks of anything, a file is a list of them. `replace` is what careful programs do: write aside, sync,
rename.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from atoll.sim.clock import Clock

TORN = object()
"""What a reader finds where a write was cut in the middle: a block that is none."""


@dataclass(slots=True)
class _File:
    blocks: list[Any] = field(default_factory=list)
    synced: int = 0


class Disk:
    """Files by name. `write_ns`: what one sync takes."""

    def __init__(self, clock: Clock, write_ns: int) -> None:
        self._clock = clock
        self._write_ns = write_ns
        self.full = False
        self.slow = 1.0
        self._files: dict[str, _File] = {}
        self._life = 0

    def append(self, name: str, block: Any) -> None:
        """To the page cache: gone at a crash until it is synced."""
        self._files.setdefault(name, _File()).blocks.append(block)

    def sync_now(self, name: str) -> None:
        """A sync whose time does not matter."""
        file = self._files.setdefault(name, _File())
        file.synced = len(file.blocks)

    def sync(self, name: str, done: Callable[[bool], None]) -> None:
        """What was appended by now is safe when `done(True)` comes; `done(False)`: the disk is full."""
        file = self._files.setdefault(name, _File())
        count = len(file.blocks)
        self._answer(lambda: self._synced(file, count), done)

    def replace(self, name: str, block: Any, done: Callable[[bool], None]) -> None:
        """The whole file is `block`, or what it was before: never half of either."""
        self._answer(lambda: self._files.__setitem__(name, _File([block], 1)), done)

    def _synced(self, file: _File, count: int) -> None:
        file.synced = max(file.synced, count)

    def _answer(self, act: Callable[[], None], done: Callable[[bool], None]) -> None:
        life, full = self._life, self.full

        def end() -> None:
            if life != self._life:
                return
            if not full:
                act()
            done(not full)

        self._clock.call_after(self._write_ns * self.slow, end)

    def read(self, name: str) -> list[Any]:
        """What is in the file now, synced or not."""
        return list(self._files.get(name, _File()).blocks)

    def safe(self, name: str) -> list[Any]:
        """What a crash at this instant would surely leave."""
        file = self._files.get(name, _File())
        return file.blocks[: file.synced]

    def crash(self, chance: random.Random) -> None:
        """Power loss: of each file the synced blocks stay, then perhaps some more, the last of them perhaps torn."""
        self._life += 1
        for file in self._files.values():
            loose = len(file.blocks) - file.synced
            kept = file.synced + chance.randint(0, loose)
            file.blocks = file.blocks[:kept]
            if kept > file.synced and chance.random() < 0.5:
                file.blocks[-1] = TORN
            file.synced = len(file.blocks)
