"""`atoll sim`: what it prints, what it writes, how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.cli import sim_fuzz, sim_run
from atoll.cli.main import main
from atoll.core.records import SlotLine
from atoll.sim.faults import FaultWorld
from atoll.sim.plan import MS, Fault, LearnerSpec, Plan
from atoll.sim.scenario import load, names
from atoll.sim.search import Outcome, watched
from atoll.store.tape import decode_line

SMALL = """\
about = "Two learners."
[settings]
steps = 24
fragments = 2
interval = 6
[[learner]]
count = 2
[expect]
slots_min = 8
"""

Said = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Failures are written below the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pretend(monkeypatch: pytest.MonkeyPatch, kinds: list[str], text: str = "boom") -> None:
    """Seeds end as told; each plan has three faults, and fails as long as it has one."""

    def drawn(seed: int) -> Plan:
        faults = tuple(Fault(kind="hang", at_ns=i * MS, for_ns=MS, learner="l0") for i in range(3))
        settings = {"steps": 100, "fragments": 1, "interval": 1}
        return Plan(seed=seed, settings=settings, learners=(LearnerSpec(name="l0"),), faults=faults)

    def ended(seed: int) -> Outcome:
        kind = kinds[seed]
        if kind == "interrupt":
            raise KeyboardInterrupt
        return Outcome(seed, kind, "" if kind == "ok" else text, 10, Counter({("fault", "hang"): 1}))

    def again(plan: Plan) -> Outcome:
        fails = plan.faults and kinds[plan.seed] != "ok"
        return Outcome(plan.seed, kinds[plan.seed] if fails else "ok", text if fails else "")

    monkeypatch.setattr(sim_fuzz, "draw", drawn)
    monkeypatch.setattr(sim_fuzz, "outcome", ended)
    monkeypatch.setattr(sim_fuzz, "outcome_of", again)
    monkeypatch.setattr(sim_fuzz, "gaps", lambda total, seeds: [])


def fuzz(kinds: list[str], *more: str) -> int:
    return main(["sim", "fuzz", "--seeds", str(len(kinds)), "--jobs", "1", *more])


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sim", "sim has the commands fuzz, run, list, not nothing; try"),
        ("sim dance", "not 'dance'"),
        ("sim fuzz --seeds x", "seeds='x' must be a whole number"),
        ("sim fuzz --seed x", "seed='x' must be a whole number"),
        ("sim fuzz --seeds 0", "seeds=0 must be at least 1"),
        ("sim fuzz --jobs 0", "jobs=0 must be at least 1"),
        ("sim fuzz --seed -1", "seed=-1 must be at least 0"),
        ("sim fuzz --minutes nan", "minutes=nan must be a number above 0"),
        ("sim fuzz --minutes 0", "minutes=0.0 must be a number above 0"),
        ("sim run", "an argument is missing: a scenario file, or a name from `atoll sim list`"),
        ("sim run half-sped", "did you mean 'half-speed'?"),
        ("sim run nowhere.toml", "nowhere.toml: there is no such file"),
        ("sim run half-speed --repeat 0", "repeat=0 must be at least 1"),
        ("sim list all", "Unrecognized options: all"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(words: str, message: str, capsys: Said) -> None:
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("atoll: ")
    assert said.count("\n") == 1
    assert message in said


def test_a_bad_scenario_file_is_named(here: Path, capsys: Said) -> None:
    (here / "x.toml").write_text(SMALL.replace("count = 2", "count = 0"))
    assert main(["sim", "run", "x.toml"]) == 2
    assert capsys.readouterr().err == "atoll: x.toml: [[learner]] 1: count=0 must be at least 1 and at most 4096\n"


def test_failures_that_cannot_be_written_are_bad_input(
    monkeypatch: pytest.MonkeyPatch, here: Path, capsys: Said
) -> None:
    pretend(monkeypatch, ["safety"])
    (here / "sim-failures").write_text("a file")
    assert fuzz(["safety"]) == 2
    assert "sim-failures cannot be written" in capsys.readouterr().err


def test_failures_that_can_no_longer_be_written_are_told_and_counted(
    monkeypatch: pytest.MonkeyPatch, here: Path, capsys: Said
) -> None:
    """The disk filled up meanwhile: what was found is worth more than its file."""
    pretend(monkeypatch, ["ok", "safety"])
    ended = sim_fuzz.outcome

    def fills(seed: int) -> Outcome:
        (here / "sim-failures").write_text("a file")
        return ended(seed)

    monkeypatch.setattr(sim_fuzz, "outcome", fills)
    assert fuzz(["ok", "safety"]) == 4
    assert "sim-failures/safety-1.toml cannot be written" in capsys.readouterr().out


# ---------------------------------------------------------------- fuzz


@pytest.mark.parametrize(
    ("kinds", "code"),
    [
        (["ok", "ok"], 0),
        (["ok", "crash"], 1),
        (["crash", "liveness", "ok"], 5),
        (["liveness", "safety", "crash"], 4),
    ],
)
def test_the_worst_outcome_is_the_exit_status(
    kinds: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    pretend(monkeypatch, kinds)
    assert fuzz(kinds) == code
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"{len(kinds)} seeds in 0.0 min (")
    assert "10.0 slots per seed" in last
    assert last.endswith("clean" if code == 0 else ")")


def test_a_failure_says_what_was_drawn_and_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch, capsys: Said) -> None:
    kinds = ["ok", "safety"]
    pretend(monkeypatch, kinds, "token merged twice")
    fuzz(kinds)
    said = capsys.readouterr().out
    assert "seed 1: limit" in said
    assert "safety: token merged twice\n" in said
    assert "repeat with: atoll sim fuzz --seeds 1 --seed 1 --jobs 1\n" in said
    assert "3 faults, 1 learner, 100 steps -> 1 fault, 1 learner, 1 step\n" in said
    assert "repeat with: atoll sim run sim-failures/safety-1.toml\n" in said
    assert len(load("sim-failures/safety-1.toml").faults) == 1


def test_no_shrink_keeps_the_plan_as_it_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ["safety"])
    assert fuzz(["safety"], "--no-shrink") == 4
    assert len(load("sim-failures/safety-0.toml").faults) == 3


def test_one_failure_of_each_sort_is_kept_and_at_most_5(
    monkeypatch: pytest.MonkeyPatch, here: Path, capsys: Said
) -> None:
    pretend(monkeypatch, ["safety"] * 9, "boom")
    ended = sim_fuzz.outcome
    words = ["a 1", "a 2", "b", "c", "d", "e", "f", "g", "h"]
    monkeypatch.setattr(sim_fuzz, "outcome", lambda seed: Outcome(seed, ended(seed).kind, words[seed]))
    fuzz(words, "--no-shrink")
    kept = sorted(path.stem for path in (here / "sim-failures").iterdir())
    assert kept == ["safety-0", "safety-2", "safety-3", "safety-4", "safety-5"]
    assert "seed 1: safety again: a 2\n" in capsys.readouterr().out


def test_gate__what_was_met_too_seldom_is_exit_6(monkeypatch: pytest.MonkeyPatch, capsys: Said) -> None:
    pretend(monkeypatch, ["ok", "crash"])
    monkeypatch.setattr(sim_fuzz, "gaps", lambda total, seeds: [f"fault {i}: never" for i in range(12)])
    assert fuzz(["ok"]) == 0
    assert "met too seldom" not in capsys.readouterr().out, "too short a search for a table"
    assert fuzz(["ok"], "--gate") == 6
    assert "met too seldom: fault 11: never\n" in capsys.readouterr().out
    assert fuzz(["ok", "crash"], "--gate", "--no-shrink") == 1, "a failure is worse than a gap"


def test_a_longer_search_prints_its_coverage(monkeypatch: pytest.MonkeyPatch, capsys: Said) -> None:
    pretend(monkeypatch, ["ok"] * 20)
    monkeypatch.setattr(sim_fuzz, "gaps", lambda total, seeds: [f"fault {i}: never" for i in range(12)])
    assert fuzz(["ok"] * 20) == 0
    said = capsys.readouterr().out
    assert "met in 20 seeds" in said
    assert "met too seldom: fault 9: never\nmet too seldom: 2 more; --gate lists them all\n" in said


def test_ctrl_c__what_was_done_is_printed_and_exit_130(monkeypatch: pytest.MonkeyPatch, capsys: Said) -> None:
    pretend(monkeypatch, ["ok", "ok", "interrupt"])
    assert fuzz(["ok"] * 3) == 130
    assert capsys.readouterr().out.splitlines()[-1].endswith("clean, interrupted")


def test_progress_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: Said) -> None:
    pretend(monkeypatch, ["ok"] * 4)
    monkeypatch.setattr(sim_fuzz, "PROGRESS_S", 0.0)
    fuzz(["ok"] * 4)
    assert "2 of 4 seeds, " in capsys.readouterr().out


def test_minutes_end_a_search(monkeypatch: pytest.MonkeyPatch, capsys: Said) -> None:
    pretend(monkeypatch, ["ok"] * 1000)
    fuzz(["ok"] * 1000, "--minutes", "1e-9")
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 seeds in")


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_clean_seeds_exit_0(jobs: str, capsys: Said) -> None:
    assert main(["sim", "fuzz", "--seeds", "2", "--seed", "1", "--jobs", jobs]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 seeds in ")


def test_a_worker_that_dies_is_told_and_not_waited_for(monkeypatch: pytest.MonkeyPatch, capsys: Said) -> None:
    monkeypatch.setattr(sim_fuzz, "outcome", os._exit)
    assert main(["sim", "fuzz", "--seeds", "2", "--jobs", "2"]) == 2
    assert capsys.readouterr().err.startswith("atoll: a worker process died")


# ---------------------------------------------------------------- run and list


@pytest.fixture
def small(here: Path) -> Iterator[Path]:
    path = here / "small.toml"
    path.write_text(SMALL)
    return path


def test_run_says_what_it_is_about_and_what_was_reached(small: Path, capsys: Said) -> None:
    assert main(["sim", "run", str(small), "--repeat", "3"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{small}: Two learners."
    assert said[1] == "ok"
    assert said[2].startswith("8 slots in ")
    assert any(line.split() == ["slots_min", "8", "8"] for line in said)
    assert said[-1] == "3 equal traces"


def test_run_by_name(capsys: Said) -> None:
    assert main(["sim", "run", "half-speed"]) == 0
    assert capsys.readouterr().out.startswith("half-speed: ")


def test_trace_is_a_tape(small: Path, here: Path, capsys: Said) -> None:
    assert main(["sim", "run", str(small), "--trace", "tape.jsonl"]) == 0
    lines = (here / "tape.jsonl").read_bytes().splitlines()
    entries = [decode_line(line) for line in lines]
    assert [i for i, _, _ in entries] == list(range(len(lines)))
    assert sum(isinstance(record, SlotLine) for _, _, record in entries) == 8 + 2
    assert main(["sim", "run", str(small), "--trace", "no/where.jsonl"]) == 2
    assert "trace='no/where.jsonl' cannot be written" in capsys.readouterr().err


def test_a_missed_promise_is_exit_4(small: Path, capsys: Said) -> None:
    small.write_text(SMALL.replace("slots_min = 8", "slots_min = 9"))
    assert main(["sim", "run", str(small)]) == 4
    assert "missed: slots_min=9 was promised, the run reached 8 (" in capsys.readouterr().out


def test_no_progress_is_exit_5(small: Path, capsys: Said) -> None:
    small.write_text("limit_ms = 500\n" + SMALL)
    assert main(["sim", "run", str(small)]) == 5
    assert "\nliveness: " in capsys.readouterr().out


def test_traces_that_differ_are_exit_4(small: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said) -> None:
    traces = iter([b"a\nb\n", b"a\nb\n", b"a\nc\n"])
    monkeypatch.setattr(sim_run, "_trace", lambda world: next(traces))
    assert main(["sim", "run", str(small), "--repeat", "3"]) == 4
    assert "run 3 of 3 differs from the first at line 1" in capsys.readouterr().out


def test_list_names_all(capsys: Said) -> None:
    assert main(["sim", "list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == names()


def test_help(capsys: Said) -> None:
    assert main(["sim", "--help"]) == 0
    assert "fuzz" in capsys.readouterr().out


def test_torch_is_not_imported_on_this_path(small: Path) -> None:
    code = f"""
import sys
from atoll.cli.main import main
assert main(["sim", "run", {str(small)!r}]) == 0
assert main(["sim", "fuzz", "--seeds", "1", "--jobs", "1"]) == 0
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_run__a_trace_over_the_scenario_itself_is_refused(here: Path, capsys: Said) -> None:
    path = here / "mine.toml"
    path.write_text("[settings]\nsteps = 4\nfragments = 1\ninterval = 1\n[[learner]]\n")
    before = path.read_text()
    assert main(["sim", "run", str(path), "--trace", str(path)]) == 2
    assert "is the scenario itself" in capsys.readouterr().err
    assert path.read_text() == before


def test_run__a_fault_that_never_strikes_is_told(here: Path, capsys: Said) -> None:
    path = here / "late.toml"
    fault = '[[fault]]\nkind = "crash"\nlearner = "l0"\nat_ms = 100000\n'
    path.write_text(f"[settings]\nsteps = 4\nfragments = 1\ninterval = 1\n[[learner]]\n{fault}")
    assert main(["sim", "run", str(path)]) == 0
    assert "did not strike: [[fault]] 1, crash" in capsys.readouterr().out


def test_run__says_how_far_it_is(here: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    path = here / "small.toml"
    path.write_text(SMALL)
    said = []

    def slowly(plan: Plan, on_start: Callable[[FaultWorld], None]) -> tuple[Outcome, FaultWorld | None]:
        def until_told(world: FaultWorld) -> None:
            on_start(world)
            deadline_s = time.monotonic() + 30
            while not "".join(said) and time.monotonic() < deadline_s:
                said.append(capsys.readouterr().err)

        return watched(plan, until_told)

    monkeypatch.setattr(sim_run, "PROGRESS_S", 0.001)
    monkeypatch.setattr(sim_run, "watched", slowly)
    assert main(["sim", "run", str(path)]) == 0
    assert "".join(said).startswith("slot 0 of 8, 0.0 s of virtual time\n")
