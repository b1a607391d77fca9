"""What happened in a run, in plain words: one headline, one sentence per learner."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.watch.history import Span
from atoll.watch.lines import GOOD_ENDS, count
from atoll.watch.summary import piece_books, weighted_tokens
from atoll.watch.view import RunView

TOLD_MOST = 3
"""Absences of one learner that are told one by one."""


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
    return Story(_headline(view, eval_loss), [_learner(view, name) for name in sorted({n for n, _ in view.lives})])


def _headline(view: RunView, eval_loss: float | None) -> str:
    if view.config is None or view.first_ns is None or view.last_ns is None:
        return "Nothing has happened yet."
    names = {name for name, _ in view.lives}
    wall = duration((view.last_ns - view.first_ns) / 1e9)
    done = "finished" if view.slots_closed >= view.config.slots else "was stopped" if view.stopped else "has come to"
    kept = weighted_tokens(view, piece_books(view))
    part = f"{100 * kept['merged'] / kept['computed']:.1f}% of their work is in the model" if kept["computed"] else ""
    said = [
        f"{count(len(names), 'learner')} trained in mode {view.config.mode} for {wall}; the run {done} at slot "
        f"{view.slots_closed} of {view.config.slots}.",
        f"They computed {view.tokens:,} tokens; {part}." if part else "",
        _losses(view, eval_loss),
        _faults(view),
    ]
    return " ".join(text for text in said if text)


def _losses(view: RunView, eval_loss: float | None) -> str:
    if eval_loss is not None:
        return f"The held-out loss of the model is {eval_loss:.4f}."
    return f"The training loss of the newest tenth is {view.recent.mean:.4f}." if view.recent.mean is not None else ""


def _faults(view: RunView) -> str:
    """Who broke, and whether training stood still."""
    assert view.last_ns is not None
    gone = {name: absences for name in view.history.spans if (absences := view.history.absences(name, view.last_ns))}
    if not gone:
        return "No learner was lost."
    times = sum(len(absences) for absences in gone.values())
    often = "once" if times == 1 else f"{times} times in all"
    return f"{', '.join(sorted(gone))} {'was' if len(gone) == 1 else 'were'} lost, {often}."


def _learner(view: RunView, name: str) -> str:
    lives = [life for (n, _), life in view.lives.items() if n == name]
    steps, tokens = sum(life.steps for life in lives), sum(life.tokens for life in lives)
    share = view.by_learner.get(name)
    merged = f", merged into {100 * share.mean:.0f}% of the slots that it was ready for" if share and share.mean else ""
    said = [f"{name}: {count(steps, 'step')}, {tokens:,} tokens{merged}."]
    said += _absences(view, name)
    lost = sum(sum(life.end.lost) for life in lives if life.end is not None)
    if lost:
        said.append(f"{lost / max(1, view.pieces):,.0f} of its tokens are lost.")
    missed = sum(n for (who, _, fate, _), n in view.history.fates.items() if who == name and fate == "missed")
    refused = sum(n for (who, _, fate, _), n in view.history.fates.items() if who == name and fate == "refused")
    if missed:
        said.append(f"{count(missed, 'contribution')} came too late and went in later.")
    if refused:
        said.append(f"{count(refused, 'contribution')} {'was' if refused == 1 else 'were'} refused.")
    said.append(_end(view, name))
    return " ".join(text for text in said if text)


def _absences(view: RunView, name: str) -> list[str]:
    assert view.first_ns is not None
    assert view.last_ns is not None
    gone = view.history.absences(name, view.last_ns)
    said = [_absence(view, name, span, view.first_ns) for span in gone[:TOLD_MOST]]
    if len(gone) > TOLD_MOST:
        said.append(f"It was lost {len(gone) - TOLD_MOST} more times.")
    return said


def _absence(view: RunView, name: str, span: Span, first_ns: int) -> str:
    at, long = duration((span.start_ns - first_ns) / 1e9), duration((span.stop_ns - span.start_ns) / 1e9)
    spans = view.history.spans[name]
    still = span.stop_ns == view.last_ns and spans[-1].state == "away"
    after = "and did not come back" if still else f"and was back after {long}"
    fresh = any(s.generation != span.generation and s.start_ns >= span.start_ns for s in spans)
    return f"Lost {at} into the run ({span.reason}) {after}{' as a new process' if fresh and not still else ''}."


def _end(view: RunView, name: str) -> str:
    spans = view.history.spans.get(name, [])
    if not spans or spans[-1].state != "ended" or spans[-1].reason in GOOD_ENDS:
        return ""
    return f"It left before the end ({spans[-1].reason})."
