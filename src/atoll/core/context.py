"""What the parts of the syncer share within one call of `handle`: settings, the time, and the actions so far."""

from __future__ import annotations

from atoll.core.config import RunConfig
from atoll.core.events import Notice, Send, SyncerAction, Write
from atoll.core.layout import Layout
from atoll.core.messages import SyncerMessage
from atoll.core.records import NoticeLine, Record


class Context:
    """Time goes in at `begin`, actions come out of `take`."""

    def __init__(self, config: RunConfig, layout: Layout) -> None:
        self.config = config
        self.layout = layout
        self.now_ns = 0
        self._actions: list[SyncerAction] = []

    def begin(self, now_ns: int) -> None:
        assert now_ns >= self.now_ns, "the driver's clock is monotonic"
        self.now_ns = now_ns

    def act(self, action: SyncerAction) -> None:
        self._actions.append(action)

    def write(self, record: Record, *, sync: bool = False) -> None:
        self.act(Write(record, sync))

    def send(self, stream: int | None, message: SyncerMessage) -> None:
        """To a member's stream; a member without one hears it all when it is back (Welcome)."""
        if stream is not None:
            self.act(Send(stream, message))

    def notice(self, text: str) -> None:
        """A line for people, also on the tape."""
        self.act(Notice(text))
        self.write(NoticeLine(self.now_ns, text))

    def take(self) -> list[SyncerAction]:
        actions, self._actions = self._actions, []
        return actions
