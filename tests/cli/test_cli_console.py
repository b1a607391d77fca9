"""What a command shows while a run goes on: lines, nothing but warnings, JSON, or a picture in a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.closing import closing_lines
from atoll.cli.console import Console, JsonConsole, LiveConsole, Shown, console_for
from atoll.core.records import LifeEndLine, NoticeLine, Record
from atoll.watch.status import status
from atoll.watch.summary import fold, summarise
from tests.watch.worlds import equal, tape_of, world

KNOWN, NEW = "said before the start", "something is wrong"


@pytest.fixture(scope="module")
def lines() -> list[Record]:
    found = tape_of(world(equal(2)))
    return [found[0], NoticeLine(0, KNOWN), *found[1:20], NoticeLine(1, NEW), *found[20:]]


def shown(console: Console, lines: list[Record], summary: dict[str, Any]) -> Console:
    with console.shown():
        for line in lines:
            console.record(line)
    console.closing(["the end"], summary)
    return console


def test_console__plain_lines_on_stdout_and_warnings_on_stderr(lines, capsys) -> None:
    shown(Console(known=[KNOWN]), lines, {})
    said = capsys.readouterr()
    assert "learner l0 is ready" in said.out
    assert "slot 80/80" in said.out
    assert said.out.endswith("the end\n")
    assert said.err == f"atoll: notice: {NEW}\n"


def test_console__quiet_keeps_warnings_and_the_end(lines, capsys) -> None:
    shown(Console(quiet=True, known=[KNOWN]), lines, {})
    said = capsys.readouterr()
    assert said.out == "the end\n"
    assert said.err == f"atoll: notice: {NEW}\n"


def test_console__json_is_nothing_but_json(lines, capsys) -> None:
    console = JsonConsole([KNOWN])
    console.say("for people")
    shown(console, lines, {"yield": 1.0})
    said = capsys.readouterr()
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert [row["kind"] for row in rows] == ["status"] * 20 + ["summary"]
    assert rows[-1] == {"kind": "summary", "yield": 1.0}
    assert [row["slot"] for row in rows[:-1]] == sorted(row["slot"] for row in rows[:-1])
    assert "for people" in said.err
    assert NEW in said.err


def test_console__live_says_new_notices_above_the_picture(lines, capsys) -> None:
    console = shown(LiveConsole([KNOWN]), lines, {})
    said = capsys.readouterr().out
    assert KNOWN not in said
    assert f"notice: {NEW}" in said
    assert said.endswith("the end\n")
    assert status(console.view).phase == "over"


def test_console__live_only_in_a_terminal(monkeypatch) -> None:
    assert type(console_for(Shown())) is Console
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert type(console_for(Shown())) is LiveConsole
    assert type(console_for(Shown(plain=True))) is Console
    assert type(console_for(Shown(quiet=True))) is Console
    assert type(console_for(Shown(json=True))) is JsonConsole


def closing(lines: list[Record]) -> dict[str, str]:
    """By their first word."""
    view = fold(lines)
    found = closing_lines(Path("run"), summarise(view), view)
    return {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in found if line}


def test_closing__what_nobody_said_is_no_figure(lines) -> None:
    """A learner tells of its waits when it ends; where the syncer was killed before, nobody knows them."""
    assert "longest step()" in closing(lines)["blocked"]
    broken_off = closing([line for line in lines if not isinstance(line, LifeEndLine)])
    assert broken_off["blocked"] == "-"


def test_closing__before_anything_settled_there_is_no_lowest(lines) -> None:
    first = closing(lines[:12])
    assert first["taking part"] == "- of the ready; lowest fragment -, lowest learner -"
    assert first["length"].startswith("0 slots (0 steps")
