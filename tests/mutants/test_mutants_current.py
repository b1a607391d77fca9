"""The mutants of the core fit the core as it is; whether worlds kill them is asked by `make mutants`."""

from __future__ import annotations

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

TABLES: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text("utf-8"))["mutant"]
KEYS = {"name", "rules", "module", "old", "new", "why"}
MUTANTS_MIN = 30
RULES = "R1 R2 R3 R4 R5 R6 R7 R8 R9 R10 R14 R22 R25"
HAZARDS = "H2 H4 H5 H7 H8 H10 H11 H12 H14 H16 H17 H40 H41 H42 H44 H45 H46"
MODULES = "agent capture config contributions finish learner ledger members slots syncer"


def _source(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text("utf-8")


@pytest.mark.parametrize("mutant", TABLES, ids=lambda mutant: mutant["name"])
class TestEach:
    def test_is_whole(self, mutant: dict[str, Any]) -> None:
        assert mutant.keys() == KEYS
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", mutant["name"])
        assert mutant["rules"]
        assert all(re.fullmatch(r"[RH][1-9][0-9]*", rule) for rule in mutant["rules"])
        assert mutant["module"].startswith("atoll.core.")
        assert mutant["why"]

    def test_old_occurs_once(self, mutant: dict[str, Any]) -> None:
        assert _source(mutant["module"]).count(mutant["old"]) == 1

    def test_new_is_another_program(self, mutant: dict[str, Any]) -> None:
        assert mutant["new"] != mutant["old"]
        source = _source(mutant["module"])
        changed = compile(source.replace(mutant["old"], mutant["new"]), mutant["module"], "exec")
        assert changed != compile(source, mutant["module"], "exec")


def test_names_are_unique() -> None:
    names = [mutant["name"] for mutant in TABLES]
    assert len(names) == len(set(names))


def test_no_two_are_the_same_change() -> None:
    changes = [(mutant["module"], mutant["old"], mutant["new"]) for mutant in TABLES]
    assert len(changes) == len(set(changes))


def test_there_are_enough() -> None:
    assert len(TABLES) >= MUTANTS_MIN


@pytest.mark.parametrize("rule", f"{RULES} {HAZARDS}".split())
def test_every_rule_has_a_mutant(rule: str) -> None:
    assert any(rule in mutant["rules"] for mutant in TABLES)


@pytest.mark.parametrize("module", MODULES.split())
def test_every_module_has_a_mutant(module: str) -> None:
    assert any(mutant["module"] == f"atoll.core.{module}" for mutant in TABLES)
