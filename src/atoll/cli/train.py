"""`atoll train`: one run with all its learners on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atoll.cli.parse import parse
from atoll.launch.options import LocalOptions


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

    run = LocalRun(plan, say=warn if options.quiet else say, on_record=on_record)
    outcome = run.run()
    extra: dict[str, Any] = {"model": options.model, "data": list(options.data), "exit": outcome.reason}
    extra["evaluator_cpu_s"] = run.evaluator_cpu_s
    summary = close_run(plan.run_dir, console.view, plan.corpus, plan.learners[0].preset().length, extra)
    for line in closing_lines(plan.run_dir, summary, console.view):
        say(line)
    if outcome.code == 1 or outcome.reason.startswith("killed"):
        warn(outcome.reason)
    return outcome.code
