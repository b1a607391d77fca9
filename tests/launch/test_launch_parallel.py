"""mode=data-parallel: what it computes, how it ends, and what it refuses. Real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
import pytest
import torch

from atoll.cli.main import main
from atoll.errors import ConfigError, RunError
from atoll.launch.options import LocalOptions
from atoll.launch.parallel import prepare_parallel
from atoll.recipes.loop import TrainConfig, load_corpus, optimizer_of, own_batches, set_rate, train_step
from atoll.recipes.model import build_model
from atoll.recipes.schedule import rate_factor
from atoll.store.steps import StepReader, StepRow
from atoll.watch.charts import Charts
from atoll.watch.parallel import StepLines, summarise_parallel
from atoll.watch.read import read_run
from atoll.watch.summary import fold, report_span_s, summarise
from tests.waiting import wait_for

TEXT = "the quick brown fox jumps over the lazy dog, and the dog does not mind it at all\n"


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 1500)
    return path


def start(run: Path, text: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "atoll", "train", "--mode", "data-parallel", "--learners", "2", *options]
    return subprocess.Popen(
        [*command, "--run", str(run), "--data", str(text)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def await_steps(process: subprocess.Popen[str], run: Path, steps: int) -> list[psutil.Process]:
    """The run's processes, once the first rank has logged so many steps."""
    log = run / "steps" / "l1-1.jsonl"
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) >= steps, f"{steps} steps", of=process)
    return psutil.Process(process.pid).children(recursive=True)


def reference(text: Path, steps: int) -> list[float]:
    """The same in one process: the loss of each step on the batches of both ranks together."""
    common = {"run_dir": Path("none"), "data": (str(text),), "learners": 2}
    configs = [TrainConfig(name=f"l{i + 1}", learner_index=i, **common) for i in (0, 1)]
    corpus, model = load_corpus(str(text)), build_model("tiny", 0)
    optimizer = optimizer_of(configs[0], model)
    feeds = [own_batches(corpus, config, 1) for config in configs]
    losses = []
    for step in range(steps):
        inputs, targets = (torch.cat(parts) for parts in zip(*map(next, feeds), strict=True))
        set_rate(optimizer, 1e-3 * rate_factor(step / steps, warmup=0.05))
        losses.append(train_step(model, optimizer, inputs, targets, clip=1.0, who="both"))
    return losses


def test_data_parallel__is_one_model_on_the_batches_of_all_ranks(tmp_path, text, capsys):
    process = start(tmp_path / "run", text, "--steps", "4")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert "step 4 of 4  loss " in out
    rows = [json.loads(line) for line in (tmp_path / "run/steps/l2-1.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == pytest.approx(reference(text, 4), rel=1e-4)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["mode"], summary["steps"], summary["learners"]) == ("data-parallel", 4, 2)
    assert summary["tokens"]["computed"] == 4 * 2 * 8 * 128
    assert summary["blocked_s"]["all_reduce"] > 0
    assert summary["exit"] == "finished"
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    assert f"{summary['eval_loss']:.4f} nats per byte" in capsys.readouterr().out
    assert main(["sample", str(tmp_path / "run"), "--length", "5"]) == 0
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run/report.html").read_text()
    assert "2 ranks trained in mode data-parallel for " in page
    assert f"computed 8,192 tokens. The held-out loss of the model is {summary['eval_loss']:.4f} nats per byte." in page
    assert "<h2>Loss over tokens</h2>" in page
    assert "<h2>Waits</h2>" not in page
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert main(["compare", str(tmp_path / "run"), str(tmp_path / "copy"), "--to", str(tmp_path / "c.html")]) == 0
    assert f"{summary['eval_loss']:.4f} held-out" in (tmp_path / "c.html").read_text()
    (tmp_path / "same").symlink_to(tmp_path / "run")
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "run"), str(tmp_path / "same"), "--to", str(tmp_path / "c.html")]) == 2
    assert "is given twice; give each run once" in capsys.readouterr().err
    view = read_run(tmp_path / "run")
    assert view.tokens / report_span_s(view) == pytest.approx(summary["tokens_per_s"], rel=1e-6)
    assert main(["status", str(tmp_path / "run")]) == 2
    assert "is of mode=data-parallel, without a syncer; use `atoll report` for it" in capsys.readouterr().err
    charts = Charts(read_run(tmp_path / "run"))
    for over in ("tokens", "time"):
        (trace,) = charts.loss(over).data
        assert len(trace.x) == 4, "a point for each step"
    assert trace.y[-1] == pytest.approx(rows[-1]["loss"], rel=0.2)
    options = tomllib.loads((tmp_path / "run/options.toml").read_text())
    assert options == {"mode": "data-parallel", "learners": 2, "steps": 4, "data": [str(text)]}


def test_data_parallel__a_dead_rank_ends_the_run_and_is_named(tmp_path, text):
    process = start(tmp_path / "run", text, "--steps", "100000")
    children = await_steps(process, tmp_path / "run", 1)
    os.kill(json.loads((tmp_path / "run/processes.json").read_text())["l2"], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    told = "rank l2 ended (killed by SIGKILL); mode=data-parallel cannot go on without it, and no model is written"
    assert err == f"atoll: {told}\n"
    assert not psutil.wait_procs(children, timeout=10)[1]
    assert json.loads((tmp_path / "run/summary.json").read_text())["eval_loss"] is None


def test_data_parallel__a_killed_launcher_leaves_no_rank(tmp_path, text):
    process = start(tmp_path / "run", text, "--steps", "100000")
    children = await_steps(process, tmp_path / "run", 1)
    assert len(children) >= 2
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    assert not psutil.wait_procs(children, timeout=30)[1]
    process.communicate()


def test_data_parallel__ctrl_c_ends_all_ranks_after_the_same_step(tmp_path, text):
    process = start(tmp_path / "run", text, "--steps", "100000")
    children = await_steps(process, tmp_path / "run", 1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert not psutil.wait_procs(children, timeout=10)[1]
    logs = [path.read_text().splitlines() for path in (tmp_path / "run/steps").iterdir()]
    assert len(logs[0]) == len(logs[1]) < 100000
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["exit"] == "stopped by a signal"
    assert summary["eval_loss"] is not None


@pytest.mark.parametrize(
    "given",
    [{"quorum": 1}, {"fragments": 8}, {"interval": 24}, {"overlap": 2}, {"merge": "rda"}, {"take": "rebase"},
     {"outer_lr": 0.7}, {"outer_momentum": 0.5}, {"keep_contributions": True}, {"listen": "127.0.0.1:0"}],
    ids=lambda given: next(iter(given)),
)  # fmt: skip
def test_data_parallel__options_of_merging_are_refused_by_name_even_at_their_defaults(tmp_path, given):
    with pytest.raises(ConfigError, match=f"^{next(iter(given))}=.* does nothing in mode=data-parallel"):
        prepare_parallel(LocalOptions(mode="data-parallel", run=tmp_path / "run", **given))
    assert not (tmp_path / "run").exists()


def test_data_parallel__bad_input_is_one_line(tmp_path, text, capsys):
    for option, told in [
        (["--steps", "0"], "steps=0 must be between 1 and"),
        (["--learners", "0"], "learners=0 must be between 1 and 256"),
        (["--seed", str(10**20)], "must be between"),
        (["--init", "none.safetensors"], "init file none.safetensors cannot be read"),
    ]:
        run = str(tmp_path / "run")
        assert main(["train", "--mode", "data-parallel", "--run", run, "--data", str(text), *option]) == 2
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1
        assert told in err
    assert not (tmp_path / "run").exists()


def test_summary__has_the_figures_of_every_run():
    rows = [StepRow(i, tokens=10, loss=2.0, t_ns=i * 10**9, all_reduce_ns=5 * 10**8) for i in (1, 2, 3)]
    logs = dict.fromkeys(("l1", "l2"), rows)
    settings = {"run_id": "r", "mode": "data-parallel", "learners": 2, "seed": 0}
    summary = summarise_parallel(logs, settings=settings, wall_s=4.0, eval_loss=None, versions={}, extra={"steps": 9})
    assert summary.keys() == summarise(fold([])).keys()
    assert (summary["steps"], summary["learner_steps"], summary["tokens"]) == (3, 6, {"computed": 60})
    assert summary["tokens_per_s"] == 20.0
    assert summary["blocked_s"] == {"all_reduce": 3.0}
    assert (summary["train_loss"], summary["participation"]) == (2.0, None)
    empty = summarise_parallel({"l1": []}, settings=settings, wall_s=0, eval_loss=None, versions={}, extra={})
    assert (empty["tokens_per_s"], empty["train_loss"], empty["steps"]) == (None, None, 0)


def test_lines__mean_loss_and_rate_of_each_interval():
    lines = StepLines(steps=5, ranks=2, every=2)
    said = [lines.feed(StepRow(i, 10, float(i), i * 10**9)) for i in range(1, 6)]
    assert said == [
        None,
        "step 2 of 5  loss 1.500  20 tokens/s",
        None,
        "step 4 of 5  loss 3.500  20 tokens/s",
        "step 5 of 5  loss 5.000  20 tokens/s",
    ]


def test_step_log__half_a_line_waits(tmp_path):
    path = tmp_path / "l1-1.jsonl"
    log = StepReader(path)
    assert log.follow() == []
    one, two = (f'{{"step": {step}, "tokens": 3, "loss": 0.5, "t_ns": 7}}\n' for step in (1, 2))
    path.write_text(one + two[:9])
    assert log.follow() == [StepRow(1, 3, 0.5, 7)]
    path.write_text(one + two)
    assert log.follow() == [StepRow(2, 3, 0.5, 7)]
    assert [row.step for row in log.rows] == [1, 2]
    path.write_text(one + two + "{}\n")
    with pytest.raises(RunError, match="cannot be read: Object missing required field"):
        log.follow()
