"""Messages between a learner and the syncer, as the core sees them. `wire/` turns them into bytes and back.

Names (protocol R13): a *life* is (learner name, generation); a restart is a new life. A *version* is (lineage, n).
A contribution is named by (life, piece, seq); seq grows over the life of a learner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from atoll.core.layout import TensorSpec

PROTOCOL_VERSION = 2


class Life(NamedTuple):
    """One life of a learner."""

    name: str
    generation: int

    def __str__(self) -> str:
        return f"{self.name}#{self.generation & 0xFFFFFFFF}"


class Version(NamedTuple):
    """(lineage, n): only grows; a new lineage wins at any n."""

    lineage: int
    n: int


@dataclass(frozen=True, slots=True)
class Counters:
    """Cumulative since the start of a life. Per piece: what the learner booked as overwritten and lost (R8)."""

    steps: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    """Sum of tokens * loss, so that differences of two reports give a mean loss."""
    overwritten: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """What `step()` cost the training thread since the start of a life; for the record, never for decisions."""

    blocked_ns: tuple[tuple[str, int], ...] = ()
    """(cause, ns) of R9's places: parameters, lock, finish; and the local copies, timed too: capture, take."""
    step_ns: int = 0
    """Time inside step() altogether, R9's waits excluded."""
    step_ns_max: int = 0
    """The longest single step(), R9's waits excluded."""
    gap_ns_max: int = 0
    """The longest time between the ends of two consecutive step() calls."""


# learner -> syncer


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a control stream. generation 0 asks for a new life; else the same life reconnects.

    A syncer that does not know that life (any more) answers with Welcome of a new one (R28).
    """

    protocol: int
    run_id: str
    """Empty: whichever run the syncer has."""
    name: str
    generation: int
    fingerprint: str
    tensors: tuple[TensorSpec, ...]
    extra: str = ""
    """What else must agree, in the user's words; part of the fingerprint."""


@dataclass(frozen=True, slots=True)
class Report:
    """Every s steps, and once with steps=0 when the first parameters are adopted (then the learner is ready)."""

    counters: Counters
    timings: Timings = Timings()
    sent_ns: int = 0
    """The agent's monotonic clock when it left; the syncer gives it back in Pace, so that the delay can be told."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life from the agent; it comes even while the training thread hangs."""

    steps: int
    """Own steps, read from shared memory."""
    waiting: bool
    """True while the training thread waits by R9 (such a learner counts as ready)."""
    progress_bytes: int = 0
    """Bulk bytes moved since the start of the life; progress counts as life."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Header of a contribution (R6): a delta for `piece`, to be merged in `slot` or never."""

    seq: int
    piece: int
    slot: int
    anchor: Version
    own_step: int
    c_steps: int
    c_tokens: int
    counters: Counters
    size_bytes: int
    final: bool = False
    """Of the last round (R22). A regular one may name the same slot where a stop made the run shorter."""


@dataclass(frozen=True, slots=True)
class Declare:
    """In the finish: all contributions of the last P slots are announced (R22)."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Goodbye. Nothing more comes from this life."""

    reason: str
    """finished | interrupted | diverged: ..."""
    counters: Counters
    timings: Timings


LearnerMessage = Hello | Report | Heartbeat | Announce | Declare | Leave


# syncer -> learner


@dataclass(frozen=True, slots=True)
class Merged:
    """The newest merged contribution of one life to one piece; seq 0: none yet."""

    generation: int = 0
    seq: int = 0


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to Hello: the life that was granted, the settings, and where the run stands."""

    generation: int
    epoch: int
    resumed: bool
    """True for the same life on a new stream."""
    settings: tuple[tuple[str, str | int | float], ...]
    slot: int
    """T: newest slot that has closed."""
    slot_interval_ns: int
    phase: str
    """waiting | running | draining | final | finished"""
    merged: tuple[Merged, ...]
    """Per piece, for this receiver (R6)."""
    constants: tuple[tuple[str, bytes], ...] = ()
    """Integer tensors of version 0 by name (R29), for a new life."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The learner may not join, or not stay.

    kind: run | protocol | layout | name | token | settings | finished | replaced (a newer life has its name) | put out
    (this life was ended; a new one may be asked for).
    """

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class SeedRequest:
    """This learner is named to hand in version 0 (R22)."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Slot `slot` has closed; the next one is expected `slot_interval_ns` later.

    `slack_ns`: how much longer its grace would have waited for one more learner.
    """

    slot: int
    slot_interval_ns: int
    slack_ns: int
    echo_ns: int = 0
    """`sent_ns` of the newest report of the receiver, and how long ago the syncer read it; 0: none yet."""
    echo_age_ns: int = 0


LATE_ANNOUNCEMENT, LATE_BYTES = "announcement", "bytes"


@dataclass(frozen=True, slots=True)
class Fate:
    """A contribution will not be merged. fate: missed | refused. (Merged is told by updates alone, R6.)"""

    piece: int
    seq: int
    slot: int
    fate: str
    reason: str
    late: str = ""
    """What came too late, for the learner's forecast: announcement | bytes; empty: neither."""


@dataclass(frozen=True, slots=True)
class UpdateReady:
    """A committed version of a piece can be fetched. `merged` is of that version, for this receiver."""

    piece: int
    version: Version
    slot: int
    """Newest slot of this piece that is settled; later ones than the version's own were empty."""
    size_bytes: int
    hash: str
    merged: Merged


@dataclass(frozen=True, slots=True)
class Finishing:
    """Slot N has closed: stop training at the next boundary and wait in the finish."""

    slot: int


@dataclass(frozen=True, slots=True)
class FinalRound:
    """All slots up to N are settled at `versions`: take them, then send what is left for slots N+1..N+P."""

    versions: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The run is over; `versions` are final."""

    versions: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class Replaced:
    """A newer life has this name now; the old one must end."""

    reason: str


SyncerMessage = (
    Welcome | Refuse | SeedRequest | Pace | Fate | UpdateReady | Finishing | FinalRound | Finished | Replaced
)
