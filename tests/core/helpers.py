"""A syncer machine with a hand on every event, for rules that a whole world shows only by chance."""

from __future__ import annotations

from typing import Any

from atoll.core import events as ev
from atoll.core.config import RunConfig
from atoll.core.layout import TensorSpec, make_layout
from atoll.core.messages import (
    PROTOCOL_VERSION,
    Announce,
    Counters,
    Heartbeat,
    Hello,
    Life,
    Report,
    Version,
    Welcome,
)
from atoll.core.syncer import Syncer

MS = 1_000_000
S = 1_000 * MS


class Bench:
    """Feeds a Syncer; merges and commits are answered by hand or at once (`auto`)."""

    def __init__(self, *, auto: bool = True, fragments: int = 2, interval: int = 4, steps: int = 40, **kw: Any) -> None:
        kw.setdefault("learners", 1)
        limits = {"learners_max": kw.pop("learners_max")} if "learners_max" in kw else {}
        self.config = RunConfig(run_id="r", steps=steps, fragments=fragments, interval=interval, **kw)
        self.layout = make_layout([TensorSpec(f"t{i}", (10,), "float32") for i in range(fragments)], fragments)
        self.core = Syncer(self.config, self.layout, **limits)
        self.auto = auto
        self.now_ns = 0
        self.streams: dict[str, int] = {}
        self.lives: dict[str, Life] = {}
        self.sent: dict[int, list[Any]] = {}
        self.actions: list[Any] = []
        self.feed(ev.Started(1, has_init=True))
        for piece in range(fragments):
            self.feed(ev.SeedArrived(None, piece, True, True))

    def feed(self, event: Any) -> list[Any]:
        actions = self.core.handle(event, now_ns=self.now_ns)
        self.actions += actions
        for action in actions:
            if isinstance(action, ev.Send):
                self.sent.setdefault(action.stream, []).append(action.message)
            elif self.auto and isinstance(action, ev.Merge):
                self.feed(ev.MergeDone(action.slot, True, "t", "m", "u", 20, 1.0))
            elif self.auto and isinstance(action, ev.Commit):
                self.feed(ev.CommitDone(action.slot))
            elif isinstance(action, ev.CommitSeed):
                count = self.config.fragments
                self.feed(ev.SeedCommitted(("v0",) * count, (20,) * count))
        return actions

    def pass_ns(self, ns: int) -> None:
        self.now_ns += ns
        self.feed(ev.Wake())

    def hello(self, name: str, **kw: Any) -> Any:
        """The answer: Welcome or Refuse."""
        stream = len(self.sent) + len(self.streams) + 1000
        hello = Hello(
            kw.get("protocol", PROTOCOL_VERSION),
            kw.get("run_id", ""),
            name,
            kw.get("generation", 0),
            kw.get("fingerprint", self.layout.fingerprint),
            kw.get("tensors", self.layout.tensors()),
        )
        self.feed(ev.StreamOpened(stream, hello))
        answer = self.sent[stream][0]
        if isinstance(answer, Welcome):
            self.streams[name] = stream
            self.lives[name] = Life(name, answer.generation)
        return answer

    def say(self, name: str, message: Any) -> list[Any]:
        return self.feed(ev.Received(self.streams[name], message))

    def counters(self, steps: int) -> Counters:
        zeros = (0,) * self.config.fragments
        return Counters(steps, steps * 100, steps * 100.0, zeros, zeros)

    def join(self, name: str) -> None:
        self.hello(name)
        self.report(name, 0)

    def report(self, name: str, steps: int) -> None:
        self.say(name, Report(self.counters(steps)))

    def beat(self, name: str, steps: int, waiting: bool = False) -> None:
        self.say(name, Heartbeat(steps, waiting))

    def announce(self, name: str, seq: int, slot: int, *, steps: int, c_steps: int = 2, **kw: Any) -> Announce:
        message = Announce(
            seq,
            kw.get("piece", slot % self.config.fragments),
            slot,
            kw.get("anchor", Version(1, 0)),
            steps,
            c_steps,
            kw.get("c_tokens", c_steps * 100),
            kw.get("counters", self.counters(steps)),
            kw.get("size_bytes", 20),
        )
        self.say(name, message)
        return message

    def arrive(self, name: str, message: Announce, **kw: Any) -> None:
        self.feed(
            ev.ContributionArrived(
                self.lives[name],
                message.piece,
                message.seq,
                "hash",
                kw.get("hash_ok", True),
                kw.get("finite", True),
                kw.get("norm", 1.0),
            )
        )

    def told(self, name: str, kind: type) -> list[Any]:
        return [m for m in self.sent.get(self.streams[name], []) if isinstance(m, kind)]

    def written(self, kind: type) -> list[Any]:
        records = [a.record for a in self.actions if isinstance(a, ev.Write | ev.Commit)]
        return [r for r in records if isinstance(r, kind)]
