"""The end of a run: its model evaluated, summary.json written, a dozen lines for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.cli.console import warn
from atoll.errors import RunError
from atoll.recipes.data import Corpus
from atoll.store.files import END_WAIT_S, insist, write_atomic
from atoll.watch.lines import count
from atoll.watch.read import loss_unit
from atoll.watch.summary import summarise
from atoll.watch.view import RunView


def close_run(
    run_dir: Path, view: RunView, corpus: Corpus | None, length: int, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Evaluate model/ where there is one, write summary.json, return it."""
    eval_loss = None if corpus is None else evaluate_run(run_dir, corpus, length)
    summary = summarise(view, eval_loss=eval_loss, extra={"loss_unit": loss_unit(run_dir) or None, **extra})
    write_summary(run_dir, summary)
    return summary


def evaluate_run(run_dir: Path, corpus: Corpus, length: int) -> float | None:
    """Held-out loss of model/; None where there is none."""
    if not (run_dir / "model" / "manifest.json").exists():
        return None
    from atoll.cli.saved import load_saved
    from atoll.recipes.evaluate import evaluate

    return evaluate(load_saved(run_dir).model, corpus, length=length)


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    """summary.json, atomically. Waits for room on the disk; RunError where none comes."""
    path, data = run_dir / "summary.json", json.dumps(summary, indent=1).encode() + b"\n"

    def tell(error: OSError) -> None:
        warn(f"{path} cannot be written ({error.strerror}); waiting up to {END_WAIT_S:.0f} s for room")

    try:
        insist(lambda: write_atomic(path, data), tell)
    except OSError as error:
        raise RunError(f"{path} cannot be written ({error.strerror}); all else of the run is as it says") from error
    return path


def _returns(lives: int) -> str:
    """Lives beyond the first of each learner."""
    return f"learners came back {count(lives, 'time')}" if lives else "no learner came back"


def _refused(summary: Mapping[str, Any]) -> str:
    refused = summary["contributions"]["refused"]
    return f"; {count(refused, 'contribution')} refused (`atoll advise`)" if refused else ""


def closing_lines(run_dir: Path, summary: Mapping[str, Any], view: RunView) -> list[str]:
    """What a person wants to know at the end."""
    if view.config is None:
        return ["no learner joined; nothing was trained"]
    tokens, part = summary["tokens"], summary["participation"]
    fragment, learner = part["lowest_fragment"], part["lowest_learner"]
    lives = sum(summary["lives"].values()) - len(summary["lives"])
    learners = count(len(summary["lives"]), "learner")
    blocked = "-"  # learners say so when they end
    if summary["step_max_s"] is not None:
        causes = ", ".join(f"{cause} {spent:.2f}" for cause, spent in summary["blocked_s"].items())
        blocked = f"{causes} s; longest step() {1000 * summary['step_max_s']:.1f} ms"
    shares = ", ".join(
        f"{name} {percent(tokens[name], tokens['computed'])}" for name in ("merged", "overwritten", "lost", "pending")
    )
    ended = "over" if summary["phase"] == "over" else f"in phase {summary['phase']}"
    if view.stopped:
        ended = f"stopped early: {summary['slots']} of {view.config.slots} slots"
    length = f"{count(summary['slots'], 'slot')} ({summary['steps']} steps of a learner), {summary['wall_s']:.1f} s"
    training, merging = percent(summary["training_uptime"], 1), percent(summary["merge_uptime"], 1)
    model = run_dir / "model" / "model.safetensors"
    return [
        "",
        f"run          {summary['run_id']}, {summary['mode']}, {learners}, seed {summary['seed']}",
        f"length       {length} ({ended})",
        f"tokens       {tokens['computed']:,} computed at {number(summary['tokens_per_s'], ',.0f')} tokens/s",
        f"their work   {shares}{_refused(summary)}",
        f"taking part  {number(part['mean'], '.3f')} of the ready; lowest fragment {lowest(fragment, 'fragment')}, "
        f"lowest learner {lowest(learner, 'learner')}",
        f"blocked      {blocked}",
        f"uptime       training {training}, merging {merging}; {_returns(lives)}",
        f"loss         {losses(run_dir, summary)}",
        f"model        {model if model.exists() else 'none'}",
        f"summary      {run_dir / 'summary.json'}",
    ]


def parallel_lines(run_dir: Path, summary: Mapping[str, Any]) -> list[str]:
    """The same of a run in mode=data-parallel."""
    model = run_dir / "model" / "model.safetensors"
    ranks = count(summary["learners"], "rank")
    return [
        "",
        f"run          {summary['run_id']}, {summary['mode']}, {ranks}, seed {summary['seed']}",
        f"length       {count(summary['steps'], 'step')}, {summary['wall_s']:.1f} s ({summary['exit']})",
        f"tokens       {summary['tokens']['computed']:,} computed at {number(summary['tokens_per_s'], ',.0f')}/s",
        f"blocked      all-reduce {summary['blocked_s']['all_reduce']:.2f} s, all ranks together",
        f"loss         {losses(run_dir, summary)}",
        f"model        {model if model.exists() else 'none'}",
        f"summary      {run_dir / 'summary.json'}",
    ]


def losses(run_dir: Path, summary: Mapping[str, Any]) -> str:
    """Of the model, where it was evaluated, and of training; with a unit where that is known."""
    unit = loss_unit(run_dir)
    held_out = f"{number(summary['eval_loss'], '.4f')} held-out, " if unit else ""  # nobody evaluates a model of others
    return f"{held_out}{number(summary['train_loss'], '.4f')} training{f' ({unit})' if unit else ''}"


def number(value: float | None, form: str) -> str:
    """`-` where there is none."""
    return "-" if value is None else format(value, form)


def lowest(found: Mapping[str, Any], what: str) -> str:
    """Which, and its share; `-` where nothing has settled."""
    return "-" if found["value"] is None else f"{found[what]} {found['value']:.3f}"


def percent(part: float | None, whole: float) -> str:
    """`-` where there is none."""
    return "-" if part is None or not whole else f"{100 * part / whole:.1f}%"
