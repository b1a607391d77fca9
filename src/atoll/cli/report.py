"""`atoll report RUN`: a run as one page of HTML. `atoll compare RUN RUN...`: several, overlaid."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from atoll.cli.parse import parse
from atoll.errors import ConfigError, RunError

EXTRA = "reports need plotly, which is not installed; pip install 'atoll[report]'"


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write report.html of a run that is over, or of one that goes on: one file, which needs no network."""

    run: tyro.conf.Positional[Path]
    """Directory of the run."""
    to: Path | None = None
    """The file; default: report.html in the run's directory."""


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Write a page on which several runs are overlaid."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of the runs."""
    to: Path = Path("compare.html")
    """The file."""


def main(argv: Sequence[str]) -> int:
    """`atoll report`."""
    options = parse(Report, "report", argv)
    pages = _pages()
    from atoll.store.evals import read_evals
    from atoll.watch.read import fold_run

    view = fold_run(options.run)
    page = pages.report(view, read_evals(options.run), final_loss(options.run))
    print(write(options.to or options.run / "report.html", page))
    return 0


def main_compare(argv: Sequence[str]) -> int:
    """`atoll compare`."""
    options = parse(Compare, "compare", argv)
    if len(options.runs) < 2:
        raise ConfigError("compare takes two runs or more; `atoll report RUN` shows one")
    pages = _pages()
    from atoll.store.evals import read_evals
    from atoll.watch.read import fold_run

    names = [run.resolve().name for run in options.runs]
    unique = names if len(set(names)) == len(names) else [str(run) for run in options.runs]
    found = [(name, fold_run(run), read_evals(run)) for name, run in zip(unique, options.runs, strict=True)]
    print(write(options.to, pages.compare(found)))
    return 0


def _pages():  # type: ignore[no-untyped-def]
    """watch.report, which needs an extra."""
    try:
        from atoll.watch import report
    except ModuleNotFoundError as error:
        if error.name != "plotly":
            raise
        raise ConfigError(EXTRA) from error
    return report


def final_loss(run_dir: Path) -> float | None:
    """eval_loss of summary.json; None where there is none yet, or it cannot be read."""
    try:
        found = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["eval_loss"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return float(found) if isinstance(found, int | float) else None


def write(path: Path, page: str) -> Path:
    """Atomically."""
    from atoll.store.files import write_atomic

    try:
        write_atomic(path, page.encode())
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error}; give another file with --to") from error
    return path
