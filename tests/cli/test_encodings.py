"""Names of files and terminals in any encoding: every command says what it has to, and no name ends it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.cli.console import JsonConsole
from atoll.core.records import NoticeLine
from atoll.errors import RunError
from atoll.launch.plan import check_run_dir
from atoll.store.rundir import RECIPE_FILE, read_toml, toml_bytes
from atoll.store.tape import decode_line, encode_line
from tests.watch.worlds import equal, tape_of, world, write_tape

ODD = os.fsdecode(b"caf\xe9-\xff")
NAMES = {"letters": "d\u00e9j\u00e0 \u5dde \U0001f3dd", "no UTF-8": ODD}
TERMINALS = {
    "C": {"LANG": "C", "LC_ALL": "C"},
    "C, no UTF-8 mode": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "ascii, strict": {"PYTHONIOENCODING": "ascii:strict", "LC_ALL": "C.UTF-8"},
    "latin-1": {"PYTHONIOENCODING": "latin-1", "LC_ALL": "C.UTF-8"},
}
SCRIPT = """
import json, os, sys
from atoll.cli.main import main
for words in [json.loads(line) for line in sys.stdin]:
    sys.argv = ["atoll", *(os.fsdecode(word.encode("latin-1")) for word in words)]
    code = main()
    print(f"<{words[0]} {code}>", flush=True)
"""


@pytest.mark.parametrize("terminal", TERMINALS)
@pytest.mark.parametrize("name", NAMES)
def test_commands__print_in_any_encoding(tmp_path: Path, terminal: str, name: str) -> None:
    run, other = tmp_path / NAMES[name], tmp_path / "other"
    lines = tape_of(world(equal(2), steps=40))
    told = NoticeLine(lines[-2].now_ns, f"{run} cannot be written: \u201cd\u00e9j\u00e0\u201d")
    for each in (run, other):
        write_tape(each, [*lines[:-1], told, lines[-1]])
        (each / "run.toml").write_text('run_id = "r"\n')
        (each / RECIPE_FILE).write_bytes(toml_bytes({"data": json.dumps([str(run)])}))
    commands = {
        ("status", str(run)): 0,
        ("status", str(run), "--json"): 0,
        ("status", str(run), "--follow"): 0,
        ("report", str(run)): 0,
        ("advise", str(run)): 0,
        ("compare", str(run), str(other), "--to", str(tmp_path / "c.html")): 0,
        ("evaluate", str(run)): 2,
        ("sample", str(run)): 2,
        ("pull", str(run), "--to", str(tmp_path / "models")): 2,
        ("train", "--data", str(run / "none"), "--run", str(tmp_path / "new")): 2,
        ("syncer", "--run", str(run)): 2,
        ("train", "--config", str(run / "none.toml")): 2,
    }
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHONIO"))}
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input="".join(json.dumps([os.fsencode(word).decode("latin-1") for word in c]) + "\n" for c in commands),
        encoding="utf-8",
        errors="replace",
        env=environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | TERMINALS[terminal],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in found.stderr, found.stderr
    codes = re.findall(r"<(\w+) (\d)>", found.stdout)
    assert codes == [(words[0], str(code)) for words, code in commands.items()]
    errors = [line for line in found.stderr.splitlines() if line.startswith("atoll: ")]
    assert len(errors) == list(commands.values()).count(2), found.stderr


def test_tape__takes_a_text_with_any_name() -> None:
    line = NoticeLine(1, f"{ODD} was removed")
    assert decode_line(encode_line(0, line))[2] == replace(line, text="caf\\udce9-\\udcff was removed")


def test_options__keep_the_bytes_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(toml_bytes({"data": (ODD, "d\u00e9j\u00e0")}))
    assert read_toml(tmp_path / "x.toml") == {"data": [ODD, "d\u00e9j\u00e0"]}


def test_json__takes_a_summary_with_any_name(capsys: pytest.CaptureFixture[str]) -> None:
    JsonConsole().closing([], {"data": [ODD], "eval_loss": float("nan")})
    assert json.loads(capsys.readouterr().out) == {"kind": "summary", "data": ["caf\\udce9-\\udcff"], "eval_loss": None}


def test_run_directory__that_safetensors_cannot_open_is_refused(tmp_path: Path) -> None:
    """Training would go on, and none of its commits could be read."""
    check_run_dir(tmp_path / NAMES["letters"])
    with pytest.raises(RunError, match="has a name that is not UTF-8; choose another"):
        check_run_dir(tmp_path / ODD)
