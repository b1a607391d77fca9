"""What goes into the state machines (events) and what comes out (actions).

Drivers own time, bytes and chance (protocol R23): each event is handed to `machine.handle(event, now_ns=...)` with a
monotonic clock in integer nanoseconds; the machine answers with actions, which the driver carries out in order.
Tensors never appear here, only handles: piece, version, seq, size, hash.

Three machines use this file:

* `core.syncer.Syncer`    in the syncer process
* `core.agent.Agent`      in the small process beside each learner: heartbeats, reconnects, the two bulk queues
* `core.learner.Learner`  in the training thread, at step boundaries
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.messages import Announce, Counters, Life, Merged, SyncerMessage, Timings, Version
from atoll.core.messages import Hello as HelloMessage
from atoll.core.records import Record

# ---------------------------------------------------------------- syncer: events


@dataclass(frozen=True, slots=True)
class Started:
    """First event. `epoch` was taken by exclusive create; `has_init`: version 0 comes from a file (R22)."""

    epoch: int
    has_init: bool


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """A control stream began with Hello. `stream` names the connection; it is never used twice."""

    stream: int
    hello: HelloMessage


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """The control stream ended, for whatever reason."""

    stream: int


@dataclass(frozen=True, slots=True)
class Received:
    """A message other than Hello on a stream."""

    stream: int
    message: object


@dataclass(frozen=True, slots=True)
class BulkProgress:
    """Bytes of a bulk transfer of this life moved: a sign of life."""

    life: Life


@dataclass(frozen=True, slots=True)
class ContributionArrived:
    """All bytes are in, the seal was compared and the payload decoded. `norm` is |Delta| (fp64), if finite."""

    life: Life
    piece: int
    seq: int
    hash: str
    hash_ok: bool
    finite: bool
    norm: float


@dataclass(frozen=True, slots=True)
class SeedArrived:
    """One piece of version 0 is in, from the named learner or from the file (life None)."""

    life: Life | None
    piece: int
    hash_ok: bool
    finite: bool


@dataclass(frozen=True, slots=True)
class MergeDone:
    """The new Theta and momentum exist in memory. Hashes: fp32 theta, fp32 momentum, encoded update."""

    slot: int
    finite: bool
    theta_hash: str
    momentum_hash: str
    update_hash: str
    update_bytes: int
    delta_norm: float
    cosines: tuple[float | None, ...] = ()
    """Of each input with the merged delta, in order. For people, as are the next two."""
    follows: float | None = None
    """Cosine of the merged delta with the momentum before it; None where there was none."""
    step_norm: float = 0.0
    """How far Theta went."""


@dataclass(frozen=True, slots=True)
class CommitDone:
    """Tape line, then commit file, are synced to disk."""

    slot: int


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """The disk did not take the commit; the machine tries again later."""

    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class SeedCommitted:
    """Version 0 of every piece is on disk. Per piece: hash and size of the encoded update."""

    update_hashes: tuple[str, ...]
    update_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wake:
    """The time asked for by SetTimer has come. Spurious ones are harmless."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Ctrl-C or SIGTERM: end the run early but cleanly, as if the slot in progress were the last."""


@dataclass(frozen=True, slots=True)
class Overslept:
    """The syncer itself stood still for so long (a suspended machine, a stopped process): the silence was its own."""

    gap_ns: int


SyncerEvent = (
    Started
    | StreamOpened
    | StreamClosed
    | Received
    | BulkProgress
    | ContributionArrived
    | SeedArrived
    | MergeDone
    | CommitDone
    | CommitFailed
    | SeedCommitted
    | Wake
    | StopRequested
    | Overslept
)

# ---------------------------------------------------------------- syncer: actions


@dataclass(frozen=True, slots=True)
class Send:
    """Put a message on a control stream; drop it silently if the stream is gone."""

    stream: int
    message: SyncerMessage


@dataclass(frozen=True, slots=True)
class CloseStream:
    """End a stream after what was sent."""

    stream: int


@dataclass(frozen=True, slots=True)
class Write:
    """Append a line to the tape. `sync`: it is on disk before the next action of this list (R11)."""

    record: Record
    sync: bool = False


@dataclass(frozen=True, slots=True)
class Input:
    """One contribution of a merge."""

    life: Life
    seq: int
    weight: float


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge `inputs` (in id order) into `piece` at version `base` and do the outer step; answer MergeDone."""

    slot: int
    piece: int
    base: Version
    version: Version
    inputs: tuple[Input, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Write the tape line (synced), then the commit file (synced); answer CommitDone or CommitFailed."""

    slot: int
    piece: int
    version: Version
    record: Record
    newest_merged: tuple[tuple[Life, int], ...]
    """Newest merged seq of this piece per life, for the commit record (R11)."""


@dataclass(frozen=True, slots=True)
class CommitSeed:
    """All pieces of version 0 are in: commit them; answer SeedCommitted."""


@dataclass(frozen=True, slots=True)
class DropSeed:
    """Forget the pieces of version 0 received so far: their learner went before it was whole."""


@dataclass(frozen=True, slots=True)
class Publish:
    """From now on downloads of `piece` serve `version` (committed)."""

    piece: int
    version: Version


@dataclass(frozen=True, slots=True)
class Accept:
    """Expect the upload of this contribution: size known, life known. Uploads of anything else are refused."""

    life: Life
    announce: Announce


@dataclass(frozen=True, slots=True)
class Discard:
    """Free the bytes of a contribution, whole or partial; a running upload of it ends."""

    life: Life
    piece: int
    seq: int


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send Wake at this time; replaces an earlier wish."""

    at_ns: int


@dataclass(frozen=True, slots=True)
class Notice:
    """A line for people (stderr and log)."""

    text: str


@dataclass(frozen=True, slots=True)
class RunOver:
    """All is written and everyone was told: write model/ and end."""


SyncerAction = (
    Send
    | CloseStream
    | Write
    | Merge
    | Commit
    | CommitSeed
    | DropSeed
    | Publish
    | Accept
    | Discard
    | SetTimer
    | Notice
    | RunOver
)

# ---------------------------------------------------------------- learner: events (training thread)


@dataclass(frozen=True, slots=True)
class Heard:
    """The agent passes on a message of the syncer (Welcome also after a reconnect).

    `at_ns`: when the agent got it, by the monotonic clock that both share; the training thread reads it later.
    """

    message: SyncerMessage
    at_ns: int


@dataclass(frozen=True, slots=True)
class StreamLost:
    """The agent lost the syncer, or tried in vain to reach it; it keeps trying. The learner trains on (R9, R28)."""

    reason: str = ""
    refusal: str = ""
    """Kind of Refuse, where a syncer answers and will not have this life; empty: nobody answers."""
    of_agent: bool = False
    """It is the agent that is gone; of the syncer nothing is known."""


@dataclass(frozen=True, slots=True)
class AgentRestarted:
    """The agent ended and a new one of the same life has begun: tell it what it must tell the syncer (R28)."""


@dataclass(frozen=True, slots=True)
class UpdateArrived:
    """The bytes of an update are staged in shared memory at `place`, hash verified."""

    piece: int
    version: Version
    slot: int
    place: int
    merged: Merged


@dataclass(frozen=True, slots=True)
class UploadDone:
    """An upload ended. `whole`: the syncer holds all its bytes; else it was stopped. Both tell the link's rate."""

    piece: int
    seq: int
    moved_bytes: int
    duration_ns: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Stepped:
    """One inner step is done: the boundary at which the learner decides."""

    tokens: int
    loss: float


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The user's script ends early (Ctrl-C, exception, non-finite loss)."""

    reason: str


LearnerEvent = Heard | StreamLost | AgentRestarted | UpdateArrived | UploadDone | Stepped | Interrupted | Wake
"""Wake: while the training thread waits, the driver sends one at least every 250 ms."""

# ---------------------------------------------------------------- learner: actions


@dataclass(frozen=True, slots=True)
class Capture:
    """Encode r = theta - A of `piece` into its upload buffer, then hand Announce to the agent, in this order."""

    announce: Announce


@dataclass(frozen=True, slots=True)
class CaptureSeed:
    """Encode theta of every piece into the upload buffers and hand them to the agent as version 0."""


@dataclass(frozen=True, slots=True)
class Take:
    """Take the staged update into the model (R7), keep it as the anchor, free `place`.

    how: adopt (first parameters) | overwrite | rebase. `subtract_sent`: the update contains what the upload buffer of
    this piece holds (rebase: r -= sent).
    """

    piece: int
    version: Version
    place: int
    how: str
    subtract_sent: bool


@dataclass(frozen=True, slots=True)
class Revert:
    """theta = A, r = 0: a contribution of this piece was refused, or the run is over."""

    piece: int


@dataclass(frozen=True, slots=True)
class Free:
    """A staged update is not wanted (not newer than the anchor): free its place."""

    place: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Hand a message for the syncer to the agent. The driver fills in timings."""

    message: Announce | object


@dataclass(frozen=True, slots=True)
class End:
    """The learner's part is over. ok False: `reason` is an error for the user.

    kind: finished | left | run over (it ended while this learner was cut off) | put out (a newer life has its name) |
    syncer lost.
    """

    ok: bool
    reason: str
    kind: str


LearnerAction = Capture | CaptureSeed | Take | Revert | Free | Tell | End

# ---------------------------------------------------------------- agent: events


@dataclass(frozen=True, slots=True)
class FromLearner:
    """The training thread hands over a message for the syncer (Report, Announce, Declare, Leave)."""

    message: object


@dataclass(frozen=True, slots=True)
class Past:
    """What the new agent of a life that goes on must know from its start (R28)."""

    generation: int
    held: tuple[tuple[int, Version], ...]
    """(piece, version) that the learner holds or has staged: older ones are not fetched."""
    places: tuple[int, ...]
    """Free staging places."""


@dataclass(frozen=True, slots=True)
class LifeBegun:
    """The training thread has begun the life that the newest Welcome granted; what it said before was another's."""

    generation: int


@dataclass(frozen=True, slots=True)
class SeedOffered:
    """The upload buffers hold version 0; per piece its size."""

    sizes_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlaceFreed:
    """The training thread gave a staging place back."""

    place: int


@dataclass(frozen=True, slots=True)
class Connected:
    """The control stream is up and Welcome came."""

    welcome: SyncerMessage


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The control stream ended or could not be opened."""

    reason: str


@dataclass(frozen=True, slots=True)
class FromSyncer:
    """A message of the syncer other than Welcome."""

    message: SyncerMessage


@dataclass(frozen=True, slots=True)
class UploadEnded:
    """An upload finished (ok), was not wanted by the syncer (unwanted), or broke off (broken: it is tried again).

    `moved_bytes` in `duration_ns` tell the rate of the link, whatever the result.
    """

    piece: int
    seq: int
    result: str
    moved_bytes: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class DownloadEnded:
    """A download finished; or broke off (version None: tried again).

    The syncer serves its newest version, which may be newer than what was asked for; slot, version and merged are as
    its header said. hash_ok False: the bytes do not match the header; it is tried again.
    """

    piece: int
    place: int
    version: Version | None
    slot: int
    merged: Merged
    hash_ok: bool


@dataclass(frozen=True, slots=True)
class Beat:
    """Time for a heartbeat: what shared memory says."""

    steps: int
    waiting: bool
    progress_bytes: int


AgentEvent = (
    FromLearner
    | LifeBegun
    | SeedOffered
    | PlaceFreed
    | Connected
    | ConnectionLost
    | FromSyncer
    | UploadEnded
    | DownloadEnded
    | Beat
    | Wake
)

# ---------------------------------------------------------------- agent: actions


@dataclass(frozen=True, slots=True)
class ToSyncer:
    """Put a message on the control stream."""

    message: object


@dataclass(frozen=True, slots=True)
class ToLearner:
    """Put an event in the training thread's queue."""

    event: LearnerEvent


@dataclass(frozen=True, slots=True)
class Connect:
    """Open the control stream with Hello of this generation (0: a new life) after `delay_ns` at most.

    The driver draws from half of it to all of it, so that learners that lost one syncer do not come back as one.

    Then comes Connected and some day ConnectionLost; or ConnectionLost alone; or FromSyncer(Refuse) and then
    ConnectionLost, since the syncer closes the stream.
    """

    generation: int
    delay_ns: int


@dataclass(frozen=True, slots=True)
class StartUpload:
    """Send the upload buffer of `piece` (seq 0: version 0); answer UploadEnded. One runs at a time."""

    piece: int
    seq: int
    size_bytes: int
    again: bool = False
    """It was tried before, by this agent or the one before it: ask the syncer first what it has."""


@dataclass(frozen=True, slots=True)
class StopUpload:
    """The running upload is no longer wanted; UploadEnded follows with result unwanted."""

    piece: int
    seq: int


@dataclass(frozen=True, slots=True)
class StartDownload:
    """Fetch the newest version of `piece`, at least `version`, into `place`; answer DownloadEnded. One at a time."""

    piece: int
    version: Version
    place: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class AgentDone:
    """Leave was delivered, or cannot be: end the process."""


AgentAction = (
    ToSyncer | ToLearner | Connect | StartUpload | StopUpload | StartDownload | SetTimer | AgentDone
)

__all__ = [name for name in dict(globals()) if name[:1].isupper()] + ["Counters", "Timings"]
