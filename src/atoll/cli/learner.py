"""`atoll learner`: one learner by hand, on this machine or another."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.cli.parse import parse
from atoll.core.alone import SYNCER_WAIT_NS
from atoll.streams import ending_signals

LINE_EVERY_S = 30.0
SYNCER_WAIT_S = SYNCER_WAIT_NS / 1e9


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
    """tiny, tiny-moe or small: the same for all learners of a run."""
    data: tuple[str, ...] = ("stdlib",)
    """Text files and folders, or stdlib."""
    index: int = 1
    """I of --of: which share of the data is this learner's, from 1."""
    of: int = 1
    """M: shares that the data is cut into."""
    seed: int = 0
    """Of the first weights and the data order."""
    inner_lr: float | None = None
    """Peak rate of AdamW; default 1e-3 beside Muon, alone the model's (4e-3 of tiny, 1e-3 of small)."""
    inner: str | None = None
    """muon: Muon for the hidden matrices, AdamW for embeddings, gains and head; or adamw, for all. Default: muon, where
    torch has it (2.9)."""
    muon_lr: float | None = None
    """Peak rate of Muon; default 0.02."""
    slow_factor: float = 1.0
    """Each step takes so many times as long, on purpose."""
    threads: int = 1
    """Torch threads."""
    run: Path | None = None
    """Where the step log goes, in steps/; default runs/<name>. The syncer's --run where that is on this machine: the
    audit wants all step logs there."""
    timeout_s: float = 60.0
    """How long to look for the syncer and its parameters."""
    syncer_wait_s: float = SYNCER_WAIT_S
    """How long to train on while the syncer is away, or another run answers there; then exit status 2. At the end of
    the run by its own steps the learner gives up too."""


class Progress:
    """A line every tenth of the run, and at the latest every 30 s."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tenth: int | None = None
        self._said_s = clock()

    def line(self, progress: float, steps: int, loss: float) -> str | None:
        """What to print after this step, if anything. The first step tells that training has begun."""
        tenth, now_s = int(10 * progress), self._clock()
        if tenth == self._tenth and now_s - self._said_s < LINE_EVERY_S:
            return None
        self._tenth, self._said_s = tenth, now_s
        return f"{100 * progress:3.0f}% of the run  {steps:,} own step{'' if steps == 1 else 's'}  loss {loss:.3f}"

    def report(self, progress: float, steps: int, loss: float) -> None:
        line = self.line(progress, steps, loss)
        if line is not None:
            print(line, flush=True)


def leave_when_asked() -> None:
    """SIGTERM, and the end of the terminal, are as Ctrl-C: the syncer is told. The second one ends at once."""

    def leave(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        for number in ending_signals():
            if number != signal.SIGINT:
                signal.signal(number, leave)


def main(argv: Sequence[str]) -> int:
    """0 when the run is over."""
    options = parse(LearnerCommand, "learner", argv)
    from atoll.errors import ConfigError, RunOverError
    from atoll.recipes.loop import TrainConfig, check_slow, default_inner, train
    from atoll.train.checks import check_name, check_reach
    from atoll.train.learner import default_name

    if not 1 <= options.index <= options.of:
        raise ConfigError(f"index={options.index} must be between 1 and of={options.of}")
    check_slow("slow_factor", options.slow_factor)
    waits = {"timeout_s": options.timeout_s, "syncer_wait_s": options.syncer_wait_s}
    check_reach(options.address, options.bulk_address, **waits)
    cores = os.cpu_count() or 1
    if not 1 <= options.threads <= cores:
        raise ConfigError(f"threads={options.threads} must be between 1 and the {cores} cores of this machine")
    name = options.name or default_name()
    check_name(name)
    config = TrainConfig(
        name=name,
        run_dir=options.run or Path("runs") / name,
        model=options.model,
        data=options.data,
        learner_index=options.index - 1,
        learners=options.of,
        seed=options.seed,
        lr=options.inner_lr,
        inner=options.inner or default_inner(),
        muon_lr=options.muon_lr,
        slow=options.slow_factor,
        threads=options.threads,
    )
    leave_when_asked()
    wait = f"up to {options.timeout_s:g} s"
    print(f"learner {name}: looking for a syncer at {options.address} for {wait}", flush=True)
    try:
        result = train(
            config,
            report=Progress().report,
            address=options.address,
            bulk_address=options.bulk_address,
            **waits,
        )
    except RunOverError:
        print("the run is over already")
        return 0
    print(f"the run is over: {result.steps} steps, {result.tokens:,} tokens, last loss {result.loss:.4f}")
    return 0
