"""What a syncer writes last: it waits for room on the disk, and says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from atoll.errors import RunError
from atoll.store.files import END_WAIT_S, RETRY_S, Patience

T = TypeVar("T")


async def write_at_last(what: str, work: Callable[[], Awaitable[T]], run_dir: Path, show: Callable[[str], None]) -> T:
    """`work`, again and again while the disk is full, for END_WAIT_S. RunError at last."""
    patience = Patience(lambda error: show(f"{_failed(what, error)}; waiting up to {END_WAIT_S:.0f} s for room"))
    while True:
        try:
            return await work()
        except OSError as error:
            if not patience.again(error):
                rescue = f"`atoll pull {run_dir} --to DIR` makes a model of what is there"
                raise RunError(f"{_failed(what, error)}; {rescue}") from error
        await asyncio.sleep(RETRY_S)


def _failed(what: str, error: OSError) -> str:
    return f"{what} cannot be written ({error.strerror or error})"
