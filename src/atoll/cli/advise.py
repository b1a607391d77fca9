"""`atoll advise RUN`: what to change, with the figure behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from atoll.cli.parse import parse


@dataclass(frozen=True, kw_only=True)
class Advise:
    """One to three sentences on what to change in a run, each with the figure that it rests on."""

    run: tyro.conf.Positional[Path]
    """Directory of the run."""


def main(argv: Sequence[str]) -> int:
    options = parse(Advise, "advise", argv)
    from atoll.watch.judge import advice
    from atoll.watch.read import fold_run

    for finding in advice(fold_run(options.run)):
        print(finding.text)
    return 0
