"""Which settings make the best model? Trials (atoll.study.trial) of named sweeps, one line of JSON each.

    python benchmarks/quality.py screen             # one axis at a time from the base, one seed
    python benchmarks/quality.py finals             # baselines and candidates over 3 rates and 3 seeds
    python benchmarks/quality.py table              # what there is, as a table

A trial that stands in the file is not run again: stop it at any time and go on later. Loss is in nats per byte of
held-out text; less is better. Trials are exact on one machine; across machines floats differ in the last bits.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, Literal

import torch
import tyro
from common import circumstances

from atoll.errors import AtollError
from atoll.recipes.data import load_corpus
from atoll.study.trial import Outcome, Trial, run_trial

RESULTS = Path(__file__).parent.parent / "docs" / "quality.jsonl"
BASE: dict[str, Any] = {"fragments": 8, "interval": 24}
AXES: dict[str, list[dict[str, Any]]] = {
    "outer step": [
        {"outer_lr": 0.5, "outer_momentum": 0.0},
        {"outer_lr": 1.0, "outer_momentum": 0.0},
        {"outer_lr": 0.4, "outer_momentum": 0.8},
        {"outer_lr": 0.7, "outer_momentum": 0.9},
    ],
    "take": [{"take": "overwrite"}],
    "merge": [{"merge": "average"}],
    "rounds": [{"interval": 8}, {"interval": 48}, {"fragments": 4}, {"fragments": 1, "interval": 24}],
    "overlap": [{"overlap": 0}, {"overlap": 6}],
    "inner": [{"inner": "muon"}],
}
RATES = (5e-4, 1e-3, 2e-3)
BASELINES = ("data-parallel", "alone", "averaged-once")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Run the trials of a sweep that are not in the file yet."""

    what: Annotated[Literal["screen", "finals", "table"], tyro.conf.Positional]
    """Which sweep, or the table of all."""
    steps: int = 600
    """Of each learner."""
    learners: int = 4
    """M."""
    model: str = "tiny"
    """Or tiny-moe, vit-digits."""
    seeds: int = 1
    """Of each setting."""
    candidates: tuple[str, ...] = ()
    """finals: settings beside the base, as JSON, like '{"outer_lr": 1.0}'."""
    jobs: int = 2
    """Processes, one thread each."""
    results: Path = RESULTS
    """The file, one line per trial."""


def trials(options: Options) -> Iterator[Trial]:
    """All trials of the sweep, the most telling first."""
    common: dict[str, Any] = {"steps": options.steps, "learners": options.learners, "model": options.model}
    settings = [BASE]
    if options.what == "screen":
        settings += [{**BASE, **change} for changes in AXES.values() for change in changes]
    else:
        settings += [{**BASE, **json.loads(text)} for text in options.candidates]
    for seed in range(options.seeds):
        for rate in RATES if options.what == "finals" else (RATES[1],):
            yield from (Trial(method=method, seed=seed, lr=rate, **common) for method in BASELINES)
            yield from (trial_of(chosen, seed=seed, lr=rate, **common) for chosen in settings)


def trial_of(chosen: dict[str, Any], **common: Any) -> Trial:
    """`inner` is the recipe's, everything else the run's."""
    settings = {key: value for key, value in chosen.items() if key != "inner"}
    return Trial(settings=settings, inner=chosen.get("inner", "adamw"), **common)


def run_one(trial: Trial) -> Outcome | str:
    """In a process of its own; the message of an error that is a result too (a loss that is not finite)."""
    torch.set_num_threads(1)
    try:
        return run_trial(trial, load_corpus("stdlib"))
    except AtollError as error:
        return str(error)


def known(path: Path) -> list[dict[str, Any]]:
    """Lines of the file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def line_of(trial: Trial, outcome: Outcome | str) -> dict[str, Any]:
    """One trial with all that is needed to repeat it."""
    found = {"error": outcome} if isinstance(outcome, str) else asdict(outcome)
    return {"trial": asdict(trial), **found, **circumstances()}


def sweep(options: Options) -> None:
    """Run what is missing; append each result as it comes."""
    done = {json.dumps(line["trial"], sort_keys=True) for line in known(options.results)}
    todo = [t for t in trials(options) if json.dumps(asdict(t), sort_keys=True) not in done]
    print(f"{len(todo)} trials to run, {len(done)} in {options.results}", flush=True)
    began_s = time.monotonic()
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(run_one, trial): trial for trial in todo}
        for count, future in enumerate(as_completed(running), 1):
            line = line_of(running[future], future.result())
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, sort_keys=True) + "\n")
            said = f"{line['loss']:.4f}" if "loss" in line else line["error"]
            minutes = (time.monotonic() - began_s) / 60
            print(f"{count}/{len(todo)} {minutes:.0f} min  {name_of(line)}: {said}", flush=True)


def name_of(line: dict[str, Any]) -> str:
    """A method and how it differs from the base."""
    trial = line["trial"]
    changes = {key: value for key, value in trial["settings"].items() if BASE.get(key) != value}
    if trial.get("inner", "adamw") != "adamw":
        changes["inner"] = trial["inner"]
    said = " ".join(f"{key}={value}" for key, value in changes.items()) or ("base" if trial["settings"] else "")
    return f"{trial['method']} {said}".strip()


def table(path: Path) -> Iterator[str]:
    """Markdown: the mean over seeds at the best rate of each setting, best first within each length and M."""
    losses: dict[tuple[str, int, int, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in known(path):
        trial = line["trial"]
        if "loss" in line:
            key = (trial["model"], trial["steps"], trial["learners"], name_of(line))
            losses[key][trial["lr"]].append(line["loss"])
    yield "| model | steps | M | method | rate | seeds | loss | spread | to data-parallel |"
    yield "|---|---|---|---|---|---|---|---|---|"
    best = {key: min(by_rate.items(), key=lambda item: fmean(item[1])) for key, by_rate in losses.items()}
    for key, (rate, found) in sorted(best.items(), key=lambda item: (*item[0][:3], fmean(item[1][1]))):
        spread = f"{stdev(found):.4f}" if len(found) > 1 else "-"
        beside = best.get((*key[:3], "data-parallel"))
        gap = f"{100 * (fmean(found) / fmean(beside[1]) - 1):+.2f}%" if beside else "-"
        model, steps, learners, name = key
        row = (model, steps, learners, name, f"{rate:g}", len(found), f"{fmean(found):.4f}", spread, gap)
        yield f"| {' | '.join(map(str, row))} |"


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    if options.what == "table":
        print("\n".join(table(options.results)))
    else:
        sweep(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
