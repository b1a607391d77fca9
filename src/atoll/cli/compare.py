"""`atoll compare RUN RUN...`: several runs on one page, overlaid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from atoll.cli.parse import parse
from atoll.cli.report import final_loss, pages, write
from atoll.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Write a page on which several runs are overlaid."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of the runs."""
    to: Path = Path("compare.html")
    """The file."""


def main(argv: Sequence[str]) -> int:
    """0 where the page is written."""
    options = parse(Compare, "compare", argv)
    if len(options.runs) < 2:
        raise ConfigError("compare takes two runs or more; `atoll report RUN` shows one")
    paths = [run.resolve() for run in options.runs]
    alike = [str(run) for run, path in zip(options.runs, paths, strict=True) if paths.count(path) > 1]
    if alike:
        raise ConfigError(f"run {alike[-1]!r} is given twice; give each run once")
    from atoll.store.evals import read_evals
    from atoll.watch.read import read_run

    names = [path.name for path in paths]
    unique = names if len(set(names)) == len(names) else [str(run) for run in options.runs]
    page = pages()
    found = [
        page.Compared(name, read_run(run), read_evals(run), final_loss(run))
        for name, run in zip(unique, options.runs, strict=True)
    ]
    print(write(options.to, page.compare(found)))
    return 0
