"""The audit passes on a real run and fails when any one contribution, counter or version of it is altered."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from atoll.sim.draw import draw
from atoll.sim.search import watched
from tests.watch.worlds import tape_of, write_tape

ROOT = Path(__file__).parent.parent.parent


def load_audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "tools" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


AUDIT = load_audit()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of two learners, one slow, in `overwrite` so that every fate but lost occurs."""
    directory = tmp_path_factory.mktemp("audit") / "run"
    command = [sys.executable, "-m", "atoll", "train", "--learners", "2", "--steps", "24", "--run", str(directory)]
    command += ["--take", "overwrite", "--slow", "l2=1.5", "--keep-contributions", "--quiet", "--merge", "rda"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    target = tmp_path / "copy"
    shutil.copytree(run, target)
    return target


def audit(directory: Path) -> str | None:
    """None when all is equal, else what differs."""
    try:
        AUDIT.main(str(directory))
    except AUDIT.Differs as error:
        return str(error) or "differs"
    except (KeyError, TypeError, ValueError, StopIteration) as error:
        return f"damaged: {error}"
    return None


def edit_tape(directory: Path, kind: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the middle line of a kind."""
    path = directory / "tape.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = [line for line in lines if line["kind"] == kind and line.get("merged") != []]
    assert found, f"the run has no {kind}"
    change(found[len(found) // 2])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def flip_byte(path: Path, at: int = -5) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_it_passes_on_the_run_itself(run: Path) -> None:
    assert audit(run) is None
    told = json.loads((run / "summary.json").read_text())["token_pieces"]
    assert told["overwritten"] > 0
    assert told["merged"] > 0


def test_it_passes_on_a_run_with_the_defaults(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    command = [sys.executable, "-m", "atoll", "train", "--learners", "2", "--steps", "24", "--run", str(directory)]
    subprocess.run([*command, "--keep-contributions", "--quiet"], check=True, timeout=240)
    assert audit(directory) is None


def test_a_run_without_contributions_cannot_be_audited__status_2(copy: Path) -> None:
    shutil.rmtree(copy / "contributions")
    (copy / "contributions").mkdir()
    done = subprocess.run([sys.executable, "tools/audit.py", str(copy)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "ran without --keep-contributions" in done.stdout


def test_a_run_that_was_stopped_before_its_first_slot_has_nothing_to_audit__status_2(copy: Path) -> None:
    path = copy / "tape.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    first = next(line["i"] for line in lines if line["kind"] == "startline")
    over = {"i": first, "kind": "phaseline", "now_ns": 1, "phase": "over", "slot": 0, "reason": "stopped"}
    ended = {**lines[-2], "i": first + 1}
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines[:first], over, ended]))
    done = subprocess.run([sys.executable, "tools/audit.py", str(copy)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "it was stopped before its first slot, and nothing was merged" in done.stdout


def test_it_imports_nothing_of_atoll_and_is_short() -> None:
    text = (ROOT / "tools" / "audit.py").read_text()
    assert "import atoll" not in text
    assert "from atoll" not in text
    assert len(text.splitlines()) < 400


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("reportline", "steps"),
        ("reportline", "tokens"),
        ("reportline", "clock"),
        ("reportline", "loss_sum"),
        ("quorumline", "slot"),
        ("quorumline", "needed"),
        ("quorumline", "ready"),
        ("closedline", "ready"),
        ("slotline", "slot"),
        ("slotline", "piece"),
        ("publishedline", "slot"),
        ("lifeendline", "steps"),
        ("lifeendline", "tokens"),
        ("lifeendline", "generation"),
        ("lifeendline", "step_ns_max"),
    ],
)
def test_it_fails_on_a_changed_counter(copy: Path, kind: str, field: str) -> None:
    step = 10**9 if field in ("loss_sum", "step_ns_max") else 1
    edit_tape(copy, kind, lambda line: line.update({field: line[field] + step}))
    assert audit(copy) is not None


@pytest.mark.parametrize("field", ["merged", "overwritten", "lost"])
def test_it_fails_on_a_changed_book(copy: Path, field: str) -> None:
    edit_tape(copy, "lifeendline", lambda line: line[field].__setitem__(0, line[field][0] + 1))
    assert audit(copy) is not None


@pytest.mark.parametrize("field", ["base", "version"])
def test_it_fails_on_a_changed_version(copy: Path, field: str) -> None:
    edit_tape(copy, "slotline", lambda line: line[field].__setitem__(1, line[field][1] + 1))
    assert audit(copy) is not None


@pytest.mark.parametrize("field", ["seq", "anchor", "c_steps", "c_tokens", "own_step", "weight", "hash", "norm"])
def test_it_fails_on_a_changed_contribution_of_the_tape(copy: Path, field: str) -> None:
    def change(line: dict[str, Any]) -> None:
        row = line["merged"][-1]
        value = row[field]
        row[field] = [value[0], value[1] + 1] if field == "anchor" else "0" * 32 if field == "hash" else value + 1

    edit_tape(copy, "slotline", change)
    assert audit(copy) is not None


@pytest.mark.parametrize("field", ["theta_hash", "momentum_hash", "update_hash"])
def test_it_fails_on_a_changed_hash(copy: Path, field: str) -> None:
    edit_tape(copy, "slotline", lambda line: line.update({field: "f" * 32}))
    assert audit(copy) is not None


def test_it_fails_on_every_single_contribution_that_is_altered(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    shutil.copytree(run, target)
    kept = sorted((target / "contributions").rglob("*.safetensors"))
    tape = (run / "tape.jsonl").read_text()
    for path in kept:
        name, generation, seq = path.stem.rsplit("-", 2) if "version" not in str(path) else ("", "", "")
        if name and f'"name":"{name}","generation":{generation},"seq":{seq}' not in tape:
            continue
        flip_byte(path)
        with pytest.raises(AUDIT.Differs):
            AUDIT.redo_merges(AUDIT.Run(target))
        flip_byte(path)
    assert audit(target) is None
    assert len(kept) > 20


@pytest.mark.parametrize(
    "file",
    ["model/model.safetensors", "commits/0000.a", "commits/0003.b", "contributions/version-0/piece-0000.safetensors"],
)
def test_it_fails_on_a_changed_file(copy: Path, file: str) -> None:
    flip_byte(copy / file)
    if file.startswith("commits"):
        other = file[:-1] + ("b" if file.endswith("a") else "a")
        flip_byte(copy / other)
    assert audit(copy) is not None


def test_it_fails_on_a_step_log_that_says_otherwise(copy: Path) -> None:
    path = next((copy / "steps").glob("l1-*.jsonl"))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[4]["tokens"] += 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert audit(copy) is not None


def said(directory: Path) -> str:
    """The last words of an audit that finds all equal."""
    done = subprocess.run([sys.executable, "tools/audit.py", str(directory)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_without_step_logs_it_says_what_it_cannot_check(copy: Path) -> None:
    assert "audit: all equal: " in said(copy)
    gone = sorted((copy / "steps").glob("l1-*.jsonl"))
    for path in gone:
        path.unlink()
    some = said(copy)
    assert "audit: equal as far as it was logged: " in some
    assert f"taken as reported: steps, tokens and losses of {', '.join(path.stem for path in gone)};" in some
    shutil.rmtree(copy / "steps")
    assert "l1-" in said(copy)
    assert "l2-" in said(copy)


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("reportline", "steps"),
        ("reportline", "clock"),
        ("reportline", "tokens"),
        ("lifeendline", "tokens"),
        ("closedline", "ready"),
        ("slotline", "theta_hash"),
        ("publishedline", "slot"),
    ],
)
def test_without_step_logs_it_checks_the_rest(copy: Path, kind: str, field: str) -> None:
    shutil.rmtree(copy / "steps")
    assert audit(copy) is None
    far = "f" * 32 if field == "theta_hash" else None
    edit_tape(copy, kind, lambda line: line.update({field: far or line[field] + 10**6}))
    assert audit(copy) is not None


def test_it_counts_every_clock_again__worlds_in_which_anything_goes_wrong(tmp_path: Path) -> None:
    """Seed 45, 115 and 142: the syncer stands still while a life is granted that is no member yet."""
    audited = 0
    for seed in (*range(12), 45, 115, 142):
        outcome, world = watched(draw(seed))
        assert world is not None, outcome
        made = AUDIT.Run(write_tape(tmp_path / str(seed), tape_of(world)))
        audited += AUDIT.check_pace(made)
    assert audited > 100


def test_a_torn_last_line_is_none(copy: Path) -> None:
    with (copy / "tape.jsonl").open("a") as tape:
        tape.write('{"i":9999,"kind":"noti')
    assert audit(copy) is None


def test_it_fails_on_a_missing_line(copy: Path) -> None:
    path = copy / "tape.jsonl"
    lines = path.read_text().splitlines()
    del lines[len(lines) // 2]
    path.write_text("\n".join(lines) + "\n")
    assert audit(copy) is not None


def figures(summary: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, value in summary.items():
        if isinstance(value, dict):
            rows += figures(value, (*prefix, name))
        elif isinstance(value, int | float):
            rows.append((*prefix, name))
    return rows


def test_it_fails_on_every_figure_of_the_summary_that_the_issue_names(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    recounted = AUDIT.recount(AUDIT.Run(run))
    names = ("learners", "seed", "slots", "steps", "wall_s", "tokens", "token_pieces", "tokens_per_s", "yield")
    names += ("blocked_s", "step_max_s", "training_uptime", "merge_uptime", "train_loss")
    paths = figures({name: summary[name] for name in names})
    paths += [("participation", "mean"), ("participation", "lowest_fragment", "value")]
    paths += [("participation", "lowest_learner", "value")]
    AUDIT.compare(recounted, summary)
    for path in paths:
        changed = json.loads(json.dumps(summary))
        place = changed
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] += 1
        with pytest.raises(AUDIT.Differs):
            AUDIT.compare(recounted, changed)
    assert len(paths) > 20
