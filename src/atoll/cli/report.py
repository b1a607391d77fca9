"""`atoll report RUN`: a run as one page of HTML."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

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


def main(argv: Sequence[str]) -> int:
    """0 where the page is written."""
    options = parse(Report, "report", argv)
    from atoll.store.evals import read_evals
    from atoll.watch.read import read_run

    view = read_run(options.run)
    page = pages().report(view, read_evals(options.run), final_loss(options.run))
    print(write(options.to or options.run / "report.html", page))
    return 0


def pages() -> ModuleType:
    """watch.report; ConfigError where its extra is missing."""
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
        write_atomic(path, page.encode(errors="backslashreplace"))
    except (OSError, ValueError) as error:  # ValueError: an empty name, or a NUL in it
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RunError(f"{str(path)!r} cannot be written: {reason}; give another file with --to") from error
    return path
