"""Bad input: one line on stderr with the value and the remedy, exit status 2, nothing half written."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from atoll.cli.main import main
from tests.watch.worlds import equal, tape_of, world, write_tape

TEXT = "the quick brown fox jumps over the lazy dog\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a text, a short text, an empty file, a binary one and a foreign model file."""
    monkeypatch.chdir(tmp_path)
    for name in ("ATOLL_TOKEN", "ATOLL_TOKEN_FILE", "ATOLL_ADDRESS", "ATOLL_NAME"):
        monkeypatch.delenv(name, raising=False)
    Path("text.txt").write_text(TEXT * 2000)
    Path("short.txt").write_text(TEXT)
    Path("empty.txt").write_text("")
    Path("binary.txt").write_bytes(b"\0\xff\xfe" * 1000)
    Path("folder").mkdir()
    Path("broken.safetensors").write_bytes(b"not a model")
    save_file({"embed.weight": torch.zeros(3, 4)}, "foreign.safetensors")
    before = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(before)


def refused(capsys, *argv: str, code: int = 2) -> str:
    """Run the command; its one line on stderr."""
    assert main(argv) == code
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert len(lines) == 1, said.err
    assert lines[0].startswith("atoll: ")
    return lines[0]


TRAIN = [
    (["--quorum", "5"], "quorum=5 must be between 1 and learners=4"),
    (["--quorum", "0"], "quorum=0 must be between 1 and learners=4"),
    (["--quorum", "2", "--mode", "streaming"], "quorum=2 does nothing in mode=streaming"),
    (["--interval", "25", "--fragments", "8"], "interval=25 must be a multiple of fragments=8; try 32"),
    (["--seed", str(10**20)], f"seed={10**20} must be between"),
    (["--interval", "0"], "interval=0 must be a multiple"),
    (["--fragments", "0"], "fragments=0 must be between 1 and"),
    (["--fragments", "50", "--interval", "50"], "fragments=50 is more than the model's"),
    (["--mode", "diloco", "--fragments", "4"], "mode=diloco needs fragments=1 and overlap=0"),
    (["--mode", "sync"], "mode='sync' is unknown; choose one of decoupled, streaming, diloco"),
    (["--model", "huge"], "model='huge' is unknown; use one of tiny, tiny-moe, small"),
    (["--merge", "median"], "merge='median' is unknown; choose one of rda, average"),
    (["--take", "both"], "take='both' is unknown; choose one of overwrite, rebase"),
    (["--overlap", "-1"], "overlap=-1 must be between 0 and"),
    (["--outer-lr", "nan"], "outer_lr=nan must be above 0 and at most 100"),
    (["--outer-momentum", "1"], "outer_momentum=1.0 must be at least 0 and below 1"),
    (["--inner-lr", "0"], "inner_lr=0.0 must be a finite number above 0"),
    (["--inner", "sgd"], "inner='sgd' is unknown; choose one of adamw, muon"),
    (["--inner", "adamw", "--muon-lr", "0.01"], "muon_lr=0.01 does nothing with inner='adamw'; omit it, or use muon"),
    (["--inner", "muon", "--muon-lr", "inf"], "muon_lr=inf must be a finite number above 0"),
    (["--learners", "0"], "learners=0 must be between 1 and 256"),
    (["--steps", "0"], "steps=0 must be between 1 and"),
    (["--steps", "10", "--tokens", "10"], "say the same thing twice"),
    (["--tokens", "0"], "tokens=0 must be at least 1"),
    (["--threads", "999"], "threads=999 must be between 1 and the"),
    (["--slow", "l9=2"], "slow 'l9=2' names no learner of this run; they are l1, l2, l3, l4"),
    (["--slow", "l1=0.5"], "slow 'l1=0.5' must be NAME=FACTOR"),
    (["--slow", "l1=2", "l1=3"], "give one factor per learner"),
    (["--listen", "nowhere"], "listen='nowhere' must be HOST:PORT"),
    (["--listen", "0.0.0.0:0"], "listening on 0.0.0.0 needs a token; set ATOLL_TOKEN"),
    (["--init", "missing.safetensors"], "init file missing.safetensors cannot be read"),
    (["--init", "broken.safetensors"], "init file broken.safetensors cannot be read"),
    (["--init", "foreign.safetensors"], "init file foreign.safetensors lacks tensor blocks.0"),
    (["--data", "missing.txt"], "data 'missing.txt' does not exist; give a file"),
    (["--data", "empty.txt"], "data 'empty.txt' holds no text"),
    (["--data", "folder"], "data 'folder' holds no text"),
    (["--data", "binary.txt"], "data 'binary.txt' is binary, not UTF-8 text"),
    (["--data", "short.txt"], "give more text or fewer learners"),
    (["--steps", "many"], "steps='many' must be a whole number, written in digits; `atoll train --help`"),
    (["--tokens", "1e6"], "atoll: tokens='1e6' must be a whole number, written in digits; `atoll train --help`"),
    (["--outer-lr", "x"], "atoll: outer_lr='x' must be a number; `atoll train --help`"),
    (["--eval-every", "often"], "eval_every='often' must be a number with its unit, such as 30s"),
    (["--frobnicate"], "Unrecognized options: --frobnicate"),
    (["--lerners", "5"], "Unrecognized options: --lerners, 5; did you mean --learners; `atoll train --help` lists"),
]


@pytest.mark.parametrize(("argv", "told"), TRAIN, ids=[" ".join(argv) for argv, _ in TRAIN])
def test_train__bad_input_is_one_line_and_leaves_nothing(here, capsys, argv, told):
    data = [] if "--data" in argv else ["--data", "text.txt"]
    assert told in refused(capsys, "train", "--run", "run", *data, *argv)
    assert not (here / "run").exists()
    assert not (here / "runs").exists()


def test_train__a_run_directory_of_another_run_is_left_alone(here, capsys):
    run = here / "run"
    run.mkdir()
    (run / "run.toml").write_text('run_id = "other"\n')
    told = refused(capsys, "train", "--run", "run", "--data", "text.txt")
    assert "run directory 'run' holds another run; choose another with --run" in told
    assert [path.name for path in run.iterdir()] == ["run.toml"]
    (run / "run.toml").rename(run / "precious.txt")
    assert "is not an empty directory" in refused(capsys, "train", "--run", "run", "--data", "text.txt")
    assert "is not an empty directory" in refused(capsys, "train", "--run", "text.txt", "--data", "text.txt")
    assert "is a file; choose another" in refused(capsys, "train", "--run", "text.txt/run", "--data", "text.txt")


@pytest.mark.parametrize("command", ["train", "syncer"])
def test_a_port_in_use_is_named(here, capsys, command):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        data = ["--data", "text.txt"] if command == "train" else []
        told = refused(capsys, command, "--run", "run", "--listen", f"127.0.0.1:{port}", *data)
    assert f"listen port={port} of 127.0.0.1 cannot be opened" in told
    assert not (here / "run").exists()


def test_syncer__bad_input(here, capsys):
    assert "min_ready" in refused(capsys, "syncer", "--run", "run", "--min-ready", "0")
    told = "quorum=3 must be between 1 and min_ready=1"
    assert told in refused(capsys, "syncer", "--run", "run", "--quorum", "3")
    ports = ["--listen", "127.0.0.1:7700", "--bulk-port", "7700"]
    told = "bulk_port=7700 is the port of listen='127.0.0.1:7700' too"
    assert told in refused(capsys, "syncer", "--run", "run", *ports)
    assert "steps=0" in refused(capsys, "syncer", "--run", "run", "--steps", "0")
    init = ["--init", "no.safetensors", "--listen", "127.0.0.1:0"]
    assert "init file" in refused(capsys, "syncer", "--run", "run", *init)
    assert refused(capsys, "syncer").startswith("atoll: --run is missing: directory of the run, new or empty; `atoll")
    assert not (here / "run").exists()


def test_learner__no_syncer_at_the_address_is_bounded_and_named(here, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    told = [
        refused(capsys, "learner", "--data", "text.txt", "--name", "x", "--timeout-s", "1.5", "--address", address),
        refused(capsys, "learner", "--data", "text.txt", "--address", "nowhere"),
        refused(capsys, "learner", "--data", "text.txt", "--index", "3", "--of", "2"),
        refused(capsys, "learner", "--data", "text.txt", "--model", "huge"),
        refused(capsys, "learner", "--data", "missing.txt"),
        refused(capsys, "learner", "--data", "text.txt", "--slow-factor", "0.1"),
        refused(capsys, "learner", "--data", "text.txt", "--name", "a b", "--timeout-s", "1"),
    ]
    for line, part in zip(
        told,
        (
            *(f"no syncer answers at {address}", "'nowhere'", "index=3", "'huge'", "missing.txt"),
            *("slow_factor=0.1", "'a b'"),
        ),
        strict=True,
    ):
        assert part in line
    assert not (here / "runs").exists()


def test_learner__a_name_that_cannot_be_is_refused_before_the_search_begins(here, capsys):
    assert main(["learner", "--data", "text.txt", "--name", "a/b"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("atoll: name='a/b' must be ")


def test_evaluate_and_sample__of_what_is_no_run(here, capsys):
    (here / "run").mkdir()
    for command in ("evaluate", "sample"):
        assert refused(capsys, command).startswith("atoll: a path is missing: directory of the run; `atoll")
    assert "holds no run: run.toml is missing" in refused(capsys, "evaluate", "run")
    (here / "run" / "run.toml").write_text('run_id = "r"\n')
    for command in ("evaluate", "sample"):
        assert "has no model: it has not begun: its tape is empty" in refused(capsys, command, "run")
    for name in ("run", "run/run.toml"):  # as after a syncer that was killed a while ago
        os.utime(here / name, (0, 0))
    assert "has no model: it broke off before it began" in refused(capsys, "evaluate", "run")
    (here / "run" / "run.toml").write_text('run_id = "r"\nmode = "data-parallel"\n')
    assert "writes it when all its ranks have ended" in refused(capsys, "evaluate", "run")
    (here / "run" / "summary.json").write_text("{}")
    assert "it ended early, and mode=data-parallel writes none then" in refused(capsys, "evaluate", "run")
    (here / "run" / "model").mkdir()
    (here / "run" / "model" / "manifest.json").write_text(json.dumps({"fingerprint": "?", "file_hash": "?"}))
    told = refused(capsys, "sample", "run")
    assert "is none of tiny, tiny-moe, small; load it into yours, in Python: atoll.load(model, " in told
    (here / "run" / "model" / "manifest.json").write_text("{")
    assert "cannot be read" in refused(capsys, "sample", "run")


def test_evaluate__of_a_run_with_a_tape_and_no_model__says_what_became_of_it(here, capsys):
    lines = tape_of(world(equal(2), steps=24))
    running = lines[: len(lines) // 2]
    run = write_tape(here / "run", running)
    (run / "run.toml").write_text('run_id = "r"\n')
    assert "has no model: it goes on and writes it at its end; `atoll pull RUN" in refused(capsys, "evaluate", "run")
    os.utime(run / "tape.jsonl", (1, 1))
    told = refused(capsys, "evaluate", "run")
    assert "has no model: it broke off: its syncer was killed, or its machine; `atoll pull RUN --to DIR` saves" in told
    write_tape(run, lines)
    assert "has no model: it ended before anything was merged" in refused(capsys, "evaluate", "run")


def test_command_line__unknown_command_help_and_version(capsys):
    assert "command 'fly' is unknown; use one of train, syncer" in refused(capsys, "fly")
    assert main(["--help"]) == 0
    assert "atoll COMMAND" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert main([]) == 2
    with pytest.raises(SystemExit) as info:
        main(["train", "--help"])
    assert info.value.code == 0
    assert "--keep-contributions" in capsys.readouterr().out


def test_help__loads_neither_torch_nor_tyro():
    script = (
        "import sys\nfrom atoll.cli.main import main\nmain(['--help'])\n"
        "assert not {'torch', 'tyro', 'grpc'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, env=os.environ)


def test_train_help__loads_no_torch():
    script = (
        "import sys\nfrom atoll.cli.main import main\ntry:\n main(['train', '--help'])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, env=os.environ)


@pytest.mark.parametrize("argv", [
    ("status", "a\nb"), ("pull", "a\nb", "--to", "x"), ("train", "--data", "a\r\nb"),
    ("syncer", "--run", "new", "--init", "a\nb"), ("evaluate", "a\u2028b"),
])  # fmt: skip
def test_values_of_several_lines__are_told_in_one(here, capsys, argv) -> None:
    refused(capsys, *argv)
