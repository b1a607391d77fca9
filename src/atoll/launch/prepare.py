"""What is checked before a run on one machine begins: `prepare` turns options into a `Plan`, and writes nothing."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.core.config import RunConfig
from atoll.core.layout import balance_warning
from atoll.errors import ConfigError
from atoll.launch.check import check_data, check_init, resolve_fragments
from atoll.launch.cores import Share, machine_cores, shares
from atoll.launch.evaluator import EvalEvery, eval_every
from atoll.launch.options import EVAL_EVERY, LISTEN, STEPS, LocalOptions, as_told
from atoll.launch.plan import (
    START_WAIT_S,
    check_port,
    check_run_dir,
    learner_names,
    method_settings,
    new_run_id,
    slow_factors,
    steps_of,
)
from atoll.recipes.data import Corpus
from atoll.recipes.loop import MERGE_BESIDE, TrainConfig, default_inner
from atoll.wire.channel import check_listening, load_token, parse_address

LEARNERS_MAX = 256


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run that was checked and can begin. Nothing is written yet."""

    run_dir: Path
    config: RunConfig
    host: str
    port: int
    init: Path | None
    keep_contributions: bool
    learners: tuple[TrainConfig, ...]
    shares: tuple[Share, ...]
    token: str
    corpus: Corpus
    notes: tuple[str, ...]
    """Warnings for people."""
    options: dict[str, Any]
    """As `options.as_told`."""
    evals: EvalEvery | None = None
    """None: no evaluator."""


def default_run_dir(model: str) -> Path:
    """runs/<UTC time>-<model>; a number is added where that is taken."""
    base = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{model}"
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def learners_of(
    options: LocalOptions, run_dir: Path, cores: tuple[int, ...]
) -> tuple[tuple[TrainConfig, ...], list[Share]]:
    """What each learner trains, and its share of the machine."""
    names = learner_names(options.learners)
    slow = slow_factors(options.slow, names)
    parts = shares(options.learners, cores, options.threads)
    learners = tuple(
        TrainConfig(
            name=name,
            run_dir=run_dir,
            model=options.model,
            data=tuple(options.data),
            learner_index=index,
            learners=options.learners,
            seed=options.seed,
            lr=options.inner_lr,
            inner=options.inner or default_inner(),
            muon_lr=options.muon_lr,
            slow=slow.get(name, 1.0),
            threads=part.threads,
        )
        for index, (name, part) in enumerate(zip(names, parts, strict=True))
    )
    return learners, parts


def asked_steps(options: LocalOptions, learner: TrainConfig) -> int:
    """Steps of each learner: `--steps`, or what `--tokens` comes to."""
    preset = learner.preset()
    step_tokens = preset.batch * preset.length
    return steps_of(
        options.steps, options.tokens, default=STEPS, step_tokens=step_tokens, learners=options.learners
    )


def prepare(options: LocalOptions, environ: Mapping[str, str] = os.environ) -> Plan:
    """Check everything that can be checked, cheap things first. AtollError names value and remedy."""
    if not 1 <= options.learners <= LEARNERS_MAX:
        raise ConfigError(f"learners={options.learners} must be between 1 and {LEARNERS_MAX} on one machine")
    cores = machine_cores()
    host, port = parse_address(options.listen or LISTEN, "listen")
    evals = eval_every(EVAL_EVERY if options.eval_every is None else options.eval_every)
    run_dir = options.run or default_run_dir(options.model)
    check_run_dir(run_dir)
    learners, parts = learners_of(options, run_dir, cores)
    steps = asked_steps(options, learners[0])
    settings = method_settings(options, steps=steps, learners=options.learners, run_id=new_run_id())
    settings.setdefault("merge", MERGE_BESIDE[learners[0].inner])
    settings["start_wait_ns"] = int(START_WAIT_S * 1e9)
    config, layout = resolve_fragments(settings, options.model)
    if options.init is not None:
        check_init(options.init, layout)
    token = load_token(environ)
    check_listening(host, token)
    check_port("listen port", host, port)
    corpus = check_data(learners[0])
    notes = [balance_warning(layout), corpus.remark or None]
    if options.listen is not None and not token:
        notes.append(
            "no ATOLL_TOKEN is set: none but this run's own learners can reach its syncer; set it before the run"
        )
    if config.whole_steps != config.steps:
        notes.append(f"steps={config.steps} is rounded up to {config.whole_steps}, whole slots")
    if options.threads is not None and options.threads * options.learners > len(cores):
        notes.append(f"{options.learners} learners with {options.threads} threads share {len(cores)} cores")
    return Plan(
        run_dir=run_dir,
        config=config,
        host=host,
        port=port,
        init=options.init,
        keep_contributions=options.keep_contributions,
        learners=learners,
        shares=tuple(parts),
        token=token or secrets.token_urlsafe(24),
        corpus=corpus,
        notes=tuple(note for note in notes if note is not None),
        options=as_told(options),
        evals=evals,
    )
