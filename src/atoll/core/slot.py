"""One slot at the syncer (protocol R5): its states, what is known of it, and the lines that tell of it.

    open -> grace -> collecting -> waiting -> merging -> committing -> settled
                                       \\--------- empty ---------------/

`open` is implicit: it is the one slot above T. A slot of the finish (R22) begins in `final` and closes when all have
declared.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.core.contributions import Contribution
from atoll.core.events import Commit, MergeDone
from atoll.core.machine import Table
from atoll.core.messages import Version
from atoll.core.records import ClosedLine, Merge1, SlotLine

SLOT = Table(
    name="slot",
    initial="open",
    final=frozenset({"settled"}),
    rows={
        ("open", "quorum"): "grace",
        ("open", "final round"): "final",
        ("grace", "closed"): "collecting",
        ("final", "closed"): "collecting",
        ("collecting", "collected"): "waiting",
        ("waiting", "inputs"): "merging",
        ("waiting", "empty"): "settled",
        ("merging", "merged"): "committing",
        ("merging", "not finite"): "settled",
        ("committing", "committed"): "settled",
        ("committing", "failed"): "retrying",
        ("retrying", "retry"): "committing",
    },
)


@dataclass(slots=True)
class Slot:
    """One turn of the syncer that is not settled yet."""

    number: int
    piece: int
    state: str = SLOT.initial
    first_ns: int = 0
    quorum_ns: int = 0
    grace_ns: int = 0
    closed_ns: int = 0
    collected_ns: int = 0
    merge_started_ns: int = 0
    needed: int = 1
    participants: list[Contribution] = field(default_factory=list)
    inputs: list[Contribution] = field(default_factory=list)
    commit: Commit | None = None
    merge: MergeDone | None = None
    retry_at_ns: int = 0

    def move(self, cause: str) -> None:
        self.state = SLOT.move(self.state, cause)


def closed_line(slot: Slot, reason: str, ready: int, present: int) -> ClosedLine:
    """That it has just closed, and with whom."""
    waited_ns = slot.closed_ns - slot.quorum_ns
    participants = tuple((c.life.name, c.life.generation, c.announce.seq) for c in slot.participants)
    return ClosedLine(slot.closed_ns, slot.number, slot.piece, reason, waited_ns, ready, present, participants)


def slot_line(slot: Slot, before: Version, version: Version, now_ns: int) -> SlotLine:
    """What came of it. An empty slot, or one whose merge was dropped, leaves the version as it was."""
    done = slot.merge
    if done is None:
        collect_ns = slot.collected_ns - slot.closed_ns
        return SlotLine(now_ns, slot.number, slot.piece, before, version, (), "", "", "", 0.0, collect_ns, 0, None, 0.0)
    cosines = done.cosines or (None,) * len(slot.inputs)
    return SlotLine(
        now_ns,
        slot.number,
        slot.piece,
        before,
        version,
        tuple(_merge1(c, cosine) for c, cosine in zip(slot.inputs, cosines, strict=True)),
        done.theta_hash,
        done.momentum_hash,
        done.update_hash,
        done.delta_norm,
        slot.collected_ns - slot.closed_ns,
        now_ns - slot.merge_started_ns,
        done.follows,
        done.step_norm,
    )


def _merge1(c: Contribution, cosine: float | None) -> Merge1:
    return Merge1(
        c.life.name,
        c.life.generation,
        c.announce.seq,
        c.announce.anchor,
        c.announce.c_steps,
        c.announce.c_tokens,
        c.announce.own_step,
        c.weight,
        c.hash,
        c.norm,
        cosine,
    )
