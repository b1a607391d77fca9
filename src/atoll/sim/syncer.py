"""The real core.Syncer on the virtual clock: streams with latency, merges and commits that take time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.core import events as ev
from atoll.core.messages import Life, Merged, Version
from atoll.core.records import Record
from atoll.core.syncer import Syncer

if TYPE_CHECKING:
    from atoll.sim.learner import SimAgent
    from atoll.sim.world import World


@dataclass(frozen=True, slots=True)
class Published:
    """What a download of a piece gets."""

    version: Version
    slot: int
    newest_merged: dict[Life, int]
    payload: Any = None

    def merged_for(self, life: Life) -> Merged:
        """The newest merged seq of `life` in this version."""
        seq = self.newest_merged.get(life)
        return Merged() if seq is None else Merged(life.generation, seq)


class SimSyncer:
    """Driver of the syncer in virtual time. `tape` holds every record, in order."""

    def __init__(self, world: World, *, merge_ns: int, commit_ns: int) -> None:
        self._world = world
        self._merge_ns = merge_ns
        self._commit_ns = commit_ns
        self.core = Syncer(world.config, world.layout)
        self.tape: list[Record] = []
        self.notices: list[str] = []
        self.streams: dict[int, SimAgent] = {}
        self.expected: dict[tuple[Life, int], int] = {}
        self.published: dict[int, Published] = {}
        self.over = False
        self.disk_full = False
        self._shop = world.make_shop(world)
        self._arrived: dict[tuple[Life, int], Any] = {}

    def start(self) -> None:
        self.feed(ev.Started(epoch=1, has_init=False))

    def feed(self, event: ev.SyncerEvent) -> None:
        """One event in; the actions are carried out in order."""
        for action in self.core.handle(event, now_ns=self._world.clock.now_ns):
            self._carry_out(action)
        self._world.check()

    def _later(self, delay_ns: int, event: ev.SyncerEvent) -> None:
        self._world.clock.call_after(delay_ns, lambda: self.feed(event))

    def _carry_out(self, action: ev.SyncerAction) -> None:
        match action:
            case ev.Send(stream, message):
                if stream in self.streams:
                    self.streams[stream].receive(stream, message)
            case ev.CloseStream(stream):
                if stream in self.streams:
                    self.streams.pop(stream).stream_closed_by_syncer(stream)
            case ev.Write(record, _):
                self.tape.append(record)
            case ev.Merge(slot, piece, _, _, inputs):
                payloads = [self._arrived[i.life, piece] for i in inputs]
                self._shop.merge(piece, payloads, [i.weight for i in inputs])
                done = ev.MergeDone(slot, True, "theta", "momentum", "update", 1, 1.0)
                self._later(self._merge_ns, done)
            case ev.Commit():
                self._commit(action)
            case ev.CommitSeed():
                sizes = self._world.piece_bytes
                self._later(self._commit_ns, ev.SeedCommitted(("v0",) * len(sizes), tuple(sizes)))
            case ev.Publish(piece, version):
                state = self.core.slots.pieces[piece]
                assert state.version == version
                merged = dict(state.newest_merged)
                self.published[piece] = Published(version, state.slot, merged, self._shop.published(piece))
            case ev.Accept(life, announce):
                self.expected[life, announce.piece] = announce.seq
            case ev.Discard(life, piece, seq):
                if self.expected.get((life, piece)) == seq:
                    del self.expected[life, piece]
            case ev.SetTimer(at_ns):
                self._world.clock.call_at(at_ns, lambda: self.feed(ev.Wake()))
            case ev.Notice(text):
                self.notices.append(text)
            case ev.RunOver():
                self.over = True
            case ev.DropSeed():
                pass

    def _commit(self, action: ev.Commit) -> None:
        if self.disk_full:
            self._later(self._commit_ns, ev.CommitFailed(action.slot, "no space left on device"))
            return
        self.tape.append(action.record)
        self._later(self._commit_ns, ev.CommitDone(action.slot))

    # ------------------------------------------------------------ called by the network

    def stream_opened(self, stream: int, agent: SimAgent, hello: ev.HelloMessage) -> None:
        self.streams[stream] = agent
        self.feed(ev.StreamOpened(stream, hello))

    def stream_closed(self, stream: int) -> None:
        self.streams.pop(stream, None)
        self.feed(ev.StreamClosed(stream))

    def received(self, stream: int, message: object) -> None:
        if stream in self.streams:
            self.feed(ev.Received(stream, message))

    def upload_arrived(self, life: Life, piece: int, seq: int, payload: Any) -> str:
        """All bytes are here: ok, or unwanted."""
        if seq == 0:
            self._shop.seed(piece, payload)
            self.feed(ev.SeedArrived(life, piece, True, True))
            return "ok"
        if self.expected.get((life, piece)) != seq:
            return "unwanted"
        self._arrived[life, piece] = payload
        hash_ok, finite, norm = self._world.fault_of(life)
        self.feed(ev.ContributionArrived(life, piece, seq, f"{life}/{piece}/{seq}", hash_ok, finite, norm))
        return "ok"
