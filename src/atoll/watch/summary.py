"""summary.json: what a run did, in figures. docs/SUMMARY.md has the same formulas for someone who recounts them.

Times are of the syncer's monotonic clock. P pieces with z_p values each; Z = sum z_p; N regular slots; "published" and
"settled" are the PublishedLine of a slot and, for an empty slot, its SlotLine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from atoll.core.messages import Version
from atoll.core.records import Record
from atoll.watch.tallies import LifeView
from atoll.watch.view import RunView

SUMMARY_SCHEMA = 1
SECOND_NS = 1e9
BLOCK_CAUSES = ("parameters", "lock", "finish")
COPY_CAUSES = ("capture", "take")
MERGE_GAP_SLOTS = 10
FATES = ("merged", "overwritten", "lost", "pending")


def fold(lines: Iterable[Record | Mapping[str, Any]]) -> RunView:
    """The read model of a whole tape."""
    view = RunView()
    for line in lines:
        view.feed(line)
    return view


def summarise(
    view: RunView, *, eval_loss: float | None = None, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The content of summary.json. `extra` (model, data, exit ...) is put behind it; it never replaces a figure."""
    config = view.config
    books = piece_books(view)
    figures: dict[str, Any] = {
        "schema": SUMMARY_SCHEMA,
        "run_id": config.run_id if config else None,
        "mode": config.mode if config else None,
        "learners": len(lives_by_name(view)),
        "expected_learners": config.learners if config else None,
        "seed": config.seed if config else None,
        "slots": view.slots_closed,
        "steps": view.slots_closed * config.slot_steps if config else 0,
        "learner_steps": view.steps,
        "wall_s": seconds(view.first_ns, view.last_ns),
        "tokens": weighted_tokens(view, books),
        "token_pieces": {name: sum(row) for name, row in books.items()},
        "tokens_per_s": ratio(sum(books["computed"]) / max(1, view.pieces), report_span_s(view)),
        "work_ratio": None,
        "yield": ratio(sum(books["merged"]), sum(books["computed"])),
        "participation": participation(view),
        "blocked_s": timers_s(view, BLOCK_CAUSES, without=COPY_CAUSES),
        "copy_s": timers_s(view, COPY_CAUSES, without=None),
        "step_max_s": longest_s(life.end.step_ns_max for life in ended(view)),
        "gap_max_s": longest_s(life.end.gap_ns_max for life in ended(view)),
        "training_uptime": ratio(view.stepping.length / SECOND_NS, report_span_s(view)),
        "merge_uptime": merge_uptime(view),
        "train_loss": view.recent.mean,
        "eval_loss": eval_loss,
        "contributions": {"missed": view.fates["missed"], "refused": view.fates["refused"]},
        "lives": lives_by_name(view),
        "phase": view.phase,
        "piece_versions": [list(view.versions.get(p, Version(0, 0))) for p in range(view.pieces)],
        "versions": dict(view.run.versions) if view.run else {},
    }
    return figures | {key: value for key, value in (extra or {}).items() if key not in figures}


def ratio(part: float, whole: float) -> float | None:
    """part / whole; None where there is no whole."""
    return part / whole if whole else None


def seconds(start_ns: int | None, stop_ns: int | None) -> float:
    """0.0 where one of them never came."""
    return 0.0 if start_ns is None or stop_ns is None else (stop_ns - start_ns) / SECOND_NS


def longest_s(times_ns: Iterable[int]) -> float | None:
    """None where there is none: no life has ended, and only its end tells."""
    longest_ns = max(times_ns, default=None)
    return None if longest_ns is None else longest_ns / SECOND_NS


def report_span_s(view: RunView) -> float:
    """From the first ReportLine to the last, of whichever learner."""
    return seconds(view.first_report_ns, view.last_report_ns)


def ended(view: RunView) -> list[Any]:
    """Lives whose books are closed."""
    return [life for life in view.lives.values() if life.end is not None]


def lives_by_name(view: RunView) -> dict[str, int]:
    """How many lives each learner had: 1 and no more where nothing died."""
    counts: dict[str, int] = {}
    for name, _ in view.lives:
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))


def piece_books(view: RunView) -> dict[str, list[int]]:
    """Per piece, the tokens of each fate, over all lives; computed = merged + overwritten + lost + pending.

    A life with a LifeEndLine: computed = its `tokens`, the others from the line, pending = 0. A life without one (the
    syncer died): merged = c_tokens of its published contributions, computed = the larger of its last report's tokens
    and its largest merged, pending = computed - merged.
    """
    rows = {name: [0] * view.pieces for name in ("computed", *FATES)}
    for life in view.lives.values():
        for piece in range(view.pieces):
            for name, tokens in _fates(life, piece).items():
                rows[name][piece] += tokens
    return rows


def _fates(life: LifeView, piece: int) -> dict[str, int]:
    if life.end is not None:
        end = life.end
        fates = {"merged": end.merged[piece], "overwritten": end.overwritten[piece], "lost": end.lost[piece]}
        return {"computed": end.tokens, **fates}
    computed = max(life.tokens, *life.merged)
    return {"computed": computed, "merged": life.merged[piece], "pending": computed - life.merged[piece]}


def weighted_tokens(view: RunView, books: Mapping[str, list[int]]) -> dict[str, float]:
    """Figures for people: sum_p z_p * tokens_p / Z. `computed` is the same for every piece and stays an integer."""
    tokens: dict[str, float] = {name: weighted(view, row) for name, row in books.items()}
    tokens["computed"] = books["computed"][0] if books["computed"] else 0
    return tokens


def weighted(view: RunView, per_piece: Sequence[int]) -> float:
    """Mean over pieces, by their sizes."""
    sizes = view.run.piece_sizes if view.run and per_piece else ()
    return sum(size * n for size, n in zip(sizes, per_piece, strict=True)) / sum(sizes) if sizes else 0.0


def participation(view: RunView) -> dict[str, Any]:
    """Over settled regular slots t: share_t = min(1, merged in t / ready at the closing of t); slots with nobody ready
    are left out.

    mean: of share_t. lowest_fragment: the fragment with the smallest mean of its share_t. lowest_learner: per name,
    over the slots at whose closing a life of it was ready, or into which it was merged all the same: the part of them
    into which it was merged; the smallest. Ties: the lower index or name.
    """
    fragment = min(view.by_piece, key=lambda p: (view.by_piece[p].mean, p), default=None)
    learner = min(view.by_learner, key=lambda n: (view.by_learner[n].mean, n), default=None)
    return {
        "mean": view.participation.mean,
        "lowest_fragment": {
            "fragment": fragment,
            "value": None if fragment is None else view.by_piece[fragment].mean,
        },
        "lowest_learner": {
            "learner": learner,
            "value": None if learner is None else view.by_learner[learner].mean,
        },
        "learners": {name: share.mean for name, share in sorted(view.by_learner.items())},
    }


def timers_s(view: RunView, always: tuple[str, ...], without: tuple[str, ...] | None) -> dict[str, float]:
    """Sums of LifeEndLine.blocked_ns over all lives by cause; `always` are there even when 0.

    Local copies (capture, take) are timed by the same clock but are no waits (R9): they stand in copy_s.
    without None: only `always`.
    """
    sums = dict.fromkeys(always, 0)
    for life in ended(view):
        for cause, spent_ns in life.end.blocked_ns:
            if cause in sums or (without is not None and cause not in without):
                sums[cause] = sums.get(cause, 0) + spent_ns
    return {cause: spent_ns / SECOND_NS for cause, spent_ns in sums.items()}


def merge_uptime(view: RunView) -> float | None:
    """Share of time without gaps of more than 10 mean slot times.

    Points: StartLine, each PublishedLine of a regular slot in tape order, and the end: the PhaseLine `draining`, else
    the last ReportLine; not before the last publication. Mean slot time = (last published - StartLine) / published.
    Gaps are differences of neighbouring points; those above 10 mean slot times count as down, whole. Nothing published:
    0.0; no StartLine: None.
    """
    start_ns, stop_ns = view.start_ns, view.drain_ns if view.drain_ns is not None else view.last_report_ns
    if start_ns is None or stop_ns is None:
        return None
    if not len(view.published_ns):
        return 0.0
    last_ns = view.published_ns[-1]
    stop_ns = max(stop_ns, last_ns)
    if stop_ns == start_ns:
        return 1.0
    limit_ns = MERGE_GAP_SLOTS * (last_ns - start_ns) / len(view.published_ns)
    points = [start_ns, *view.published_ns, stop_ns]
    gaps = (after - before for before, after in pairwise(points))
    return 1 - sum(gap for gap in gaps if gap > limit_ns) / (stop_ns - start_ns)
