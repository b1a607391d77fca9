"""What happened in a run, in plain words: one headline, one sentence per learner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from atoll.core.causes import with_cause
from atoll.watch.history import GOOD_ENDS, LONG_RUN_NS, Absence
from atoll.watch.lines import count
from atoll.watch.summary import piece_books, weighted, weighted_tokens
from atoll.watch.view import BROKEN_OFF, ENDED, RunView

TOLD_MOST = 3
"""Absences of one learner that are told one by one."""
NAMED_MOST = 5
"""Learners of a kind that the headline names."""
STANDSTILL_S = 5.0
"""Less without a step is not worth a word."""
LATE_S = 2.0
"""After the first slot began: later than that is late."""
SLOW_TIMES = 1.5
SPEED_STEPS = 5
"""Steps before a learner has a speed."""


@dataclass(frozen=True, slots=True)
class Story:
    """For people."""

    headline: str
    learners: list[str]


def duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `4 min 05 s`, `3 h 20 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def story(view: RunView, eval_loss: float | None = None) -> Story:
    """Of a run that is over, or of one that goes on."""
    slow, names = slow_learners(view), sorted({name for name, _ in view.lives})
    return Story(_headline(view, eval_loss, slow), [_learner(view, name, slow.get(name)) for name in names])


def _headline(view: RunView, eval_loss: float | None, slow: Collection[str]) -> str:
    if view.first_ns is None or view.last_ns is None:
        return "Nothing has happened yet."
    names = {name for name, _ in view.lives}
    wall = duration((view.last_ns - view.first_ns) / 1e9)
    if view.config is None:
        work = f"trained in mode {view.mode} for {wall} and computed {view.tokens:,} tokens"
        return f"{count(len(names), 'rank')} {work}. {_losses(view, eval_loss)}"
    broke = "was stopped at" if view.stopped else "broke off at" if view.phase == BROKEN_OFF else "has come to"
    done = "finished at" if view.slots_closed >= view.config.slots else broke
    kept = weighted_tokens(view, piece_books(view))
    part = f"{100 * kept['merged'] / kept['computed']:.1f}% of their work is in the model" if kept["computed"] else ""
    said = [
        f"{count(len(names), 'learner')} trained in mode {view.config.mode} for {wall}; the run {done} slot "
        f"{view.slots_closed} of {view.config.slots}.",
        f"They computed {view.tokens:,} tokens; {part}." if part else "",
        _losses(view, eval_loss),
        _faults(view, slow),
    ]
    return " ".join(text for text in said if text)


def _losses(view: RunView, eval_loss: float | None) -> str:
    if eval_loss is not None:
        return f"The held-out loss of the model is {with_unit(f'{eval_loss:.4f}', view.loss_unit)}."
    if view.recent.mean is None:
        return ""
    found = with_unit(f"{view.recent.mean:.4f}", view.loss_unit)
    return f"The training loss is {found}, the mean over the newest tenth of all tokens."


def with_unit(value: str, unit: str) -> str:
    """The value, and its unit where there is one."""
    return f"{value} {unit}" if unit else value


def _faults(view: RunView, slow: Collection[str]) -> str:
    """Who broke and how, all in one sentence."""
    assert view.last_ns is not None
    gone = {name: found for name in view.history.spans if (found := view.history.absences(name, view.last_ns))}
    still = [name for name in view.history.spans if _stood_ns(view, name)]
    groups = {
        "lost for good": [name for name, absences in gone.items() if absences[-1].back is None],
        "lost and back": [name for name, absences in gone.items() if absences[-1].back is not None],
        "stood still for a while": still,
        "joined late": [name for name in view.history.spans if _late(view, name) is not None],
        "much slower than the fastest": list(slow),
    }
    said = [f"{kind}: {_some(names)}" for kind, names in groups.items() if names]
    if not gone:
        said.insert(0, "no learner was lost")
    text = "; ".join(said)
    return f"{text[0].upper()}{text[1:]}."


def _some(names: list[str]) -> str:
    """The first ones by name."""
    more = len(names) - NAMED_MOST
    return ", ".join(sorted(names)[:NAMED_MOST]) + (f" and {more} more" if more > 0 else "")


def _stood_ns(view: RunView, name: str) -> int:
    """How long it took no step though it was there; 0 where that was short."""
    stood_ns = view.history.spent_ns(name, "idle", view.last_ns or 0)
    return stood_ns if stood_ns >= STANDSTILL_S * 1e9 else 0


def _late(view: RunView, name: str) -> int | None:
    """When it was ready for the first time, where training had begun without it."""
    ready_ns, began_ns = view.history.first_ready_ns(name), view.start_ns
    late = ready_ns is not None and began_ns is not None and ready_ns > began_ns + LATE_S * 1e9
    return ready_ns if late else None


def slow_learners(view: RunView) -> dict[str, tuple[float, str]]:
    """Whose steps, while it trained, took SLOW_TIMES as long as those of the fastest or more: (times, the fastest)."""
    steps: Counter[str] = Counter()
    for (name, _), life in view.lives.items():
        steps[name] += life.steps
    step_ns = {
        name: view.history.spent_ns(name, "ready", view.last_ns or 0) / count
        for name, count in steps.items()
        if count >= SPEED_STEPS
    }
    fastest = min(step_ns, key=lambda name: step_ns[name], default="")
    times = {name: ns / step_ns[fastest] for name, ns in step_ns.items() if step_ns[fastest]}
    return {name: (found, fastest) for name, found in times.items() if found >= SLOW_TIMES}


def _learner(view: RunView, name: str, slow: tuple[float, str] | None) -> str:
    lives = [life for (n, _), life in view.lives.items() if n == name]
    steps, tokens = sum(life.steps for life in lives), sum(life.tokens for life in lives)
    share = view.by_learner.get(name)
    merged = f", merged into {100 * share.mean:.0f}% of the slots that it was ready for" if share and share.mean else ""
    said = [f"{name}: {count(steps, 'step')}, {tokens:,} tokens{merged}."]
    speed = f"Its steps took {slow[0]:.1f} times as long as those of {slow[1]}." if slow else ""
    said += [_joined(view, name), speed, *_absences(view, name), _stood(view, name)]
    lost = sum(weighted(view, life.end.lost) for life in lives if life.end is not None)
    if lost:
        said.append(f"The work of {lost:,.0f} of its tokens is lost.")
    missed = sum(n for (who, _, fate, _), n in view.history.fates.items() if who == name and fate == "missed")
    refused = sum(n for (who, _, fate, _), n in view.history.fates.items() if who == name and fate == "refused")
    if missed:
        said.append(f"{count(missed, 'contribution')} came too late and went in later.")
    if refused:
        why = next((with_cause(life.last_refusal) for life in reversed(lives) if life.last_refusal), "")
        said.append(f"{count(refused, 'contribution')} {'was' if refused == 1 else 'were'} refused; the last: {why}.")
    said.append(_end(view, name))
    return " ".join(text for text in said if text)


def _joined(view: RunView, name: str) -> str:
    late_ns = _late(view, name)
    return f"Joined {_into(view, late_ns)}." if late_ns is not None else ""


def _stood(view: RunView, name: str) -> str:
    if not _stood_ns(view, name):
        return ""
    spans = [span for span in view.history.spans[name] if span.state == "idle"]
    longest = max(spans, key=lambda span: (span.stop_ns or view.last_ns or 0) - span.start_ns)
    long = duration(_stood_ns(view, name) / 1e9)
    often = f", {len(spans)} times in all, the longest" if len(spans) > 1 else ""
    return f"Stood still (connected, no step) for {long}{often}, {_into(view, longest.start_ns)}."


def _absences(view: RunView, name: str) -> list[str]:
    gone = view.history.absences(name, view.last_ns or 0)
    said = [_absence(view, absence) for absence in gone[:TOLD_MOST]]
    if len(gone) > TOLD_MOST:
        said.append(f"It was lost {len(gone) - TOLD_MOST} more times.")
    return said


def _absence(view: RunView, absence: Absence) -> str:
    at = f"Lost {_into(view, absence.start_ns)} ({absence.reason})"
    if absence.back is None:
        return f"{at} and {'did not come' if view.phase in ENDED else 'has not come'} back."
    fresh = " as a new process" if absence.back != absence.generation else ""
    return f"{at} and was back after {duration((absence.stop_ns - absence.start_ns) / 1e9)}{fresh}."


def _into(view: RunView, now_ns: int) -> str:
    """In seconds where the page's axis has seconds."""
    first_ns, last_ns = view.first_ns or 0, view.last_ns or 0
    at_s = (now_ns - first_ns) / 1e9
    return f"{at_s:.0f} s into the run" if last_ns - first_ns < LONG_RUN_NS else f"{duration(at_s)} into the run"


def _end(view: RunView, name: str) -> str:
    spans = view.history.spans.get(name, [])
    if not spans or spans[-1].state != "ended" or spans[-1].reason in GOOD_ENDS:
        return ""
    gone = view.history.absences(name, view.last_ns or 0)
    if gone and gone[-1].back is None:
        return ""
    return f"It left before the end ({spans[-1].reason})."
