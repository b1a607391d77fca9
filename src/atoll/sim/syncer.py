"""The real core.Syncer on the virtual clock: streams with latency; checks, merges and syncs to disk that take time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from atoll.core import events as ev
from atoll.core.messages import Announce, Hello, Life, Merged, SeedRequest, SyncerMessage, Version
from atoll.core.records import Record
from atoll.core.syncer import Syncer
from atoll.sim.clock import Timer
from atoll.sim.disk import Disk

if TYPE_CHECKING:
    from atoll.sim.world import World

SEED_RETRY_NS = 2_000_000_000
ACCEPT_WAIT_NS = 5_000_000_000


class Peer(Protocol):
    """The other end of a control stream."""

    @property
    def name(self) -> str:
        """As in its Hello."""

    def receive(self, stream: int, message: SyncerMessage) -> None:
        """The syncer says something."""

    def stream_closed_by_syncer(self, stream: int) -> None:
        """And hangs up."""


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

    def __init__(self, world: World, *, merge_ns: int, commit_ns: int, learners_max: int = 0) -> None:
        self._world = world
        self._merge_ns = merge_ns
        limits = {"learners_max": learners_max} if learners_max else {}
        self.core = Syncer(world.config, world.layout, **limits)
        self.disk = Disk(world.clock, commit_ns)
        self.tape: list[Record] = []
        self.notices: list[str] = []
        self.streams: dict[int, Peer] = {}
        self.expected: dict[tuple[Life, int], Announce] = {}
        self.published: dict[int, Published] = {}
        self.over = False
        self._shop = world.make_shop(world)
        self._arrived: dict[tuple[Life, int, int], Any] = {}
        self._discarded: dict[tuple[Life, int], int] = {}
        self._early: dict[tuple[Life, int, int], Callable[[], None]] = {}
        """Uploads that are whole and not announced yet."""
        self._seeder: Life | None = None
        self._seed_from: dict[int, Life] = {}
        self._lined: set[int] = set()
        """Slots whose tape line is synced: not written again when their commit is tried again."""
        self._asleep_since_ns: int | None = None
        self._queue: deque[Callable[[], None]] = deque()
        self._timer = Timer(world.clock, lambda: self.feed(ev.Wake()))
        self._performers: dict[type, Callable[[Any], None]] = {
            ev.Send: self._send,
            ev.CloseStream: self._close_stream,
            ev.Write: self._write,
            ev.Merge: self._merge,
            ev.Commit: self._commit,
            ev.CommitSeed: self._commit_seed,
            ev.Publish: self._publish,
            ev.Accept: self._accept,
            ev.Discard: self._discard,
            ev.SetTimer: self._set_timer,
            ev.Notice: lambda action: self.notices.append(action.text),
            ev.RunOver: self._run_over,
            ev.DropSeed: self._drop_seed,
        }

    def start(self) -> None:
        self.feed(ev.Started(epoch=1, has_init=False))

    def feed(self, event: ev.SyncerEvent) -> None:
        """One event in, or in the queue while the syncer stands still; the actions are carried out in order."""
        if self._asleep_since_ns is not None:
            self._queue.append(lambda: self.feed(event))
            return
        self._world.checkers.before(event)
        for action in self.core.handle(event, now_ns=self._world.clock.now_ns):
            self._performers[type(action)](action)
        self._world.after_syncer(event)

    def _later(self, delay_ns: float, event: ev.SyncerEvent) -> None:
        self._world.clock.call_after(delay_ns, lambda: self.feed(event))

    # ------------------------------------------------------------ standing still

    @property
    def asleep(self) -> bool:
        return self._asleep_since_ns is not None

    def sleep(self) -> None:
        """Stand still: nothing is read, nothing is sent."""
        if self._asleep_since_ns is None:
            self._asleep_since_ns = self._world.clock.now_ns

    def wake(self) -> None:
        """Go on, first with what queued up."""
        if self._asleep_since_ns is None:
            return
        gap_ns = self._world.clock.now_ns - self._asleep_since_ns
        self._asleep_since_ns = None
        if gap_ns > self._world.config.overslept_ns:
            self.feed(ev.Overslept(gap_ns))
        while self._queue and self._asleep_since_ns is None:
            self._queue.popleft()()

    def awake(self, act: Callable[[], None]) -> None:
        if self._asleep_since_ns is not None:
            self._queue.append(act)
        else:
            act()

    # ------------------------------------------------------------ actions

    def _send(self, action: ev.Send) -> None:
        agent = self.streams.get(action.stream)
        if agent is not None:
            life = self._world.checkers.sent(action.stream, agent.name, action.message)
            if isinstance(action.message, SeedRequest):
                self._seeder = life
            agent.receive(action.stream, action.message)

    def _close_stream(self, action: ev.CloseStream) -> None:
        agent = self.streams.pop(action.stream, None)
        if agent is not None:
            agent.stream_closed_by_syncer(action.stream)

    def _write(self, action: ev.Write) -> None:
        self.tape.append(action.record)
        self.disk.append("tape", action.record)
        if action.sync:
            self.disk.sync_now("tape")

    def _merge(self, action: ev.Merge) -> None:
        payloads = [self._arrived[i.life, action.piece, i.seq] for i in action.inputs]
        self._shop.merge(action.piece, payloads, [i.weight for i in action.inputs])
        finite = self._world.merge_is_finite()
        size_bytes = self._world.piece_bytes[action.piece]
        done = ev.MergeDone(action.slot, finite, "theta", "momentum", "update", size_bytes, 1.0)
        self._later(self._merge_ns, done)

    def _commit(self, action: ev.Commit) -> None:
        """The tape line, synced; then the commit file, synced."""

        def lined(ok: bool) -> None:
            if not ok:
                self.feed(ev.CommitFailed(action.slot, "no space left on device"))
                return
            if action.slot not in self._lined:
                self._lined.add(action.slot)
                self.tape.append(action.record)
            self.disk.replace(f"commit {action.piece}", action, filed)

        def filed(ok: bool) -> None:
            failed = ev.CommitFailed(action.slot, "no space left on device")
            self.feed(ev.CommitDone(action.slot) if ok else failed)

        self.disk.append("tape", action.record)
        self.disk.sync("tape", lined)

    def _commit_seed(self, action: ev.CommitSeed) -> None:
        """All pieces, one file each; tried again while the disk is full."""
        sizes = self._world.piece_bytes
        self._world.checkers.seed_committed(self._seed_from, self._seeder)

        def filed(ok: bool, piece: int) -> None:
            if not ok:
                self._world.clock.call_after(SEED_RETRY_NS, lambda: self._commit_seed(action))
            elif piece == len(sizes) - 1:
                self.feed(ev.SeedCommitted(("v0",) * len(sizes), tuple(sizes)))
            else:
                write(piece + 1)

        def write(piece: int) -> None:
            self.disk.replace(f"commit {piece}", None, lambda ok: filed(ok, piece))

        write(0)

    def _drop_seed(self, action: ev.DropSeed) -> None:
        self._seeder = None
        self._seed_from.clear()

    def _publish(self, action: ev.Publish) -> None:
        state = self.core.pieces[action.piece]
        assert state.version == action.version
        found = Published(action.version, state.slot, dict(state.newest_merged), self._shop.published(action.piece))
        self.published[action.piece] = found
        self._world.checkers.published(action.piece, found)

    def _accept(self, action: ev.Accept) -> None:
        self.expected[action.life, action.announce.piece] = action.announce
        self._world.checkers.accepted(action)
        early = self._early.pop((action.life, action.announce.piece, action.announce.seq), None)
        if early is not None:
            self._world.clock.call_after(0, lambda: self.awake(early))

    def _discard(self, action: ev.Discard) -> None:
        newest = self._discarded.get((action.life, action.piece), 0)
        self._discarded[action.life, action.piece] = max(newest, action.seq)
        expected = self.expected.get((action.life, action.piece))
        if expected is not None and expected.seq == action.seq:
            del self.expected[action.life, action.piece]
        self._arrived.pop((action.life, action.piece, action.seq), None)

    def _set_timer(self, action: ev.SetTimer) -> None:
        self._timer.set(action.at_ns)

    def _run_over(self, action: ev.RunOver) -> None:
        self.over = True

    # ------------------------------------------------------------ called by the network

    def stream_opened(self, stream: int, agent: Peer, hello: Hello) -> None:
        def opened() -> None:
            self.streams[stream] = agent
            self.feed(ev.StreamOpened(stream, hello))

        self.awake(opened)

    def stream_closed(self, stream: int) -> None:
        def closed() -> None:
            self.streams.pop(stream, None)
            self.feed(ev.StreamClosed(stream))

        self.awake(closed)

    def received(self, stream: int, message: object) -> None:
        def read() -> None:
            if stream in self.streams:
                self.feed(ev.Received(stream, message))

        self.awake(read)

    def upload_arrived(self, life: Life, piece: int, seq: int, payload: Any, answer: Callable[[str], None]) -> None:
        """All bytes are here: ok once they are checked, or unwanted."""
        self.awake(lambda: self._upload_arrived(life, piece, seq, payload, answer))

    def _upload_arrived(
        self, life: Life, piece: int, seq: int, payload: Any, answer: Callable[[str], None]
    ) -> None:
        if seq == 0:
            self._seed_arrived(life, piece, payload, answer)
            return
        expected = self.expected.get((life, piece))
        if expected is None or expected.seq != seq:
            self._not_yet(life, piece, seq, payload, answer)
            return
        if (life, piece, seq) in self._arrived:
            answer("ok")  # a new agent sends again what the old one had sent
            return
        self._arrived[life, piece, seq] = payload
        hash_ok, finite, norm = self._world.fault_of(expected)
        self._world.checkers.arrived(life, piece, seq, ok=hash_ok and finite, norm=norm)
        done = ev.ContributionArrived(life, piece, seq, f"{life}/{piece}/{seq}", hash_ok, finite, norm)
        self._later(self._merge_ns // 2, done)
        answer("ok")

    def _seed_arrived(self, life: Life, piece: int, payload: Any, answer: Callable[[str], None]) -> None:
        if life != self._seeder:
            answer("unwanted")
            return
        self._shop.seed(piece, payload)
        self._seed_from[piece] = life
        self.feed(ev.SeedArrived(life, piece, True, True))
        answer("ok")

    def _not_yet(self, life: Life, piece: int, seq: int, payload: Any, answer: Callable[[str], None]) -> None:
        """Bytes that came before their announcement wait a little for it: it goes another way."""
        if seq <= self._discarded.get((life, piece), 0):
            answer("unwanted")
            return

        def give_up() -> None:
            if self._early.pop((life, piece, seq), None) is not None:
                answer("unwanted")

        self._early[life, piece, seq] = lambda: self._upload_arrived(life, piece, seq, payload, answer)
        self._world.clock.call_after(ACCEPT_WAIT_NS, lambda: self.awake(give_up))
