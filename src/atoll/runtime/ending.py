"""What a syncer writes last: it waits for room on the disk, and says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from atoll.errors import RunError
from atoll.store.files import END_WAIT_S, PASSING, RETRY_S

T = TypeVar("T")


async def write_at_last(what: str, work: Callable[[], Awaitable[T]], run_dir: Path, show: Callable[[str], None]) -> T:
    """`work`, again and again while the disk is full, for END_WAIT_S. RunError at last."""
    deadline, told = time.monotonic() + END_WAIT_S, False
    while True:
        try:
            return await work()
        except OSError as error:
            why = error.strerror or str(error)
            if error.errno not in PASSING or time.monotonic() > deadline:
                rescue = f"`atoll pull {run_dir} --to DIR` makes a model of what is there"
                raise RunError(f"{what} cannot be written ({why}); {rescue}") from error
            if not told:
                show(f"{what} cannot be written ({why}); waiting up to {END_WAIT_S:.0f} s for room")
            told = True
        await asyncio.sleep(RETRY_S)
