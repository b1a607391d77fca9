"""`atoll status RUN`: where a run stands, once or as it goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import tyro

from atoll.cli.parse import parse

POLL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Status:
    """Show a run: its learners, the slot in progress and what it waits for, warnings."""

    run: tyro.conf.Positional[Path]
    """Directory of the run."""
    follow: bool = False
    """Stay, and show it as it goes on, until it is over. Ctrl-C ends the picture, not the run."""
    json: bool = False
    """All figures as one JSON object."""


def main(argv: Sequence[str]) -> int:
    options = parse(Status, "status", argv)
    from rich.console import Console

    from atoll.watch.live import LiveView, draw
    from atoll.watch.read import Follower, fold_run
    from atoll.watch.status import recent_waits, status
    from atoll.watch.view import ENDED

    if options.follow and not options.json:
        follower = Follower(options.run)
        with LiveView() as live:
            while live.view.phase not in ENDED:
                time.sleep(POLL_S)
                follower.follow_into(live.feed, live.view)
        return 0
    view = fold_run(options.run)
    if options.json:
        print(msgspec.json.encode(asdict(status(view))).decode())
    else:
        console = Console()
        console.print(draw(status(view), recent_waits(view), console.width))
    return 0
