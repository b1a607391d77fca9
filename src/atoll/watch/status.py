"""A run at one moment, as figures and words. `atoll status`, the live view and --json render it."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.causes import FIRST_AWAITED
from atoll.watch.history import PRESENT, SlotRow
from atoll.watch.judge import findings, unmerged_slots
from atoll.watch.summary import ratio, report_span_s, seconds
from atoll.watch.tallies import LifeView
from atoll.watch.view import BROKEN_OFF, ENDED, RunView
from atoll.watch.window import mean, newest, window

UNKNOWN = "unknown"
"""State of a learner that nobody watches any more."""
OPEN_MOST = 3
"""So many slots that are closed and not settled are told."""


@dataclass(frozen=True, slots=True)
class LearnerStatus:
    """The newest life of one learner. Its speed is the last one known, of a run that has ended too."""

    name: str
    state: str
    reason: str
    since_s: float
    lives: int
    steps: int
    step_s: float | None
    tokens_per_s: float | None
    lag_slots: int | None
    """Slots since it was last merged; None where it is not ready."""
    merged: float | None
    """Share of the slots at whose closing it was ready."""
    last_fate: str


@dataclass(frozen=True, slots=True)
class Status:
    """All of it. Times in seconds."""

    run_id: str
    mode: str
    phase: str
    slot: int
    slots: int
    progress: float
    elapsed_s: float
    left_s: float | None
    tokens: int
    tokens_per_s: float | None
    """Of those that are ready; of a run that has ended, the mean."""
    loss: float | None
    """Training loss of the newest tenth."""
    kept: float | None
    """Merged so far of what was computed so far, token-pieces."""
    participation: float | None
    learners: list[LearnerStatus]
    slots_now: list[str]
    """The slot in progress and those that are being merged, in words."""
    warnings: list[str]


def status(view: RunView) -> Status:
    """As of the newest line that the view was fed."""
    config = view.config
    slots = config.slots if config else 0
    computed = view.tokens * view.pieces
    learners = [_learner(view, name) for name in sorted({name for name, _ in view.lives})]
    return Status(
        view.run_id,
        view.mode,
        view.phase,
        view.slots_closed,
        slots,
        view.slots_closed / slots if slots else 0.0,
        seconds(view.first_ns, view.last_ns),
        _left_s(view, slots),
        view.tokens,
        _tokens_per_s(view, learners),
        view.recent.mean,
        min(1.0, view.merged_pieces / computed) if computed else None,
        view.participation.mean,
        learners,
        slots_now(view),
        [finding.text for finding in findings(view)],
    )


def _tokens_per_s(view: RunView, learners: list[LearnerStatus]) -> float | None:
    if view.phase in ENDED:
        return ratio(view.tokens, report_span_s(view))
    rates = [row.tokens_per_s for row in learners if row.state == "ready" and row.tokens_per_s]
    return sum(rates) if rates else None


def _left_s(view: RunView, slots: int) -> float | None:
    """At the pace of the newest slots."""
    slot_ns = window(view).slot_ns
    if slot_ns is None or view.phase != "running":
        return None
    return max(0, slots - view.slots_closed) * slot_ns / 1e9


def _learner(view: RunView, name: str) -> LearnerStatus:
    lives = sorted(key for key in view.lives if key[0] == name)
    life = view.lives[lives[-1]]
    spans = view.history.spans.get(name, [])
    since_ns = spans[-1].start_ns if spans else view.last_ns or 0
    share = view.by_learner.get(name)
    stepping = life.state in PRESENT or view.phase in ENDED
    # Nobody has watched the learners since their syncer is gone.
    state = UNKNOWN if view.phase == BROKEN_OFF and life.state in PRESENT else life.state
    return LearnerStatus(
        name,
        state,
        spans[-1].reason if spans else "",
        seconds(since_ns, view.last_ns),
        len(lives),
        sum(view.lives[key].steps for key in lives),
        life.step_ns / 1e9 if life.step_ns and stepping else None,
        life.tokens_per_s if life.step_ns and stepping else None,
        unmerged_slots(view, life) if state == "ready" else None,
        share.mean if share is not None else None,
        life.last_fate,
    )


# ------------------------------------------------------------ slots in words


def slots_now(view: RunView) -> list[str]:
    """What is waited for, and why."""
    if view.phase == "waiting" and view.config is not None and not view.seeded:
        return [_seeding(view)]
    if view.phase == "waiting":
        missing = view.config.learners - len(view.ready()) if view.config else 0
        return [f"slots begin when {missing} more learners are ready"] if missing > 0 else []
    if view.phase != "running":
        return [f"the run is {view.phase}: {view.end_reason}" if view.end_reason else f"the run is {view.phase}"]
    assert view.config is not None
    said = [_collecting(view.history.slots[slot]) for slot in view.unsettled()[-OPEN_MOST:]]
    current = view.history.slots.get(view.reached)
    if current is not None and not current.closed_ns:
        said.append(_grace(current))
    elif view.reached < view.config.slots:
        said.append(_open(view, view.reached + 1))
    return said


def _seeding(view: RunView) -> str:
    """Who is to hand in version 0, as far as the tape tells."""
    told = [text for _, text in view.history.notices if text.startswith(FIRST_AWAITED)]
    if told:
        return told[-1]
    over = {key for key, life in view.lives.items() if life.state not in PRESENT}
    there = sorted(name for name, _ in view.granted - over)
    if not there:
        return "the first parameters of the model are awaited: no learner is there"
    names = ", ".join(there[:OPEN_MOST]) + (f" and {len(there) - OPEN_MOST} more" if len(there) > OPEN_MOST else "")
    return f"the first parameters of the model are awaited from {'' if len(there) == 1 else 'one of '}{names}"


def _collecting(row: SlotRow) -> str:
    who = " ".join(row.participants) or "nobody"
    return f"slot {row.slot} (fragment {row.piece}) is closed: bytes of {who} are collected and merged"


def _grace(row: SlotRow) -> str:
    return (
        f"slot {row.slot} (fragment {row.piece}) has its quorum of {row.needed} and waits up to "
        f"{row.grace_ns / 1e6:.0f} ms for the other {max(0, row.ready - row.needed)}"
    )


def _open(view: RunView, slot: int) -> str:
    """Which clocks the quorum lacks (R2)."""
    assert view.config is not None
    goal = slot * view.config.slot_steps
    ready: list[tuple[str, LifeView]] = [(n, life) for (n, _), life in view.lives.items() if life.state == "ready"]
    there = sorted(name for name, life in ready if life.clock >= goal)
    if not ready:
        return f"slot {slot} waits for a learner: none is ready"
    behind = ", ".join(f"{name} {goal - life.clock}" for name, life in sorted(ready) if life.clock < goal)
    name = f"slot {slot} (fragment {view.config.piece_of(slot)})"
    return f"{name} is open: {len(there)} of {len(ready)} there; steps to go: {behind or 'none'}"


def recent_waits(view: RunView) -> str:
    """Mean waits of the newest slots, in ms."""
    rows = newest(view, 2 * view.pieces)
    figures = {
        "quorum": mean([row.quorum_wait_ns for row in rows]),
        "grace": mean([row.waited_ns for row in rows]),
        "collect": mean([row.collect_ns for row in rows]),
        "merge": mean([row.merge_ns for row in rows]),
    }
    return ", ".join(f"{name} {value / 1e6:.0f} ms" for name, value in figures.items() if value is not None)
