"""summary.json of mode=data-parallel, from the ranks' step logs: the figures of `watch.summary` that have a meaning.

`None` where a figure is about merging. docs/SUMMARY.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from atoll.core.records import MemberLine, ReportLine
from atoll.store.steps import StepRow
from atoll.watch.summary import SECOND_NS, SUMMARY_SCHEMA, ratio
from atoll.watch.view import RunView

MERGING = (
    "slots", "token_pieces", "work_ratio", "yield", "participation", "copy_s", "step_max_s", "gap_max_s",
    "training_uptime", "merge_uptime", "contributions", "phase", "piece_versions",
)  # fmt: skip


def summarise_parallel(
    logs: Mapping[str, Sequence[StepRow]],
    *,
    settings: Mapping[str, Any],
    wall_s: float,
    eval_loss: float | None,
    versions: Mapping[str, str],
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of summary.json. logs: per rank the rows of its step log."""
    steps = min((len(rows) for rows in logs.values()), default=0)
    computed = sum(row.tokens for rows in logs.values() for row in rows)
    rows = list(next(iter(logs.values()), ()))
    whole = [rows for rows in logs.values() if rows]
    span_s = (max(r[-1].t_ns for r in whole) - began_ns(whole)) / SECOND_NS if whole else 0.0
    waited_ns = sum(row.all_reduce_ns for rows in logs.values() for row in rows)
    figures: dict[str, Any] = {
        "schema": SUMMARY_SCHEMA,
        "run_id": settings["run_id"],
        "mode": settings["mode"],
        "learners": settings["learners"],
        "expected_learners": settings["learners"],
        "seed": settings["seed"],
        "steps": steps,
        "learner_steps": sum(map(len, logs.values())),
        "wall_s": wall_s,
        "tokens": {"computed": computed},
        "tokens_per_s": ratio(computed, span_s) if steps > 1 else None,
        "blocked_s": {"all_reduce": waited_ns / SECOND_NS},
        "train_loss": recent_loss(rows),
        "eval_loss": eval_loss,
        "lives": dict.fromkeys(logs, 1),
        "versions": dict(versions),
    }
    figures |= dict.fromkeys(MERGING)
    return figures | {key: value for key, value in extra.items() if key not in figures}


def fold_parallel(settings: Mapping[str, Any], logs: Mapping[str, Sequence[StepRow]]) -> RunView:
    """As much of a read model as step logs give: ranks, steps, tokens, losses. No slots, no configuration."""
    view = RunView()
    view.run_id, view.mode = str(settings["run_id"]), str(settings["mode"])
    sums: dict[str, tuple[int, float]] = {}
    last = max(logs, default="")
    if not any(logs.values()):
        return view
    start_ns = began_ns([rows for rows in logs.values() if rows])
    for name in sorted(logs):
        view.feed(MemberLine(start_ns, name, 1, "joining", "ready", "first step"))
        view.feed(ReportLine(start_ns, name, 1, 0, 0, 0.0, 0))
    for name, row in sorted(((n, r) for n, rows in logs.items() for r in rows), key=lambda pair: pair[1].t_ns):
        tokens, loss_sum = sums.get(name, (0, 0.0))
        sums[name] = tokens + row.tokens, loss_sum + row.tokens * row.loss
        view.feed(ReportLine(row.t_ns, name, 1, row.step, *sums[name], row.step))
        if name == last:  # one point per step: its ranks have logged the same loss
            view.history.loss(row.t_ns, view.tokens, view.loss_sum)
    return view


def began_ns(logs: Sequence[Sequence[StepRow]]) -> int:
    """When the first step of the first rank began."""
    return min(map(first_step_ns, logs))


def first_step_ns(rows: Sequence[StepRow]) -> int:
    """When a rank's first step began, if it took as long as the others: a log tells when steps end."""
    return rows[0].t_ns - (rows[-1].t_ns - rows[0].t_ns) // max(1, len(rows) - 1)


def recent_loss(rows: Sequence[StepRow]) -> float | None:
    """Mean loss of the last tenth of the steps, rounded up."""
    last = rows[-math.ceil(len(rows) / 10) :] if rows else []
    return sum(row.loss for row in last) / len(last) if last else None


class StepLines:
    """A line for people every `every` steps."""

    def __init__(self, *, steps: int, ranks: int, every: int) -> None:
        self._steps = steps
        self._ranks = ranks
        self._every = every
        self._tokens = 0
        self._mark: tuple[int, int] | None = None
        self._losses: list[float] = []

    def feed(self, row: StepRow) -> str | None:
        """The line, where this step ends an interval or the run."""
        self._tokens += self._ranks * row.tokens
        self._losses.append(row.loss)
        mark, self._mark = self._mark, self._mark or (row.t_ns, self._tokens)
        if row.step % self._every and row.step != self._steps:
            return None
        loss = sum(self._losses) / len(self._losses)
        rate = ""
        if mark is not None and row.t_ns > mark[0]:
            rate = f"  {(self._tokens - mark[1]) * SECOND_NS / (row.t_ns - mark[0]):,.0f} tokens/s"
        self._mark, self._losses = (row.t_ns, self._tokens), []
        return f"step {row.step:,} of {self._steps:,}  loss {loss:.3f}{rate}"
