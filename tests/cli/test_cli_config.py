"""`--config FILE.toml`: every option from a file, the command line above it, and one line for what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from atoll.cli.evaluate import Evaluate
from atoll.cli.learner import LearnerCommand
from atoll.cli.main import main
from atoll.cli.parse import parse
from atoll.cli.sim_fuzz import Fuzz
from atoll.cli.syncer import SyncerCommand
from atoll.cli.train import Train
from atoll.core.config import RunConfig
from atoll.errors import ConfigError
from atoll.launch.options import as_told
from atoll.store.rundir import to_toml

COMMANDS = {"train": Train, "syncer": SyncerCommand, "learner": LearnerCommand, "evaluate": Evaluate, "sim fuzz": Fuzz}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write conf.toml in the working directory."""
    monkeypatch.chdir(tmp_path)
    return lambda text: Path("conf.toml").write_text(text)


VALUES = {
    int: ("5", 5),
    float: ("0.25", 0.25),
    bool: ("true", True),
    str: ('"some"', "some"),
    Path: ('"some/where"', Path("some/where")),
    tuple[str, ...]: ('["a", "b"]', ("a", "b")),
}
"""Type -> (in a file, as an option)."""


@pytest.mark.parametrize("command", COMMANDS)
def test_config__every_option_of_every_command_comes_from_a_file(write, command):
    kind = COMMANDS[command]
    for name, hint in get_type_hints(kind).items():
        text, value = VALUES[next(option for option in (*get_args(hint), hint) if option in VALUES)]
        if hint == tuple[str, ...]:
            text, value = VALUES[hint]
        for key in {name, name.replace("_", "-")}:
            write(f"{key} = {text}\n" + ("" if name == "run" or kind is Fuzz else 'run = "here"\n'))
            assert getattr(parse(kind, command, ["--config", "conf.toml"]), name) == value, key


def test_config__the_command_line_wins(write):
    write('learners = 3\ndata = ["a", "b"]\nquiet = true\ninner-lr = 1\nrun = "x"\n')
    options = parse(Train, "train", ["--learners", "5", "--config=conf.toml", "--no-quiet", "--data", "c"])
    assert (options.learners, options.quiet, options.data) == (5, False, ("c",))
    assert (options.inner_lr, options.run) == (1.0, Path("x"))
    assert isinstance(options.inner_lr, float)
    assert parse(Train, "train", []) == parse(Train, "train", [])
    assert parse(Train, "train", []).learners == 4, "a file does not outlive its command"


BAD = [
    ("learnes = 3", "key \"learnes\" is unknown; did you mean 'learners'?"),
    ("zzz = 3", 'key "zzz" is unknown; use one of mode, quorum'),
    ('learners = "3"', 'learners="3" must be a whole number'),
    ("learners = 3.0", "learners=3.0 must be a whole number"),
    ("learners = true", "learners=true must be a whole number"),
    ('outer_lr = "high"', 'outer_lr="high" must be a number'),
    (f"outer_lr = 1{'0' * 400}", "outer_lr=a number of more than 63 bits must be a number"),
    ("quiet = 1", "quiet=1 must be true or false"),
    ("run = 7", "run=7 must be a path in quotes"),
    ('data = "a.txt"', 'data="a.txt" must be a list of texts, like ["one", "two"]'),
    ("data = [1]", "data=a list must be a list of texts"),
    ("[train]\nlearners = 3", 'key "train" is unknown'),
    ("[learners]\na = 3", "learners=a table must be a whole number"),
    ("outer_lr = 1\nouter-lr = 2", "outer_lr stands twice, with - and with _; keep one of them"),
    ("learners 3", "is not TOML: Expected '=' after a key"),
    ('config = "other.toml"', 'key "config" is unknown'),
    ("[train]\nsteps = 5", 'key "train" is unknown; options stand without tables, like steps = 600'),
]


@pytest.mark.parametrize(("text", "told"), BAD, ids=[text[:20] for text, _ in BAD])
def test_config__what_is_wrong_with_a_file_is_one_line(write, capsys, text, told):
    write(text + "\n")
    assert main(["train", "--config", "conf.toml"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert err.startswith("atoll: config 'conf.toml'")
    assert told in err


def test_config__values_are_checked_as_on_the_command_line(write, capsys):
    write("outer_lr = nan\n")
    assert main(["train", "--config", "conf.toml"]) == 2
    assert "outer_lr=nan must be above 0 and at most 100" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_config__no_file_no_name_two_names(write, tmp_path):
    Path("binary.toml").write_bytes(b"\xff\xfe")
    for argv, told in [
        (["--config", "none.toml"], "config 'none.toml' cannot be read: No such file or directory; give a TOML file"),
        (["--config", str(tmp_path)], "cannot be read: Is a directory"),
        (["--config", "binary.toml"], "config 'binary.toml' is not TOML"),
        (["--config"], "--config needs a file"),
        (["--config", "--quiet"], "--config needs a file"),
        (["--config=a", "--config", "b"], "--config stands 2 times"),
    ]:
        with pytest.raises(ConfigError, match="config") as info:
            parse(Train, "train", argv)
        assert told in str(info.value)


def test_config__the_options_of_a_run_make_it_again(write, tmp_path, monkeypatch):
    words = ["--learners", "3", "--inner-lr", "2e-3", "--data", "a", "b", "--slow", "l2=2", "--keep-contributions"]
    words += ["--init", "first.safetensors", "--run", "runs/one", "--quiet"]
    options = parse(Train, "train", words)
    write(to_toml(as_told(options)))
    again = parse(Train, "train", ["--config", "conf.toml", "--run", "runs/one", "--quiet"])
    assert again == options
    assert "run" not in as_told(options)
    assert as_told(parse(Train, "train", [])) == {}


def test_config__a_run_toml_says_where_all_options_of_that_run_are(tmp_path, capsys):
    settings = RunConfig(run_id="run-1", steps=60, fragments=4, interval=12).to_dict()
    (tmp_path / "run.toml").write_text(to_toml(settings))
    (tmp_path / "options.toml").write_text("")
    parse(Train, "train", ["--config", str(tmp_path / "run.toml")])
    whole = tmp_path / "options.toml"
    told = capsys.readouterr().err
    assert told.endswith(f"has the settings of merging only; '{whole}' has all options of that run\n")


def test_config__the_run_toml_of_an_earlier_run(write, capsys):
    settings = RunConfig(run_id="run-1", steps=60, fragments=4, interval=12, learners=3, outer_lr=0.5).to_dict()
    write(to_toml(settings))
    options = parse(Train, "train", ["--config", "conf.toml", "--learners", "2"])
    assert (options.steps, options.fragments, options.interval, options.outer_lr) == (60, 4, 12, 0.5)
    assert (options.learners, options.quorum) == (2, None)
    assert capsys.readouterr().err == "", "what is left out is what a new run has anyway"
    write(to_toml(settings | {"payload": "fp32"}))
    parse(Train, "train", ["--config", "conf.toml"])
    told = "atoll: config 'conf.toml' is an earlier run's; this command has no option for payload=\"fp32\"\n"
    assert capsys.readouterr().err == told
    write("payload = 'fp32'\n")
    with pytest.raises(ConfigError, match='key "payload" is unknown'):
        parse(Train, "train", ["--config", "conf.toml"])
