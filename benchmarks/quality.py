"""Which settings make the best model? Trials (atoll.study.trial) of named sweeps, one line of JSON each.

    python benchmarks/quality.py screen             # one axis at a time from the base: 600 steps, one rate, one seed
    python benchmarks/quality.py tune               # baselines, base and candidates at all rates: 600 steps, one seed
    python benchmarks/quality.py finals --seeds 3   # the same at the rate that was best in `tune`: 1,500 steps
    python benchmarks/quality.py defaults --seeds 3 --model vit-digits    # baselines, base, candidates; no rate tuned
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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
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
    "inner": [{"inner": "muon"}],
    "overlap": [{"overlap": 0}, {"overlap": 6}, {"way_steps": 0.9}, {"overlap": 6, "way_steps": 2.9}],
    "rounds": [{"interval": 8}, {"interval": 48}, {"fragments": 4}, {"fragments": 1}],
    "outer step": [
        {"outer_lr": 0.5, "outer_momentum": 0.0},
        {"outer_lr": 1.0, "outer_momentum": 0.0},
        {"outer_lr": 0.4, "outer_momentum": 0.8},
        {"outer_lr": 0.7, "outer_momentum": 0.9},
    ],
    "take": [{"take": "overwrite"}],
    "merge": [{"merge": "average"}],
}
RATES = {"adamw": (1e-3, 2e-3, 4e-3), "muon": (1e-3, 2e-3, 5e-4)}
"""Tried by `tune`; the first one by the others."""
OF_TRIAL = ("inner", "way_steps", "memory", "idea")
"""Of the changes, those that are no settings of the run."""
STANDARD = {field.name: field.default for field in fields(Trial) if field.name in OF_TRIAL}
FLOORS = ("alone", "averaged-once")
STEPS = {"screen": 600, "tune": 600, "finals": 1500, "defaults": 600}
TUNED_LEARNERS = 4
STUDENT_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""97.5% quantiles, by the number of seeds."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Run the trials of a sweep that are not in the file yet."""

    what: Annotated[Literal["screen", "tune", "finals", "defaults", "table"], tyro.conf.Positional]
    """Which sweep, or the table of all."""
    steps: int | None = None
    """Of each learner. None: 600, finals 1,500."""
    learners: int = 4
    """M."""
    model: str = "tiny"
    """Or tiny-moe, vit-digits."""
    seeds: int = 1
    """Of each setting."""
    candidates: tuple[str, ...] = ()
    """All but screen: settings beside the base, as JSON, like '{"outer_lr": 1.0}'."""
    rate: float | None = None
    """Screen and defaults: this one instead of the first of RATES. Tuning is tune's, so finals take none."""
    base: bool = True
    """--no-base: candidates only, with their baselines."""
    jobs: int = 2
    """Processes, one thread each."""
    results: Path = RESULTS
    """The file, one line per trial."""


def trials(options: Options) -> Iterator[Trial]:
    """All trials of the sweep, the most telling first."""
    common: dict[str, Any] = {"learners": options.learners, "model": options.model}
    common["steps"] = options.steps or STEPS[options.what]
    chosen = [{**BASE, **json.loads(text)} for text in options.candidates]
    if options.base:
        chosen.insert(0, BASE)
    if options.what == "screen":
        chosen = [BASE, *({**BASE, **change} for changes in AXES.values() for change in changes)]
    for seed in range(options.seeds):
        for method, settings in contestants(chosen):
            for rate in rates(options, settings.get("inner", "adamw")):
                trial = trial_of(method, settings, seed=seed, lr=rate, **common)
                yield at_best_rate(trial, options) if options.what == "finals" else trial
        if options.what == "screen":
            yield from (Trial(method=method, seed=seed, lr=RATES["adamw"][0], **common) for method in FLOORS)


def rates(options: Options, inner: str) -> Sequence[float]:
    """What the sweep tries; of finals any, since `at_best_rate` sets it."""
    if options.what == "tune":
        return RATES[inner]
    return (options.rate or RATES[inner][0],)


def contestants(chosen: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(method, settings): these, then the synchronous baseline with every inner optimizer of them."""
    yield from (("atoll", settings) for settings in chosen)
    for pair in dict.fromkeys((settings.get("inner", "adamw"), settings.get("memory", 1.0)) for settings in chosen):
        yield "data-parallel", dict(zip(("inner", "memory"), pair, strict=True))


def at_best_rate(trial: Trial, options: Options) -> Trial:
    """The trial at the rate that was best for its settings and model in `tune`, at the M of most trials."""
    tried = [(Trial(**line["trial"]), line["loss"]) for line in known(options.results) if "loss" in line]
    tuned = replace(trial, steps=STEPS["tune"], seed=0, learners=TUNED_LEARNERS)
    found = {other.lr: loss for other, loss in tried if other == replace(tuned, lr=other.lr)}
    missing = [rate for rate in RATES[trial.inner] if rate not in found]
    if missing:
        raise SystemExit(
            f"{trial.method} {trial.settings} {trial.inner}: rates {missing} are not tuned; run `tune` first"
        )
    return replace(trial, lr=min(found, key=lambda rate: found[rate]))


def trial_of(method: str, chosen: dict[str, Any], **common: Any) -> Trial:
    """Each change where it belongs."""
    settings = {key: value for key, value in chosen.items() if key not in OF_TRIAL}
    return Trial(method=method, settings=settings, **{k: chosen[k] for k in OF_TRIAL if k in chosen}, **common)


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
    done = [Trial(**line["trial"]) for line in known(options.results)]
    todo = [trial for trial in trials(options) if trial not in done]
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
    changes |= {key: trial[key] for key in OF_TRIAL if trial.get(key, STANDARD[key]) != STANDARD[key]}
    said = " ".join(f"{key}={value}" for key, value in changes.items()) or ("base" if trial["settings"] else "")
    return f"{trial['method']} {said}".strip()


@dataclass(frozen=True)
class Row:
    """All seeds of one setting at one rate."""

    group: tuple[str, int, int]
    """Model, steps, M."""
    name: str
    synchronous: bool
    inner: str
    rate: float
    losses: dict[int, float]
    """By seed."""

    @property
    def loss(self) -> float:
        """The mean over seeds."""
        return fmean(self.losses.values())

    def gap(self, others: Iterable[Row]) -> float | None:
        """To the best one of `others` over the same seeds, as a share; None where none has all of them."""
        whole = [row.losses for row in others if self.losses.keys() <= row.losses.keys()]
        best = min((fmean(losses[seed] for seed in self.losses) for losses in whole), default=None)
        return self.loss / best - 1 if best else None


def rows(lines: Iterable[dict[str, Any]]) -> list[Row]:
    """Best first within each model, length and M."""
    losses: dict[tuple[tuple[str, int, int], str, bool, str, float], dict[int, float]] = defaultdict(dict)
    for line in lines:
        if "loss" in line:
            trial = Trial(**line["trial"])
            group = (trial.model, trial.steps, trial.learners)
            key = (group, name_of(line), trial.method == "data-parallel", trial.inner, trial.lr)
            losses[key][trial.seed] = line["loss"]
    found = [Row(*key, losses=values) for key, values in losses.items()]
    return sorted(found, key=lambda row: (row.group, row.loss))


def table(found: list[Row]) -> Iterator[str]:
    """Markdown. The gap: to data-parallel with the same inner optimizer and seeds, at the best rate that was tried."""
    yield "| model | steps | M | method | rate | seeds | loss | 95% | gap |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in found:
        gap = row.gap(r for r in found if (r.group, r.inner) == (row.group, row.inner) and r.synchronous)
        losses = list(row.losses.values())
        cells = (*row.group, row.name, f"{row.rate:g}", len(losses), f"{row.loss:.4f}", interval(losses))
        said = "-" if gap is None else f"{100 * gap:+.1f}%"
        yield f"| {' | '.join(map(str, (*cells, said)))} |"


def interval(losses: Sequence[float]) -> str:
    """Half the 95% interval of the mean, by Student's t."""
    if len(losses) < 2:
        return "-"
    quantile = STUDENT_T[min(len(losses), max(STUDENT_T))]
    return f"± {quantile * stdev(losses) / len(losses) ** 0.5:.4f}"


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    if options.what == "table":
        print("\n".join(table(rows(known(options.results)))))
    else:
        sweep(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
