"""What the docs name exists, and what they draw is current."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path
from typing import get_args

import pytest

from atoll.core.records import Record

ROOT = Path(__file__).parent.parent
PROTOCOL = (ROOT / "docs" / "PROTOCOL.md").read_text()
ROWS = [line for line in PROTOCOL.splitlines() if re.match(r"\| R\d+ ", line)]


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    return names | {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split()[1])
def test_every_rule_names_a_function_and_a_test_that_exist(row: str) -> None:
    cells = [cell.strip() for cell in row.strip("|").split(" | ")]
    functions, tests = (re.findall(r"`([^`]+)`", cell) for cell in cells[2:4])
    assert functions
    assert tests
    for name in functions:
        resolve(name)
    for name in tests:
        file, _, test = name.partition("::")
        assert (ROOT / file).is_file(), name
        assert not test or test in names_in(ROOT / file), name


def resolve(name: str) -> object:
    """The object that a dotted path below atoll names."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        module = "atoll." + ".".join(parts[:cut])
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            continue
        if found is None:
            continue
        thing: object = importlib.import_module(module)
        for part in parts[cut:]:
            thing = getattr(thing, part)
        return thing
    raise AssertionError(f"{name} does not exist")


def test_the_rules_of_this_version_have_a_row() -> None:
    listed = {row.split()[1] for row in ROWS}
    assert listed >= {f"R{n}" for n in (*range(1, 12), 13, 14, 17, 22, 23, 25)}


def test_pictures_are_current() -> None:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "tools" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    assert pictures.page(PROTOCOL) == PROTOCOL, "run python tools/pictures.py"


def test_every_kind_of_tape_line_and_every_field_is_documented() -> None:
    page = (ROOT / "docs" / "TAPE.md").read_text()
    for kind in get_args(Record):
        assert f"`{kind.__name__.lower()}`" in page, kind
        section = page.split(f"| `{kind.__name__.lower()}`", 1)[1].split("\n| `", 1)[0]
        for name in kind.__dataclass_fields__:
            assert f"`{name}`" in section or name == "now_ns", f"{kind.__name__}.{name}"


def test_no_placeholder_is_left_in_what_people_read() -> None:
    known = {"HOST", "NAME", "RUN", "PATH", "README", "LICENSE", "LOG", "ARCHITECTURE", "PROTOCOL", "TAPE", "SUMMARY"}
    text = (ROOT / "README.md").read_text()
    words = set(re.findall(r"(?<![A-Z_.])[A-Z]{4,}(?:_[A-Z]+)+(?![A-Z_])", text)) - {"ATOLL_TOKEN", "ATOLL_TOKEN_FILE"}
    assert words - {"ATOLL_ADDRESS", "ATOLL_NAME"} - known == set()


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("[!L]*.md"))]
MEANINGS = {
    "README.md": {
        "RDA": "radial-directional averaging", "P fragments": "cut into", "H steps": "`--interval`",
        "K of them": "`--quorum`", "H/P": "H steps of a learner",
    },
    "QUALITY.md": {"RDA": "radial-directional averaging", "H = 24": "merged every"},
    "WATCH.md": {"rda": "radial-directional averaging"},
    "ARCHITECTURE.md": {"theta": "learner's parameters", "H/P": "between", "R9": "rules, named R1 to R29"},
}  # fmt: skip
NOT_UNDERSTOOD = (
    "Only the first one comes before that is earned",
    "steps of the K-th fastest learner one fragment has its turn",
    "Who has announced work on it takes part",
    "A `run.toml` is one too",
    "where all of it, imports too, stays within",
)


@pytest.mark.parametrize("page", MEANINGS)
def test_letters_and_short_words_are_explained_where_they_are_met_first(page: str) -> None:
    text = " ".join((ROOT / ("" if page == "README.md" else "docs") / page).read_text().split())
    for term, meaning in MEANINGS[page].items():
        first = re.search(rf"(?<![\w/]){re.escape(term)}", text)
        assert first is not None, term
        assert meaning in text[: first.end() + 150], f"{page}: {term} is met before it is explained"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_that_nobody_understood_do_not_come_back(page: Path) -> None:
    text = " ".join(page.read_text().split())
    assert [words for words in NOT_UNDERSTOOD if words in text] == []
