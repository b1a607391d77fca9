"""The tables of docs/SIMULATION.md are those of the code, and its example runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from atoll.core.config import RunConfig
from atoll.sim.keys import FAULT, LEARNER, SITE, TOP, Key
from atoll.sim.plan import FAULTS, WHENS, Fault, LearnerSpec, Plan, Site
from atoll.sim.promises import EXPECT
from atoll.sim.rogue import LIES, STRANGERS
from atoll.sim.scenario import SETTINGS, check_expectations, loads, names
from atoll.sim.search import watched

PAGE = (Path(__file__).parent.parent.parent / "docs" / "SIMULATION.md").read_text()


def key_rows(kind: type, keys: tuple[Key, ...]) -> Iterator[str]:
    defaults = {field.name: field.default for field in fields(kind)}
    for key in keys:
        default: Any = defaults.get(key.field, MISSING)
        if kind is Plan and key.field == "seed":
            default = 0
        shown = "" if default in (MISSING, "") else key.write(default)
        yield f"| `{key.name}` | {shown} | {key.text} |"


def setting_rows() -> Iterator[str]:
    defaults = {field.name: field.default for field in fields(RunConfig)}
    for name in SETTINGS:
        default = defaults[name]
        yield f"`{name}`" if default is MISSING else f"`{name}` {default}"


ROWS = [
    *key_rows(Plan, TOP),
    *key_rows(LearnerSpec, LEARNER),
    *key_rows(Site, SITE),
    *key_rows(Fault, FAULT),
    *(f"| `{key}` | {text} |" for key, text in (EXPECT | FAULTS).items()),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("`")[1])
def test_every_key_and_fault_is_in_a_table(row: str) -> None:
    assert f"\n{row}\n" in PAGE


def test_the_tables_hold_nothing_else() -> None:
    rows = [row for row in PAGE.splitlines() if row.startswith("| `") and not row.startswith("| `--")]
    assert sorted(rows) == sorted(ROWS)


def test_settings_and_their_defaults() -> None:
    listed = PAGE.split("### [settings]")[1].split("###")[0]
    for row in setting_rows():
        assert row in listed, row


def test_words_that_have_a_number_or_are_waited_for() -> None:
    for words in (STRANGERS, LIES):
        assert ", ".join(f"{number} {word}" for number, word in enumerate(words, 1)) in PAGE.replace("\n", " ")
    assert all(f"`{when}`" in PAGE for when in WHENS)


def test_every_shipped_scenario_is_named() -> None:
    assert [name for name in names() if f"`{name}`" not in PAGE] == []


def test_the_example_keeps_its_promises() -> None:
    text = next(block for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL) if "[expect]" in block)
    outcome, world = watched(loads(text, "example"))
    assert outcome.kind == "ok"
    assert world is not None
    assert check_expectations(world) == []
