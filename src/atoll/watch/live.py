"""The live view in a terminal: a run at one moment (watch.status), drawn with rich, redrawn as lines come."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from atoll.core.records import Record
from atoll.watch.lines import ConsoleLines
from atoll.watch.status import LearnerStatus, Status, recent_waits, status
from atoll.watch.story import duration
from atoll.watch.view import RunView

REDRAW_S = 0.25
NARROW = 110
"""Below so many columns a learner's last fate and lives are left out."""
COLOURS = {"ready": "green", "idle": "yellow", "joining": "cyan", "away": "red", "ended": "dim"}
DASH = "-"


def share(value: float | None) -> str:
    """In per cent."""
    return DASH if value is None else f"{100 * value:.0f}%"


def figure(value: float | None, form: str, unit: str = "") -> str:
    """With its unit."""
    return DASH if value is None else f"{value:{form}}{unit}"


def draw(now: Status, waits: str, width: int) -> RenderableType:
    """The whole picture, for `width` columns."""
    parts: list[RenderableType] = [_head(now), _bar(now, width), _learners(now.learners, width)]
    parts += [Text(line, style="bold") for line in now.slots_now]
    if waits:
        parts.append(Text(f"waits, newest slots: {waits}", style="dim"))
    parts += [Text(f"! {warning}", style="yellow") for warning in now.warnings]
    return Group(*parts)


def _head(now: Status) -> Text:
    text = Text(no_wrap=False)
    text.append(f"{now.run_id or 'run'}  {now.mode}  {now.phase}", style="bold")
    figures = (
        f"\n{now.tokens:,} tokens at {figure(now.tokens_per_s, ',.0f')}/s  loss {figure(now.loss, '.3f')}  "
        f"merged {share(now.kept)}  participation {share(now.participation)}"
    )
    text.append(figures)
    return text


def _bar(now: Status, width: int) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    row.add_row(
        ProgressBar(total=1.0, completed=now.progress, width=max(10, min(40, width // 3))),
        f"slot {now.slot} of {now.slots}",
        f"{duration(now.elapsed_s)} gone",
        f"{duration(now.left_s)} left" if now.left_s is not None else "",
    )
    return row


def _learners(rows: list[LearnerStatus], width: int) -> Table:
    wide = width >= NARROW
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    for name, justify in (
        ("learner", "left"),
        ("state", "left"),
        ("for", "right"),
        ("step", "right"),
        ("tokens/s", "right"),
        ("lag", "right"),
        ("merged", "right"),
    ):
        table.add_column(name, justify=justify, no_wrap=True)
    if wide:
        table.add_column("lives", justify="right", no_wrap=True)
        table.add_column("last contribution", no_wrap=True, overflow="ellipsis")
    for row in rows:
        cells: list[RenderableType] = [
            row.name,
            Text(row.state, style=COLOURS.get(row.state, "")),
            duration(row.since_s),
            figure(None if row.step_s is None else 1000 * row.step_s, ",.0f", " ms"),
            figure(row.tokens_per_s, ",.0f"),
            DASH if row.lag_slots is None else f"{row.lag_slots}",
            share(row.merged),
        ]
        if wide:
            cells += [str(row.lives), row.last_fate if row.state == "ready" else row.reason]
        table.add_row(*cells)
    return table


class LiveView:
    """Feed it tape lines in order. Lines about members and notices go by above; the picture stays below."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console or Console()
        self._lines = ConsoleLines(intervals=False)
        self._clock = clock
        self._drawn_s = -REDRAW_S
        self._live = Live(console=self.console, auto_refresh=False, transient=False)

    @property
    def view(self) -> RunView:
        return self._lines.view

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._redraw()
        self._live.stop()

    def feed(self, line: Record | Mapping[str, Any]) -> None:
        """Fold it in; redraw now and then."""
        for text in self._lines.feed(line):
            self.say(text)
        if self._clock() >= self._drawn_s + REDRAW_S:
            self._redraw()

    def say(self, text: str) -> None:
        """A line above the picture."""
        self._live.console.print(Text(text))

    def _redraw(self) -> None:
        self._drawn_s = self._clock()
        picture = draw(status(self.view), recent_waits(self.view), self.console.width)
        self._live.update(picture, refresh=True)
