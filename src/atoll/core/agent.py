"""The agent: what runs beside the training process and keeps the line to the syncer (protocol R4, R6, R7, R10).

It decides which bytes move next; it knows nothing of training. One upload and one download run at a time. Uploads go in
the order of capture. Updates coalesce to the newest version of a piece and keep that piece's place in the queue. After
a reconnect it announces again what has no fate yet, so that nothing hangs on a message that was lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from atoll.core.events import (
    AgentAction,
    AgentDone,
    AgentEvent,
    Beat,
    Connect,
    Connected,
    ConnectionLost,
    DownloadEnded,
    FromLearner,
    FromSyncer,
    Heard,
    PlaceFreed,
    SeedOffered,
    SetTimer,
    StartDownload,
    StartUpload,
    StopUpload,
    StreamLost,
    ToLearner,
    ToSyncer,
    UpdateArrived,
    UploadDone,
    UploadEnded,
    Wake,
)
from atoll.core.messages import (
    Announce,
    Counters,
    Declare,
    Fate,
    Heartbeat,
    Leave,
    Refuse,
    Replaced,
    Report,
    UpdateReady,
    Version,
    Welcome,
)

BACKOFF_FIRST_NS = 100_000_000
BACKOFF_LAST_NS = 2_000_000_000
NAME_RETRY_NS = 500_000_000
FAREWELL_NS = 2_000_000_000


@dataclass(slots=True)
class _Upload:
    piece: int
    seq: int
    size_bytes: int
    wanted: bool = True


class Agent:
    """State machine of the agent. `name_wait_ns`: how long a name that is in use is asked for again."""

    def __init__(self, *, name_wait_ns: int = 0) -> None:
        self._name_wait_ns = name_wait_ns
        self._started_ns: int | None = None
        self._actions: list[AgentAction] = []
        self._now_ns = 0
        self._generation = 0
        self._connected = False
        self._backoff_ns = BACKOFF_FIRST_NS
        self._announced: dict[int, Announce] = {}
        """Per piece, the newest announcement that has no fate; a merged one stays until the next capture."""
        self._report: Report | None = None
        self._newest: Counters | None = None
        """Of all that was told: what a repeated report says, since older counters would seem to run backwards."""
        self._declare: Declare | None = None
        self._leave: Leave | None = None
        self._leave_by_ns = 0
        self._uploads: list[_Upload] = []
        self._seed_offered = False
        self._upload: _Upload | None = None
        self._upload_after_ns = 0
        self._downloads: dict[int, UpdateReady] = {}
        self._download: UpdateReady | None = None
        self._download_after_ns = 0
        self._delivered: dict[int, Version] = {}
        self._places: list[int] = []
        self._spoken = False
        self._done = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            FromLearner: self._on_from_learner,
            SeedOffered: self._on_seed_offered,
            PlaceFreed: lambda event: self._places.append(event.place),
            Connected: self._on_connected,
            ConnectionLost: self._on_connection_lost,
            FromSyncer: self._on_from_syncer,
            UploadEnded: self._on_upload_ended,
            DownloadEnded: self._on_download_ended,
            Beat: self._on_beat,
            Wake: lambda event: None,
        }

    def start(self, *, now_ns: int) -> list[AgentAction]:
        """First actions: connect."""
        self._started_ns = now_ns
        return [Connect(0, 0)]

    def handle(self, event: AgentEvent, *, now_ns: int) -> list[AgentAction]:
        """Take one event; return what to do, in order."""
        assert self._started_ns is not None, "start() comes first"
        if self._done:
            return []
        self._now_ns = now_ns
        self._handlers[type(event)](event)
        self._pump()
        actions, self._actions = self._actions, []
        return actions

    # ------------------------------------------------------------ control

    def _on_connected(self, event: Connected) -> None:
        assert isinstance(event.welcome, Welcome)
        self._generation = event.welcome.generation
        self._connected = True
        self._backoff_ns = BACKOFF_FIRST_NS
        self._actions.append(ToLearner(Heard(event.welcome, self._now_ns)))
        for announce in sorted(self._announced.values(), key=lambda a: a.seq):
            self._actions.append(ToSyncer(announce))
        report = self._report
        if report is not None and self._newest is not None:
            report = replace(report, counters=self._newest, sent_ns=self._now_ns)
        for message in (report, self._declare, self._leave):
            if message is not None:
                self._actions.append(ToSyncer(message))
        if self._leave is not None:
            self._finish()

    def _on_connection_lost(self, event: ConnectionLost) -> None:
        self._connected = False
        self._actions.append(ToLearner(StreamLost(event.reason)))
        self._actions.append(Connect(self._generation, self._backoff_ns))
        self._backoff_ns = min(2 * self._backoff_ns, BACKOFF_LAST_NS)

    def _on_from_learner(self, event: FromLearner) -> None:
        message = event.message
        if isinstance(message, Announce | Report):
            self._newest = message.counters
        if isinstance(message, Announce):
            self._announced[message.piece] = message
            self._uploads.append(_Upload(message.piece, message.seq, message.size_bytes))
        elif isinstance(message, Report):
            self._report = message
        elif isinstance(message, Declare):
            self._declare = message
        elif isinstance(message, Leave):
            self._leave = message
            self._leave_by_ns = self._now_ns + FAREWELL_NS
        if self._connected:
            self._spoken = True
            if isinstance(message, Report):
                message = replace(message, sent_ns=self._now_ns)
            self._actions.append(ToSyncer(message))
            if self._leave is not None:
                self._finish()

    def _finish(self) -> None:
        self._actions.append(AgentDone())
        self._done = True

    def _on_beat(self, event: Beat) -> None:
        """A heartbeat, unless something else went out since the last beat and said as much."""
        quiet = not self._spoken
        self._spoken = False
        if self._connected and (quiet or event.waiting):
            self._actions.append(ToSyncer(Heartbeat(event.steps, event.waiting, event.progress_bytes)))

    def _on_from_syncer(self, event: FromSyncer) -> None:
        message = event.message
        if isinstance(message, Refuse):
            self._refused(message)
            return
        if isinstance(message, UpdateReady):
            self._update_ready(message)
        elif isinstance(message, Fate):
            self._settled(message.piece, message.seq)
        self._actions.append(ToLearner(Heard(message, self._now_ns)))
        if isinstance(message, Replaced):
            self._finish()

    def _refused(self, refusal: Refuse) -> None:
        assert self._started_ns is not None
        self._connected = False
        if refusal.kind == "name" and self._now_ns < self._started_ns + self._name_wait_ns:
            self._backoff_ns = NAME_RETRY_NS
            return
        self._actions.append(ToLearner(Heard(refusal, self._now_ns)))
        self._finish()

    # ------------------------------------------------------------ uploads

    def _on_seed_offered(self, event: SeedOffered) -> None:
        self._uploads = [_Upload(piece, 0, size) for piece, size in enumerate(event.sizes_bytes)]
        self._seed_offered = True

    def _settled(self, piece: int, seq: int) -> None:
        """A fate came: its bytes are not wanted any more."""
        announce = self._announced.get(piece)
        if announce is not None and announce.seq == seq:
            del self._announced[piece]
        self._uploads = [u for u in self._uploads if (u.piece, u.seq) != (piece, seq)]
        running = self._upload
        if running is not None and (running.piece, running.seq) == (piece, seq):
            running.wanted = False
            self._actions.append(StopUpload(piece, seq))

    def _on_upload_ended(self, event: UploadEnded) -> None:
        upload = self._upload
        assert upload is not None
        assert (upload.piece, upload.seq) == (event.piece, event.seq)
        self._upload = None
        whole = event.result == "ok"
        if whole or event.moved_bytes:
            done = UploadDone(upload.piece, upload.seq, event.moved_bytes, event.duration_ns, whole)
            self._actions.append(ToLearner(done))
        if event.result == "broken" and upload.wanted:
            self._uploads.insert(0, upload)
            self._upload_after_ns = self._now_ns + BACKOFF_FIRST_NS

    # ------------------------------------------------------------ downloads

    def _drop_seed_uploads(self) -> None:
        """Version 0 exists: one that was named for it and was silent meanwhile need not send a whole model."""
        self._uploads = [u for u in self._uploads if u.seq]
        running = self._upload
        if running is not None and not running.seq:
            running.wanted = False
            self._actions.append(StopUpload(running.piece, running.seq))

    def _update_ready(self, message: UpdateReady) -> None:
        if self._seed_offered:
            self._seed_offered = False
            self._drop_seed_uploads()
        delivered = self._delivered.get(message.piece)
        if delivered is not None and message.version <= delivered:
            return
        waiting = self._downloads.get(message.piece)
        if waiting is None or message.version > waiting.version:
            self._downloads[message.piece] = message

    def _on_download_ended(self, event: DownloadEnded) -> None:
        assert self._download is not None
        self._download = None
        if event.version is None or not event.hash_ok:
            self._places.append(event.place)
            self._download_after_ns = self._now_ns + BACKOFF_FIRST_NS
            return
        wanted = self._downloads.get(event.piece)
        if wanted is not None and wanted.version <= event.version:
            del self._downloads[event.piece]
        self._delivered[event.piece] = event.version
        self._actions.append(
            ToLearner(UpdateArrived(event.piece, event.version, event.slot, event.place, event.merged))
        )

    # ------------------------------------------------------------ the two queues

    def _pump(self) -> None:
        if self._leave is not None and not self._done and self._now_ns >= self._leave_by_ns:
            self._finish()
        if self._done or not self._connected:
            if self._leave is not None and not self._done:
                self._actions.append(SetTimer(self._leave_by_ns))
            return
        wake_ns = [self._pump_upload(), self._pump_download()]
        times = [t for t in wake_ns if t is not None]
        if times:
            self._actions.append(SetTimer(min(times)))

    def _pump_upload(self) -> int | None:
        if self._upload is not None or not self._uploads:
            return None
        if self._now_ns < self._upload_after_ns:
            return self._upload_after_ns
        self._upload = self._uploads.pop(0)
        self._actions.append(StartUpload(self._upload.piece, self._upload.seq, self._upload.size_bytes))
        return None

    def _pump_download(self) -> int | None:
        if self._download is not None or not self._downloads or not self._places:
            return None
        if self._now_ns < self._download_after_ns:
            return self._download_after_ns
        self._download = next(iter(self._downloads.values()))
        place = self._places.pop(0)
        wanted = self._download
        self._actions.append(StartDownload(wanted.piece, wanted.version, place, wanted.size_bytes))
        return None
