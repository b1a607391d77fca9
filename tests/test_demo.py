"""`make demo`: what it does with an earlier run, and that the times it promises are the same everywhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from atoll.store.rundir import open_rundir
from atoll.store.tape import Tape

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "tools" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def earlier(run: Path, text: str) -> None:
    run.mkdir(parents=True)
    (run / "run.toml").write_text(text)
    (run / "tape.jsonl").touch()


def test_demo__keeps_every_earlier_run(demo: ModuleType, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "demo"
    assert demo.keep_aside(run) is None
    for number in (1, 2):
        earlier(run, f"the run number {number}")
        assert demo.keep_aside(run) == tmp_path / "runs" / f"demo-{number}"
        assert not run.exists()
    assert {path.read_text() for path in tmp_path.rglob("run.toml")} == {"the run number 1", "the run number 2"}


def test_demo__says_where_it_keeps_an_earlier_run(demo: ModuleType, tmp_path: Path, capsys, monkeypatch) -> None:
    class Ended:
        def __init__(self, words: list[str]) -> None:
            assert "--run" in words

        def poll(self) -> int:
            return 1

        wait = poll

    monkeypatch.setattr(demo.subprocess, "Popen", Ended)
    earlier(tmp_path / "demo", "x")
    assert demo.main(tmp_path / "demo") == 1
    assert f"the earlier run of {tmp_path / 'demo'} is kept in {tmp_path / 'demo-1'}" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["a file", "a folder of somebody", "a link to a run", "a run that goes on"])
def test_demo__leaves_what_is_not_its_own(demo: ModuleType, tmp_path: Path, capsys, what: str) -> None:
    run = tmp_path / "demo"
    if what == "a file":
        run.touch()
    elif what == "a folder of somebody":
        run.mkdir()
        (run / "thesis.tex").touch()
    elif what == "a link to a run":
        earlier(tmp_path / "precious", "x")
        run.symlink_to(tmp_path / "precious")
    else:
        writer = Tape(open_rundir(run, "some-run").tape)
    before = sorted(tmp_path.rglob("*"))
    assert demo.main(run) == 2
    assert re.fullmatch(r"demo: .* give another directory\n", capsys.readouterr().err)
    assert sorted(tmp_path.rglob("*")) == before
    if what == "a run that goes on":
        writer.close()


def test_demo__takes_an_empty_folder(demo: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    assert demo.keep_aside(tmp_path / "demo") is None


def test_demo__lasts_as_long_everywhere(demo: ModuleType) -> None:
    """Whoever measures another time changes it in one place, and is led to the other."""
    assert f"The demo takes {demo.LASTS}" in " ".join((ROOT / "README.md").read_text().split())
    for page in (ROOT / "Makefile", ROOT / "docs" / "JOIN.md", ROOT / "docs" / "WATCH.md"):
        assert not re.search(r"demo[^.]*\bminutes?\b", page.read_text()), page


SAID = re.compile(r"\b(one|two|three|four|five|six|\d+) lines (?:in your loop|for Atoll)", re.IGNORECASE)


def test_adopting__takes_as_many_lines_as_is_said() -> None:
    """Each of them is numbered, in the README and in the example."""
    for page in (ROOT / "README.md", ROOT / "examples" / "minimal.py"):
        text = page.read_text()
        numbers = [int(found) for found in re.findall(r"  # (\d)\b", text)]
        assert numbers == [1, 2, 3, 4], page
    for page in [ROOT / "README.md", ROOT / "examples" / "minimal.py", *(ROOT / "docs").glob("[!L]*.md")]:
        assert {found.lower() for found in SAID.findall(page.read_text())} <= {"four"}, page
