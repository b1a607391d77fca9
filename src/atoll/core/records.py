"""Lines of the tape: every choice that timing made, and what a person needs to judge the run. Schema version 1.

Evolution: fields are only added, with defaults; a kind is never given another meaning; readers skip unknown kinds and
fields. Times are `now_ns` of the syncer's monotonic clock. The tape driver adds `i` (line number, no gaps) and `kind`
(the class name in lower case). docs/TAPE.md lists all kinds; a test keeps it complete.
"""

from __future__ import annotations

from dataclasses import dataclass

TAPE_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class RunLine:
    """First line of a run."""

    schema: int
    now_ns: int
    wall_time: str
    """For people only; UTC, ISO 8601. Filled in by the driver."""
    settings: dict[str, str | int | float]
    fingerprint: str
    piece_sizes: tuple[int, ...]
    """Trained values per piece."""
    versions: dict[str, str]
    """Of Atoll, torch, Python. Filled in by the driver."""
    layout: tuple[tuple[tuple[str, int, bool], ...], ...]
    """Per piece, its tensors in order: (name, values, averaged)."""
    buffer_sizes: tuple[int, ...] = ()
    """Per piece, how many values at its end are buffers (R29); empty: none anywhere."""


@dataclass(frozen=True, slots=True)
class EpochLine:
    """A syncer began: epoch number and its random holder (R13)."""

    now_ns: int
    epoch: int
    holder: str


@dataclass(frozen=True, slots=True)
class GrantLine:
    """A generation was granted; synced before it is sent (R11)."""

    now_ns: int
    name: str
    generation: int


@dataclass(frozen=True, slots=True)
class MemberLine:
    """A learner's life changed state (R10)."""

    now_ns: int
    name: str
    generation: int
    before: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class SeedLine:
    """Version 0 is committed. source: a learner's name, or `file`."""

    now_ns: int
    source: str
    update_hashes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartLine:
    """Slots begin (R22): the ready learners."""

    now_ns: int
    ready: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class ReportLine:
    """A learner's cumulative counters were heard (R2), with the clock that the syncer gave it."""

    now_ns: int
    name: str
    generation: int
    steps: int
    tokens: int
    loss_sum: float
    clock: int


@dataclass(frozen=True, slots=True)
class QuorumLine:
    """Slot reached its quorum: T is now `slot` (R2)."""

    now_ns: int
    slot: int
    needed: int
    ready: int
    first_ns: int
    """When the first clock reached slot * s."""
    grace_ns: int
    step_ns: int
    """The K-th fastest ready learner's step, moving average."""
    quorum_wait_ns: int
    """xi_quorum, moving average."""
    sync_ns: int
    """xi_sync, moving average."""


@dataclass(frozen=True, slots=True)
class ClosedLine:
    """Slot closed: its participants are final (R5). `waited_ns` is the grace that was spent."""

    now_ns: int
    slot: int
    piece: int
    reason: str
    waited_ns: int
    ready: int
    live: int
    participants: tuple[tuple[str, int, int], ...]
    """(name, generation, seq)"""


@dataclass(frozen=True, slots=True)
class Merge1:
    """One merged contribution of a slot."""

    name: str
    generation: int
    seq: int
    anchor: tuple[int, int]
    c_steps: int
    c_tokens: int
    own_step: int
    weight: float
    hash: str
    norm: float
    cosine: float | None = None
    """With the merged delta."""


@dataclass(frozen=True, slots=True)
class SlotLine:
    """Slot is settled; synced before its commit (R11). `merged` empty: nothing changed, no version was made."""

    now_ns: int
    slot: int
    piece: int
    base: tuple[int, int]
    version: tuple[int, int]
    merged: tuple[Merge1, ...]
    theta_hash: str
    momentum_hash: str
    update_hash: str
    delta_norm: float
    collect_ns: int
    """From closed to the end of collecting."""
    merge_ns: int
    follows: float | None = None
    """Cosine of the merged delta with the momentum before it."""
    step_norm: float = 0.0
    """|Theta' - Theta|; over delta_norm it is the effective outer step."""


@dataclass(frozen=True, slots=True)
class PublishedLine:
    """Slot is committed and its update may leave."""

    now_ns: int
    slot: int
    piece: int
    version: tuple[int, int]


@dataclass(frozen=True, slots=True)
class FateLine:
    """A contribution was not merged. fate: missed | refused."""

    now_ns: int
    slot: int
    piece: int
    name: str
    generation: int
    seq: int
    c_tokens: int
    fate: str
    reason: str


@dataclass(frozen=True, slots=True)
class PhaseLine:
    """The run as a whole: waiting | running | draining | final | finished."""

    now_ns: int
    phase: str
    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class LifeEndLine:
    """The books of a life are closed (R8). Per piece token counts: computed = merged + overwritten + lost."""

    now_ns: int
    name: str
    generation: int
    reason: str
    steps: int
    tokens: int
    loss_sum: float
    merged: tuple[int, ...]
    overwritten: tuple[int, ...]
    lost: tuple[int, ...]
    blocked_ns: tuple[tuple[str, int], ...]
    step_ns: int
    step_ns_max: int
    gap_ns_max: int


@dataclass(frozen=True, slots=True)
class OversleptLine:
    """The syncer itself stood still: leases go on, steps reported soon after count for no slot (R2)."""

    now_ns: int
    gap_ns: int


@dataclass(frozen=True, slots=True)
class NoticeLine:
    """A warning that was shown to people."""

    now_ns: int
    text: str


Record = (
    RunLine
    | EpochLine
    | GrantLine
    | MemberLine
    | SeedLine
    | StartLine
    | ReportLine
    | QuorumLine
    | ClosedLine
    | SlotLine
    | PublishedLine
    | FateLine
    | PhaseLine
    | LifeEndLine
    | OversleptLine
    | NoticeLine
)
