"""`atoll train`: one run with all its learners on this machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.cli.parse import parse
from atoll.core.config import MODES, choice
from atoll.launch.options import DATA_PARALLEL, LocalOptions


@dataclass(frozen=True, kw_only=True)
class Train(LocalOptions):
    """Train one model with several learners and a syncer on this machine.

    Ctrl-C ends the run early and cleanly, with everything written; a second one kills it.
    """

    quiet: bool = False
    """Only warnings and the closing summary."""


def say(text: str) -> None:
    """A line for people."""
    print(text, flush=True)


def warn(text: str) -> None:
    """A line that matters, on stderr."""
    print(f"atoll: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Exit status of the run."""
    options = parse(Train, "train", argv)
    choice("mode", options.mode, (*MODES, DATA_PARALLEL))
    return train_parallel(options) if options.mode == DATA_PARALLEL else train_apart(options)


def train_apart(options: Train) -> int:
    """Learners and a syncer."""
    from atoll.cli.closing import close_run, closing_lines
    from atoll.core.records import NoticeLine, Record
    from atoll.launch.local import LocalRun, prepare
    from atoll.watch.lines import ConsoleLines

    plan = prepare(options)
    for note in plan.notes:
        warn(note)
    console = ConsoleLines()

    def on_record(record: Record) -> None:
        for line in console.feed(record):
            if isinstance(record, NoticeLine):
                if record.text not in plan.notes:  # those were said before the start
                    warn(line)
            elif not options.quiet:
                say(line)

    outcome = LocalRun(plan, say=warn if options.quiet else say, on_record=on_record).run()
    extra: dict[str, Any] = {"model": options.model, "data": list(options.data), "exit": outcome.reason}
    summary = close_run(plan.run_dir, console.view, plan.corpus, plan.learners[0].preset().length, extra)
    for line in closing_lines(plan.run_dir, summary, console.view):
        say(line)
    if outcome.code == 1 or outcome.reason.startswith("killed"):
        warn(outcome.reason)
    return outcome.code


def train_parallel(options: Train) -> int:
    """Ranks that share every gradient."""
    from atoll.cli.closing import evaluate_run, parallel_lines, write_summary
    from atoll.launch.parallel import ParallelRun, prepare_parallel, versions
    from atoll.launch.plan import INTERVAL
    from atoll.watch.parallel import StepLines, summarise_parallel

    plan = prepare_parallel(options)
    lines = StepLines(steps=plan.steps, ranks=options.learners, every=INTERVAL)

    def on_step(row: Mapping[str, Any]) -> None:
        line = lines.feed(row)
        if line is not None and not options.quiet:
            say(line)

    started_s = time.monotonic()
    run = ParallelRun(plan, say=warn if options.quiet else say, on_step=on_step)
    outcome = run.run()
    summary = summarise_parallel(
        {name: log.rows for name, log in run.logs.items()},
        settings=plan.settings(),
        wall_s=time.monotonic() - started_s,
        eval_loss=evaluate_run(plan.run_dir, plan.corpus, plan.learners[0].preset().length),
        versions=versions(),
        extra={"model": options.model, "data": list(options.data), "exit": outcome.reason},
    )
    write_summary(plan.run_dir, summary)
    for line in parallel_lines(plan.run_dir, summary):
        say(line)
    if outcome.code == 1 or outcome.reason.startswith("killed"):
        warn(outcome.reason)
    return outcome.code
