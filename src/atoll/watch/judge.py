"""What is wrong with a run, and what to change: warnings of the live view, and `atoll advise`.

Each finding has the figure that it rests on. Thresholds are here, so that one can see and doubt them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from atoll.core.causes import larger_quorum, with_cause
from atoll.watch import troubles
from atoll.watch.tallies import OF_THE_END, LifeView
from atoll.watch.view import ENDED, RunView
from atoll.watch.window import Window, window

UNMERGED_ROUNDS = 3
ALONE_ROUNDS = 2
STARVED_SHARE = 0.5
KEPT_LEAST = 0.8
EFFECTIVE_MOST = 2.5
AGREEMENT_LEAST = 0.02
RDA_AGREEMENT_LEAST = 0.25
"""Below it the average was better than RDA in our trials with Muon, above it worse (docs/QUALITY.md)."""
FOLLOWS_MOST, FOLLOWS_LEAST = 0.75, -0.1
GRACE_MOST = 0.25
PARTICIPATION_LEAST = 0.8
SLOTS_LEAST = 8
"""Fewer settled slots say nothing."""

SILENT_S = 10.0
SILENT_REPORTS = 4
"""So many reports of the slowest learner are missing."""
PAST = "left"
"""The kind of a finding that no setting could have changed."""
NOTHING_CAME = "nothing of it was announced: a step of it may take longer than a round; raise `interval`"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to change."""

    kind: str
    text: str
    """What is seen, the figure behind it, what to change."""


def findings(view: RunView) -> list[Finding]:
    """What there is to say now, worst first."""
    if view.config is None:
        return []
    if view.settled_slots < SLOTS_LEAST:
        return [*_silent(view), *_troubles(view)]
    recent = window(view)
    of_learners = [*_silent(view), *_troubles(view), *_alone(view), *_unmerged(view)]
    return [*of_learners, *_starved(view), *_waste(view, recent), *_outer(view, recent)]


def advice(view: RunView) -> list[Finding]:
    """For a run as a whole: at most three; one of them says so where no setting is to be changed."""
    found = findings(view)
    if view.config is not None and view.settled_slots >= SLOTS_LEAST:
        found += _directions(view, window(view, view.settled_slots))
    if not found and view.settled_slots < SLOTS_LEAST:
        return [Finding("early", f"only {view.settled_slots} slots are settled; {SLOTS_LEAST} are needed to judge")]
    if all(finding.kind == PAST for finding in found) and view.settled_slots >= SLOTS_LEAST:
        return [*found[:2], Finding("good", _all_is_well(view))]
    return found[:3]


def _all_is_well(view: RunView) -> str:
    recent, whole = window(view), window(view, view.settled_slots)  # each figure where `advice` has judged it
    figures = (
        ("participation", recent.participation, f"good from {PARTICIPATION_LEAST:g} on"),
        ("share of work merged of late", recent.kept, f"good from {KEPT_LEAST:g} on"),
        ("outer step over merged delta", recent.effective_step, f"good up to {EFFECTIVE_MOST:g}"),
        ("agreement of learners", whole.agreement, f"good from {AGREEMENT_LEAST:g} on"),
    )
    said = ", ".join(f"{name} {value:.2f} ({limit})" for name, value, limit in figures if value is not None)
    return f"no setting to change: {said}"


def _silent(view: RunView) -> Iterator[Finding]:
    """Learners step, and the tape of a syncer that is there does not grow."""
    if view.phase in ENDED or view.config is None or not view.ready():
        return
    step_ns = max((life.step_ns for life in view.lives.values() if life.state == "ready"), default=0.0)
    report_s = view.config.slot_steps * step_ns / 1e9
    if view.silent_s > max(SILENT_S, 2 * view.config.lease_interval_ns / 1e9, SILENT_REPORTS * report_s):
        yield Finding(
            "silent",
            f"the run's tape has not grown for {view.silent_s:.0f} s, though its syncer is there: all figures are as "
            "of then; its disk may be full or gone, which its own output says",
        )


def _troubles(view: RunView) -> Iterator[Finding]:
    """Of single learners."""
    for kind, told in (
        ("refused", troubles.refused),
        ("units", troubles.other_units),
        ("missed round", troubles.missed),
        (PAST, troubles.left),
    ):
        yield from (Finding(kind, text) for text in troubles.first_ones(told(view)))


def _alone(view: RunView) -> Iterator[Finding]:
    """The same single learner fills slot after slot."""
    rows = window(view, ALONE_ROUNDS * view.pieces).rows
    names = {part.name for row in rows for part in row.merged}
    shared = [row for row in rows if row.ready > 1]
    if len(names) == 1 and len(shared) == len(rows) >= ALONE_ROUNDS * view.pieces:
        name = names.pop()
        others = [other for other in view.ready() if other != name]
        yield Finding(
            "alone",
            f"only {name} is merged in the last {len(rows)} slots, with {rows[-1].ready} ready; "
            f"{reason_of(view, *others)}",
        )


def _unmerged(view: RunView) -> Iterator[Finding]:
    """Ready, and not merged for long."""
    for name, life in ready_lives(view):
        rounds = unmerged_slots(view, life) / view.pieces
        if rounds >= UNMERGED_ROUNDS:
            yield Finding("unmerged", f"{name} was not merged for {rounds:.0f} rounds; {reason_of(view, name)}")


def unmerged_slots(view: RunView, life: LifeView) -> int:
    """Slots since its last merge, or since it became ready."""
    return max(0, view.slots_closed - max(life.last_merged, life.ready_since))


def ready_lives(view: RunView) -> list[tuple[str, LifeView]]:
    """By name."""
    return sorted((name, life) for (name, _), life in view.lives.items() if life.state == "ready")


def reason_of(view: RunView, *names: str) -> str:
    """The commonest reason why work of these was not merged, as a remedy."""
    reasons: Counter[str] = Counter()
    for (name, _, _, reason), number in view.history.fates.items():
        if name in names and reason != OF_THE_END:
            reasons[reason] += number
    for reason, _ in reasons.most_common(1):
        return f"mostly because {with_cause(reason)}"
    return NOTHING_CAME


def _starved(view: RunView) -> Iterator[Finding]:
    """A fragment that gets much less than the others."""
    whole = view.participation.mean
    for piece, share in sorted(view.by_piece.items()):
        if whole and share.mean is not None and share.slots >= UNMERGED_ROUNDS and share.mean < STARVED_SHARE * whole:
            reasons = Counter(
                {reason: n for (_, p, _, reason), n in view.history.fates.items() if p == piece}
            ).most_common(1)
            why = f"mostly because {with_cause(reasons[0][0])}" if reasons else "nothing of it was announced"
            yield Finding(
                "starved", f"fragment {piece} has a participation of {share.mean:.2f}, all together {whole:.2f}; {why}"
            )


def _waste(view: RunView, recent: Window) -> Iterator[Finding]:
    """Work that is not merged, and time that is waited."""
    assert view.config is not None
    config = view.config
    if recent.kept is not None and recent.kept < KEPT_LEAST:
        yield Finding(
            "yield",
            f"only {recent.kept:.0%} of what was computed in the last {len(recent.rows)} slots was merged; "
            f"{reason_of(view, *{name for name, *_ in view.history.fates})}",
        )
    elif recent.participation is not None and recent.participation < PARTICIPATION_LEAST and not config.locked:
        wider = larger_quorum(config, config.quorum_of(max(1, recent.rows[-1].ready)))
        yield Finding(
            "participation",
            f"{recent.participation:.0%} of the ready learners take part in a slot; the others come in a later one "
            f"with more steps, and nothing is lost. If they should come together, begin the next run with {wider}",
        )
    if recent.grace_ns is not None and recent.slot_ns and recent.grace_ns > GRACE_MOST * recent.slot_ns:
        yield Finding(
            "grace",
            f"slots wait {recent.grace_ns / 1e6:.0f} of {recent.slot_ns / 1e6:.0f} ms for slower learners; nobody "
            "trains less for it, but updates come later. Lower `overlap` if that matters",
        )


def _outer(view: RunView, recent: Window) -> Iterator[Finding]:
    """The outer step is larger than what learners found."""
    assert view.config is not None
    if recent.effective_step is not None and recent.effective_step > EFFECTIVE_MOST:
        lr, momentum = view.config.outer_lr, view.config.outer_momentum
        yield Finding(
            "outer step",
            f"the outer step is {recent.effective_step:.1f} times the merged delta (outer_lr {lr:g}, outer_momentum "
            f"{momentum:g}); above {EFFECTIVE_MOST:g} runs have lost quality: lower `outer_momentum`",
        )


def _directions(view: RunView, whole: Window) -> Iterator[Finding]:
    """Where merged deltas point."""
    assert view.config is not None
    if whole.agreement is not None and whole.agreement < AGREEMENT_LEAST:
        yield Finding(
            "agreement",
            f"contributions of two learners to one slot have a cosine of {whole.agreement:.2f}: they hardly agree, and "
            "their mean is mostly noise. A smaller `interval`, a lower learning rate or larger batches help",
        )
    elif whole.agreement is not None and view.config.merge == "rda" and whole.agreement < RDA_AGREEMENT_LEAST:
        yield Finding(
            "rda",
            f"contributions of two learners to one slot have a cosine of {whole.agreement:.2f}; RDA keeps their full "
            f"length, and below {RDA_AGREEMENT_LEAST:g} much of it is noise. Where they train with Muon, `merge` "
            "average was 1 to 5% better there; with AdamW it was 1% worse",
        )
    if whole.follows is not None and whole.follows > FOLLOWS_MOST:
        yield Finding(
            "slow outer",
            f"merged deltas have a cosine of {whole.follows:.2f} with the momentum before them: they keep their "
            "direction, and a larger `outer_lr` would get further",
        )
    if whole.follows is not None and whole.follows < FOLLOWS_LEAST:
        yield Finding(
            "overshoot",
            f"merged deltas have a cosine of {whole.follows:.2f} with the momentum before them: the outer step goes "
            "too far and is taken back; lower `outer_momentum`, then `outer_lr`",
        )
