"""What a command shows while a run goes on: a live picture in a terminal, else plain lines, nothing, or JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from atoll.core.records import NoticeLine, Record
from atoll.store.tape import printable
from atoll.watch.lines import ConsoleLines
from atoll.watch.view import RunView


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Options of commands that show a run. In a terminal it is a live picture."""

    plain: bool = False
    """Lines instead of a live picture."""
    quiet: bool = False
    """Only warnings and the closing summary."""
    json: bool = False
    """One JSON object per slot interval, and the summary as the last one."""


def warn(text: str) -> None:
    """A line that matters, on stderr."""
    print(f"atoll: {text}", file=sys.stderr, flush=True)


class Console:
    """Plain lines. quiet: only warnings. known: notices that were said before the start."""

    def __init__(self, *, quiet: bool = False, known: Sequence[str] = ()) -> None:
        self._lines = ConsoleLines()
        self._quiet = quiet
        self._known = frozenset(known)

    @property
    def view(self) -> RunView:
        return self._lines.view

    def shown(self) -> AbstractContextManager[Any]:
        """While the run goes on."""
        return nullcontext()

    def say(self, text: str) -> None:
        """A line for people, while the run goes on and after it."""
        if self._quiet:
            warn(text)
        else:
            print(text, flush=True)

    def tell(self, text: str) -> None:
        """A line that people need, quiet or not."""
        print(text, flush=True)

    def warn(self, text: str) -> None:
        """A line that matters."""
        warn(text)

    def record(self, record: Record) -> None:
        """One tape line."""
        for line in self._lines.feed(record):
            if not isinstance(record, NoticeLine):
                if not self._quiet:
                    print(line, flush=True)
            elif record.text not in self._known:
                warn(line)

    def closing(self, lines: Sequence[str], summary: dict[str, Any]) -> None:
        """The end of the run."""
        print("\n".join(lines), flush=True)


class JsonConsole(Console):
    """One JSON object per slot interval (watch.status), the summary as the last line."""

    def __init__(self, known: Sequence[str] = ()) -> None:
        super().__init__(quiet=True, known=known)
        self._told = 0

    def say(self, text: str) -> None:
        """Nothing but JSON goes to stdout."""
        warn(text)

    tell = say

    def record(self, record: Record) -> None:
        from atoll.watch.status import status

        super().record(record)
        if self.view.pieces and self.view.settled_slots >= self._told + self.view.pieces:
            self._told = self.view.settled_slots
            self._print({"kind": "status", **asdict(status(self.view))})

    def closing(self, lines: Sequence[str], summary: dict[str, Any]) -> None:
        self._print({"kind": "summary", **summary})

    def _print(self, found: dict[str, Any]) -> None:
        print(msgspec.json.encode(printable(found)).decode(), flush=True)


class LiveConsole(Console):
    """A picture that is redrawn (watch.live), with lines going by above it."""

    def __init__(self, known: Sequence[str] = ()) -> None:
        from atoll.watch.live import LiveView

        super().__init__(known=known)
        self._live = LiveView()

    @property
    def view(self) -> RunView:
        return self._live.view

    def shown(self) -> AbstractContextManager[Any]:
        return self._live

    def say(self, text: str) -> None:
        self._live.say(text)

    tell = say

    def warn(self, text: str) -> None:
        self._live.say(f"atoll: {text}")

    def record(self, record: Record) -> None:
        if isinstance(record, NoticeLine) and record.text in self._known:
            self.view.feed(record)
        else:
            self._live.feed(record)


def console_for(options: Shown, known: Sequence[str] = ()) -> Console:
    """What the options ask for."""
    if options.json:
        return JsonConsole(known)
    if options.plain or options.quiet or not sys.stdout.isatty():
        return Console(quiet=options.quiet, known=known)
    return LiveConsole(known)
