"""`atoll learner`: one learner by hand, on this machine or another."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.cli.parse import parse


@dataclass(frozen=True, kw_only=True)
class LearnerCommand:
    """Join a syncer with one learner and train until its run is over.

    ATOLL_TOKEN (or ATOLL_TOKEN_FILE) must be set as for the syncer where that has one. Exit status 3: its loss was not
    finite.
    """

    address: str = "127.0.0.1:7700"
    """HOST:PORT of the syncer."""
    bulk_address: str | None = None
    """HOST:PORT of its bulk service, where that is not on the same host."""
    name: str | None = None
    """Name in the run, not in use by another; default: host and process."""
    model: str = "tiny"
    """tiny or small: the same for all learners of a run."""
    data: tuple[str, ...] = ("stdlib",)
    """Text files and folders, or stdlib."""
    index: int = 1
    """I of --of: which share of the data is this learner's, from 1."""
    of: int = 1
    """M: shares that the data is cut into."""
    seed: int = 0
    """Of the first weights and the data order."""
    inner_lr: float | None = None
    """Peak rate of AdamW; default 1e-3."""
    slow_factor: float = 1.0
    """Each step takes so many times as long, on purpose."""
    threads: int = 1
    """Torch threads."""
    run: Path | None = None
    """Where the step log goes, in steps/; default runs/<name>."""
    timeout_s: float = 60.0
    """How long to look for the syncer and its parameters."""


def main(argv: Sequence[str]) -> int:
    """0 when the run is over."""
    options = parse(LearnerCommand, "learner", argv)
    from atoll.errors import ConfigError, RunOverError
    from atoll.recipes.loop import TrainConfig, train
    from atoll.train.learner import default_name

    if not 1 <= options.index <= options.of:
        raise ConfigError(f"index={options.index} must be between 1 and of={options.of}")
    cores = os.cpu_count() or 1
    if not 1 <= options.threads <= cores:
        raise ConfigError(f"threads={options.threads} must be between 1 and the {cores} cores of this machine")
    name = options.name or default_name()
    config = TrainConfig(
        name=name,
        run_dir=options.run or Path("runs") / name,
        model=options.model,
        data=options.data,
        learner_index=options.index - 1,
        learners=options.of,
        seed=options.seed,
        lr=options.inner_lr,
        slow=options.slow_factor,
        threads=options.threads,
    )
    print(f"learner {name} joins {options.address}", flush=True)
    try:
        result = train(
            config, address=options.address, bulk_address=options.bulk_address, timeout_s=options.timeout_s
        )
    except RunOverError:
        print("the run is over already")
        return 0
    print(f"the run is over: {result.steps} steps, {result.tokens:,} tokens, last loss {result.loss:.4f}")
    return 0
