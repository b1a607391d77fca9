"""`atoll train`: one run with all its learners on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atoll.cli.console import Shown, console_for, warn
from atoll.cli.parse import parse
from atoll.core.config import DATA_PARALLEL, MODES, choice
from atoll.launch.options import LocalOptions

EXIT_FAILED = 1
EXPECTED = ("finished", "stopped by a signal")
"""Ends that need no warning."""


@dataclass(frozen=True, kw_only=True)
class Train(Shown, LocalOptions):
    """Train one model with several learners and a syncer on this machine.

    Ctrl-C ends the run early and cleanly, with everything written; a second one kills it.
    """


def main(argv: Sequence[str]) -> int:
    """Exit status of the run."""
    options = parse(Train, "train", argv)
    choice("mode", options.mode, (*MODES, DATA_PARALLEL))
    return train_parallel(options) if options.mode == DATA_PARALLEL else train_apart(options)


def train_apart(options: Train) -> int:
    """Learners and a syncer."""
    from atoll.cli.closing import close_run, closing_lines
    from atoll.launch.local import LocalRun
    from atoll.launch.prepare import prepare

    plan = prepare(options)
    for note in plan.notes:
        warn(note)
    console = console_for(options, plan.notes)
    run = LocalRun(plan, say=console.say, on_record=console.record)
    with console.shown():
        outcome = run.run()
    if not plan.run_dir.exists():
        warn(outcome.reason)
        return outcome.code or EXIT_FAILED
    extra: dict[str, Any] = {"model": options.model, "data": list(options.data), "exit": outcome.reason}
    extra["evaluator_cpu_s"] = run.evaluator_cpu_s
    summary = close_run(plan.run_dir, console.view, plan.corpus, plan.learners[0].preset().length, extra)
    console.closing(closing_lines(plan.run_dir, summary, console.view), summary)
    if outcome.reason not in EXPECTED:
        warn(outcome.reason)
    return outcome.code


def train_parallel(options: Train) -> int:
    """Ranks that share every gradient."""
    from atoll.cli.closing import evaluate_run, parallel_lines, write_summary
    from atoll.cli.console import Console, JsonConsole
    from atoll.launch.parallel import ParallelRun, prepare_parallel, versions
    from atoll.launch.plan import INTERVAL
    from atoll.store.steps import StepRow
    from atoll.watch.parallel import StepLines, summarise_parallel
    from atoll.watch.read import loss_unit

    plan = prepare_parallel(options)
    if plan.corpus.remark:
        warn(plan.corpus.remark)
    lines = StepLines(steps=plan.steps, ranks=options.learners, every=INTERVAL)

    def on_step(row: StepRow) -> None:
        line = lines.feed(row)
        if line is not None and not (options.quiet or options.json):
            print(line, flush=True)

    started_s = time.monotonic()
    console = JsonConsole() if options.json else Console(quiet=options.quiet)
    run = ParallelRun(plan, say=console.say, on_step=on_step)
    outcome = run.run()
    if not plan.run_dir.exists():
        warn(outcome.reason)
        return outcome.code or EXIT_FAILED
    summary = summarise_parallel(
        {name: log.rows for name, log in run.logs.items()},
        settings=plan.settings(),
        wall_s=time.monotonic() - started_s,
        eval_loss=evaluate_run(plan.run_dir, plan.corpus, plan.learners[0].preset().length),
        versions=versions(),
        extra={"loss_unit": loss_unit(plan.run_dir), "model": options.model, "data": list(options.data)}
        | {"exit": outcome.reason},
    )
    write_summary(plan.run_dir, summary)
    console.closing(parallel_lines(plan.run_dir, summary), summary)
    if outcome.reason not in EXPECTED:
        warn(outcome.reason)
    return outcome.code
