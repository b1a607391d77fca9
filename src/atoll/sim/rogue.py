"""Peers that are wrong: strangers whose Hello does not fit, and rogues that join and then break the protocol.

The syncer must refuse or end them, say why, and go on with the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.core.messages import (
    PROTOCOL_VERSION,
    Announce,
    Counters,
    Hello,
    Refuse,
    Replaced,
    Report,
    SyncerMessage,
    Version,
    Welcome,
)
from atoll.sim.links import Line
from atoll.sim.plan import MS

if TYPE_CHECKING:
    from atoll.sim.world import World

STRANGERS = ("run", "protocol", "layout", "replaced")
"""What is wrong with a Hello, and so the kind of the refusal."""

LIES = (
    "weight",
    "does not exist",
    "bytes instead of",
    "does not serve piece",
    "never published",
    "twice at once",
    "ran backwards",
    "unexpected message",
    "not ready",
)
"""What a rogue does, by words of the syncer's answer."""


class Stranger:
    """Says one Hello that does not fit, and listens."""

    def __init__(self, world: World, kind: str, known: str = "") -> None:
        """known: the name of a learner; without one nobody can say the Hello of an older life."""
        self._world = world
        self.kind = "run" if kind == "replaced" and not known else kind
        self.name = known if self.kind == "replaced" else f"stranger{world.new_stream()}"
        self.answer = ""
        self.closed = False
        self.up = Line(world.clock, MS)
        self.stream = world.new_stream()
        self.up.send(lambda: world.syncer.stream_opened(self.stream, self, self._hello()))

    def _hello(self) -> Hello:
        layout = self._world.layout
        hello = Hello(PROTOCOL_VERSION, "", self.name, 0, layout.fingerprint, layout.tensors())
        match self.kind:
            case "run":
                return replace(hello, run_id="another")
            case "protocol":
                return replace(hello, protocol=PROTOCOL_VERSION + 1)
            case "layout":
                return replace(hello, fingerprint="another", tensors=hello.tensors[1:])
            case "replaced":
                return replace(hello, generation=1)
        return hello

    def receive(self, stream: int, message: SyncerMessage) -> None:
        assert isinstance(message, Refuse), f"a stranger was told {message}"
        assert message.kind == self.kind, f"refused for {message.kind}, and it was {self.kind}"
        self.answer = message.kind

    def stream_closed_by_syncer(self, stream: int) -> None:
        assert self.answer, "a stranger was shut out without a word"
        self.closed = True


class Rogue(Stranger):
    """Joins as any learner would, and lies."""

    def __init__(self, world: World, lie: str) -> None:
        super().__init__(world, "")
        self.name = f"rogue{self.stream}"
        self.lie = lie

    def receive(self, stream: int, message: SyncerMessage) -> None:
        if isinstance(message, Welcome):
            self._say(self._lies(message))
        elif isinstance(message, Replaced):
            self.answer = message.reason
        elif isinstance(message, Refuse):
            self.answer = message.message if message.kind == "put out" else message.kind

    def stream_closed_by_syncer(self, stream: int) -> None:
        self.closed = True

    def hang_up(self) -> None:
        """It goes away by itself."""
        if not self.closed:
            self._world.syncer.stream_closed(self.stream)

    def _say(self, messages: list[Callable[[], object]]) -> None:
        pause_ns = self._world.config.lease_interval_ns if self.lie == "not ready" else 0
        for index, message in enumerate(messages):
            at_ns = MS + index * (MS + pause_ns)
            say = lambda message=message: self._world.syncer.received(self.stream, message())  # noqa: E731
            self._world.clock.call_after(at_ns, say)

    def _announce(self, *, seq: int = 1, piece: int = 0, tokens: int = 10) -> Announce:
        """A contribution to the next slot of `piece` that is right but for what is asked for."""
        slots, config = self._world.syncer.core.slots, self._world.config
        known = min(piece, config.fragments - 1)
        slot = config.next_slot_of(known, slots.closed)
        zeros = (0,) * config.fragments
        counters = Counters(1, 10, 0.0, zeros, zeros)
        version = self._world.syncer.core.pieces[known].version
        return Announce(seq, piece, slot, version, 1, 1, tokens, counters, self._world.piece_bytes[known])

    def _lies(self, welcome: Welcome) -> list[Callable[[], object]]:
        pieces = self._world.config.fragments
        zeros = (0,) * pieces
        ready = Report(Counters(0, 0, 0.0, zeros, zeros))
        honest: list[Callable[[], object]] = [lambda: ready]
        match self.lie:
            case "weight":
                return [*honest, lambda: self._announce(tokens=0 if self.stream % 2 else 10**9)]
            case "does not exist":
                return [*honest, lambda: self._announce(piece=pieces)]
            case "bytes instead of":
                return [*honest, lambda: replace(self._announce(), size_bytes=2**40)]
            case "does not serve piece":
                return [*honest, lambda: replace(self._announce(), slot=0)]
            case "never published":
                return [*honest, lambda: replace(self._announce(), anchor=Version(1, 10**6))]
            case "twice at once":
                return [*honest, self._announce, lambda: self._announce(seq=2)]
            case "ran backwards":
                return [
                    *honest,
                    lambda: Report(Counters(5, 50, 0.0, zeros, zeros)),
                    lambda: Report(Counters(4, 60, 0.0, zeros, zeros)),
                ]
            case "not ready":
                return [*honest, lambda: replace(self._announce(), own_step=0)]
        return [*honest, lambda: welcome]
