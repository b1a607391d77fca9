"""The agent: what runs beside the training process and keeps the line to the syncer (protocol R4, R6, R7, R10).

It decides which bytes move next; it knows nothing of training. One upload and one download run at a time. Uploads go in
the order of capture. Updates coalesce to the newest version of a piece and keep that piece's place in the queue. After
a reconnect it announces again what has no fate yet, so that nothing hangs on a message that was lost.

Once it had a life, only the end of the run and a newer life of its name end it (R28): whatever else a syncer answers,
it tries again. One that does not know the life grants another, and the learner goes on in that.
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
    LifeBegun,
    Past,
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
REFUSED_FIRST_NS = 1_000_000_000
REFUSED_LAST_NS = 30_000_000_000
"""A syncer that refuses answers at once; asking it often helps nobody."""
NAME_RETRY_NS = 500_000_000
FAREWELL_NS = 2_000_000_000
FINAL_REFUSALS = ("finished", "replaced")
"""What ends a life that was granted: its run is over, or a newer life has its name."""


@dataclass(slots=True)
class _Upload:
    piece: int
    seq: int
    size_bytes: int
    again: bool = False
    wanted: bool = True


class Agent:
    """State machine of the agent.

    name_wait_ns: how long a name that is in use is asked for again. past: of the life that it takes over from an agent
    that ended.
    """

    def __init__(self, *, name_wait_ns: int = 0, past: Past | None = None) -> None:
        self._name_wait_ns = name_wait_ns
        self._started_ns: int | None = None
        self._actions: list[AgentAction] = []
        self._now_ns = 0
        self._generation = 0
        self._connected = False
        self._was_connected = False
        self._backoff_ns = BACKOFF_FIRST_NS
        self._refused_ns = REFUSED_FIRST_NS
        self._refusal: Refuse | None = None
        """What the syncer said before it closed the newest stream."""
        self._between_lives = False
        """A new life was granted, and the training thread has not begun it."""
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
        self._download_void = False
        """It was asked for by the life before."""
        self._download_after_ns = 0
        self._delivered: dict[int, Version] = {}
        self._places: list[int] = []
        if past is not None:
            self._generation = past.generation
            self._delivered = dict(past.held)
            self._places = list(past.places)
        self._spoken = False
        self._done = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            FromLearner: self._on_from_learner,
            LifeBegun: self._on_life_begun,
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
        return [Connect(self._generation, 0)]

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
        if self._generation not in (0, event.welcome.generation):
            if self._leave is not None:
                self._finish()
                return
            self._forget_life()
        self._generation = event.welcome.generation
        self._connected = self._was_connected = True
        self._refusal = None
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

    def _forget_life(self) -> None:
        """The syncer did not know it any more. What was announced is settled or unknown there; nothing goes again."""
        self._between_lives = True
        self._announced.clear()
        self._report = self._newest = self._declare = None
        self._delivered.clear()
        self._downloads.clear()
        self._download_void = self._download is not None
        self._uploads.clear()
        self._seed_offered = False
        if self._upload is not None:
            self._upload.wanted = False
            self._actions.append(StopUpload(self._upload.piece, self._upload.seq))

    def _on_life_begun(self, event: LifeBegun) -> None:
        if event.generation == self._generation:
            self._between_lives = False

    def _on_connection_lost(self, event: ConnectionLost) -> None:
        self._connected = False
        refusal, self._refusal = self._refusal, None
        delay_ns = self._backoff_ns
        if refusal is None:
            self._refused_ns = REFUSED_FIRST_NS
            self._backoff_ns = min(2 * self._backoff_ns, BACKOFF_LAST_NS)
            self._actions.append(ToLearner(StreamLost(event.reason)))
        elif self._generation:
            delay_ns = self._refused_ns
            self._refused_ns = min(2 * self._refused_ns, REFUSED_LAST_NS)
            self._actions.append(ToLearner(StreamLost(refusal.message, refusal.kind)))
        else:
            delay_ns = NAME_RETRY_NS
            self._actions.append(ToLearner(StreamLost(refusal.message, refusal.kind)))
        self._actions.append(Connect(self._generation, delay_ns))

    def _on_from_learner(self, event: FromLearner) -> None:
        message = event.message
        if self._between_lives:
            # Of the life before: its counters and names mean nothing in this one.
            if isinstance(message, Leave):
                self._finish()
            return
        if isinstance(message, Announce | Report):
            self._newest = message.counters
        if isinstance(message, Announce):
            self._announced[message.piece] = message
            again = not self._was_connected
            self._uploads.append(_Upload(message.piece, message.seq, message.size_bytes, again))
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
            steps = 0 if self._between_lives else event.steps
            self._actions.append(ToSyncer(Heartbeat(steps, event.waiting, event.progress_bytes)))

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
        """Before it had a life a refusal is an answer; after that only two kinds are (R28)."""
        assert self._started_ns is not None
        self._connected = False
        waits_for_name = refusal.kind == "name" and self._now_ns < self._started_ns + self._name_wait_ns
        final = refusal.kind in FINAL_REFUSALS if self._generation else not waits_for_name
        if final:
            self._actions.append(ToLearner(Heard(refusal, self._now_ns)))
            self._finish()
        else:
            self._refusal = refusal

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
            upload.again = True
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
        void, self._download_void = self._download_void, False
        if event.version is None or not event.hash_ok or void:
            self._places.append(event.place)
            self._download_after_ns = self._now_ns + BACKOFF_FIRST_NS
            return
        # A newer version that is wanted already goes to the end: on a thin downlink one piece would come for ever.
        wanted = self._downloads.pop(event.piece, None)
        if wanted is not None and wanted.version > event.version:
            self._downloads[event.piece] = wanted
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
        upload = self._upload
        self._actions.append(StartUpload(upload.piece, upload.seq, upload.size_bytes, upload.again))
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
