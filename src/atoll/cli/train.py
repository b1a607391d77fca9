"""`atoll train`: one run with all its learners on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atoll.cli.console import Shown, console_for, warn
from atoll.cli.parse import parse
from atoll.launch.options import LocalOptions


@dataclass(frozen=True, kw_only=True)
class Train(LocalOptions, Shown):
    """Train one model with several learners and a syncer on this machine.

    Ctrl-C ends the run early and cleanly, with everything written; a second one kills it.
    """


def main(argv: Sequence[str]) -> int:
    """Exit status of the run."""
    options = parse(Train, "train", argv)
    from atoll.cli.closing import close_run, closing_lines
    from atoll.launch.local import LocalRun, prepare

    plan = prepare(options)
    for note in plan.notes:
        warn(note)
    console = console_for(options, plan.notes)
    run = LocalRun(plan, say=console.say, on_record=console.record)
    with console.shown():
        outcome = run.run()
    extra: dict[str, Any] = {"model": options.model, "data": list(options.data), "exit": outcome.reason}
    extra["evaluator_cpu_s"] = run.evaluator_cpu_s
    summary = close_run(plan.run_dir, console.view, plan.corpus, plan.learners[0].preset().length, extra)
    console.closing(closing_lines(plan.run_dir, summary, console.view), summary)
    if outcome.code == 1 or outcome.reason.startswith("killed"):
        warn(outcome.reason)
    return outcome.code
