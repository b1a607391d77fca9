"""docs/QUALITY.md is reproduced by the commands beside it: no trial too many, none too few, and the table is theirs."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
import tyro

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "QUALITY.md").read_text()


@pytest.fixture(scope="module")
def quality() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("quality", ROOT / "benchmarks" / "quality.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["quality"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.pop(0)
    return module


def commands() -> list[list[str]]:
    """The arguments of each command on the page."""
    (block,) = re.findall(r"```\n(python benchmarks/quality\.py .*?)```", PAGE, re.DOTALL)
    lines = block.replace("\\\n", " ").strip().splitlines()
    return [shlex.split(line, comments=True)[2:] for line in lines]


def test_page__its_commands_make_the_trials_of_the_file(quality: ModuleType) -> None:
    made = [
        trial
        for words in commands()
        if words != ["table"]
        for trial in quality.trials(tyro.cli(quality.Options, args=words))
    ]
    known = [quality.Trial(**line["trial"]) for line in quality.known(quality.RESULTS)]
    assert [trial for trial in made if trial not in known] == []
    assert [trial for trial in known if trial not in made] == []
    assert len(known) == len({str(trial) for trial in known}), "a trial stands in the file once"


def test_page__its_table_is_that_of_the_file(quality: ModuleType) -> None:
    wanted = list(quality.table(quality.rows(quality.known(quality.RESULTS))))
    assert [line for line in PAGE.splitlines() if line.startswith("|")] == wanted


def test_gap__is_to_the_best_baseline_over_the_same_seeds(quality: ModuleType) -> None:
    def row(*losses: float, synchronous: bool = False):
        seeds = dict(enumerate(losses))
        return quality.Row(("tiny", 600, 4), "x", synchronous, "muon", 1e-3, seeds)

    baselines = [row(1.0, 2.0, synchronous=True), row(1.1, synchronous=True)]
    assert row(1.2).gap(baselines) == pytest.approx(0.2)
    assert row(1.2, 2.1).gap(baselines) == pytest.approx(0.1)
    assert row(1.2, 2.1, 3.0).gap(baselines) is None
