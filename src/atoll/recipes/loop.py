"""The recipe's training loop. `train` is the whole of it; the rest of the file is its parts."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import atoll
from atoll.core.config import SEED_MAX, between, choice
from atoll.errors import ConfigError, DivergedError
from atoll.recipes.data import Corpus, batches, check_corpus, load_corpus
from atoll.recipes.model import MODELS, ByteModel, build_model
from atoll.recipes.muon import (
    ADAMW_SHARE,
    MUON_LR,
    RATE_SHARE,
    MuonAdamW,
    check_muon,
    has_muon,
    hidden_matrices,
    make_muon,
)
from atoll.recipes.schedule import rate_factor, rewarm_factor
from atoll.train.learner import interrupted_by

_log = logging.getLogger("atoll")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """What suits a model on one CPU core; each can be overridden in TrainConfig."""

    batch: int
    """Windows per step."""
    length: int
    """Bytes per window."""
    lr: float
    """Peak rate of AdamW, where it trains all of the model."""


BALANCE_WEIGHT = 0.01
"""Of the experts' balance beside the loss (arXiv 2101.03961)."""

PRESETS = {
    "tiny": Preset(batch=8, length=128, lr=4e-3),
    "tiny-moe": Preset(batch=8, length=128, lr=4e-3),
    "small": Preset(batch=4, length=256, lr=1e-3),
}


INNERS = ("adamw", "muon")
MERGE_BESIDE = {"adamw": "rda", "muon": "average"}
"""Default of `merge` for learners with this inner optimizer: what was better (docs/QUALITY.md)."""


def check_slow(name: str, slow: float) -> None:
    """ConfigError, by the name that its user knows it by, for a factor that is none."""
    if not 1 <= slow < math.inf:
        raise ConfigError(f"{name}={slow} must be at least 1 (1 is full speed)")


def default_inner() -> str:
    """muon, where torch has it."""
    return "muon" if has_muon() else "adamw"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One learner's settings. Checked when built; None takes the model's preset."""

    name: str
    """This learner's name."""
    run_dir: Path
    """Where the step log goes: <run_dir>/steps/<name>-<generation>.jsonl."""
    model: str = "tiny"
    """A name in MODELS."""
    data: tuple[str, ...] = ("stdlib",)
    """What `load_corpus` takes."""
    learner_index: int = 0
    """Which share of the data is this learner's, from 0."""
    learners: int = 1
    """Shares the data is cut into."""
    seed: int = 0
    """Of the first weights (alike on all learners) and, with name and generation, of the data order."""
    batch: int | None = None
    """Windows per step."""
    length: int | None = None
    """Bytes per window."""
    lr: float | None = None
    """Peak rate of AdamW. None: the preset's; with Muon beside it ADAMW_SHARE of Muon's."""
    inner: str = field(default_factory=default_inner)
    """muon: Muon for the hidden matrices, AdamW for the rest; or adamw."""
    muon_lr: float | None = None
    """Peak rate of Muon; `lr` is that of the rest. None: MUON_LR."""
    warmup: float = 0.05
    """Share of the run in which the rate rises."""
    rewarm_steps: int = 20
    """Own steps over which the rate rises again for a learner that joins after the warm-up."""
    weight_decay: float = 0.1
    """On matrices only."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    slow: float = 1.0
    """Each step takes this many times as long (a real sleep): an unequal machine, on purpose."""
    threads: int = 1
    """torch threads of this process; importing torch alone would take all cores."""
    device: str = "cpu"
    """Where the model lives."""

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ConfigError(f"model={self.model!r} is unknown; use one of {', '.join(MODELS)}")
        between("seed", self.seed, -SEED_MAX, SEED_MAX)
        check_slow("slow", self.slow)
        for name in ("batch", "length", "threads", "learners"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        length, context = self.preset().length, MODELS[self.model].context
        if length > context:
            raise ConfigError(f"length={length} must be at most context={context} of model={self.model!r}")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ConfigError(f"inner_lr={self.lr} must be a finite number above 0")
        self._check_inner()
        if not 0 <= self.warmup <= 1:
            raise ConfigError(f"warmup={self.warmup} must be from 0 to 1, a share of the run")

    def _check_inner(self) -> None:
        choice("inner", self.inner, INNERS)
        if self.inner == "muon":
            check_muon()
        if self.muon_lr is not None and self.inner != "muon":
            raise ConfigError(f"muon_lr={self.muon_lr} does nothing with inner={self.inner!r}; omit it, or use muon")
        if self.muon_lr is not None and not 0 < self.muon_lr < math.inf:
            raise ConfigError(f"muon_lr={self.muon_lr} must be a finite number above 0")

    def preset(self) -> Preset:
        """Batch, length and rate in force."""
        base = PRESETS[self.model]
        lr = ADAMW_SHARE * (self.muon_lr or MUON_LR) if self.inner == "muon" else base.lr
        return Preset(batch=self.batch or base.batch, length=self.length or base.length, lr=self.lr or lr)


class Learner(Protocol):
    """What the loop needs of `atoll.join`."""

    @property
    def progress(self) -> float:
        """Of the run, 0 to 1."""

    @property
    def generation(self) -> int:
        """Which life of this name."""

    def step(self, *, tokens: int, loss: float) -> bool:
        """After every optimizer step; False when the run is over."""

    def close(self, reason: str) -> None:
        """Leave before the run is over; harmless afterwards."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a learner did in this life."""

    steps: int
    tokens: int
    loss: float
    model: nn.Module


def train(
    config: TrainConfig,
    *,
    join: Callable[..., Learner] | None = None,
    report: Callable[[float, int, float], None] | None = None,
    **options: Any,
) -> TrainResult:
    """Train until the run is over. `options` go to `atoll.join` (address and so on).

    report: called after every step with the run's progress (0 to 1), own steps and loss.
    """
    torch.set_num_threads(config.threads)
    preset = config.preset()
    corpus = load_corpus(*config.data)
    check_corpus(corpus, learners=config.learners, length=preset.length)
    if corpus.remark:
        _log.warning("%s", corpus.remark)
    model = build_model(config.model, config.seed).to(config.device)
    optimizer = optimizer_of(config, model)
    steps_dir = config.run_dir / "steps"
    learner = (join or atoll.join)(model, optimizer, name=config.name, steps_dir=steps_dir, **options)
    rate = RateSchedule(peak=preset.lr, config=config, joined_at=learner.progress)
    tokens, steps, loss = preset.batch * preset.length, 0, math.nan
    with leaving(learner):
        for inputs, targets in own_batches(corpus, config, learner.generation):
            started = time.perf_counter()
            set_rate(optimizer, rate(learner.progress, steps))
            steps += 1
            who = f"learner {config.name!r} at step {steps}"
            loss = train_step(model, optimizer, inputs, targets, clip=config.clip, who=who)
            time.sleep((config.slow - 1) * (time.perf_counter() - started))
            going_on = learner.step(tokens=tokens, loss=loss)  # publishes, applies what arrived; never waits
            if report is not None:
                report(learner.progress, steps, loss)
            if not going_on:
                break
    return TrainResult(steps=steps, tokens=steps * tokens, loss=loss, model=model)


@contextmanager
def leaving(learner: Learner) -> Iterator[None]:
    """Whatever ends the loop early is told to the syncer, so that it need not wait for a lease."""
    try:
        yield
    except DivergedError as error:
        learner.close(f"diverged: {error}")
        raise
    except BaseException as error:
        learner.close(interrupted_by(type(error)))
        raise


@dataclass(frozen=True, kw_only=True)
class RateSchedule:
    """The learning rate of one life of a learner."""

    peak: float
    """Rate at factor 1."""
    config: TrainConfig
    """Warm-up and re-warm lengths."""
    joined_at: float
    """The run's progress when this life began."""

    def __call__(self, progress: float, own_step: int) -> float:
        """Peak times the run's factor times the re-warm factor; own_step from 0."""
        warmup = self.config.warmup
        again = rewarm_factor(
            own_step, steps=self.config.rewarm_steps, joined_at=self.joined_at, warmup=warmup
        )
        return self.peak * rate_factor(progress, warmup=warmup) * again


def own_batches(corpus: Corpus, config: TrainConfig, generation: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This learner's (inputs, targets) on its device, int64 [batch, length] each, without end."""
    preset = config.preset()
    for inputs, targets in batches(
        corpus,
        learner_index=config.learner_index,
        learners=config.learners,
        seed=config.seed,
        name=config.name,
        generation=generation,
        batch=preset.batch,
        length=preset.length,
    ):
        yield inputs.to(config.device), targets.to(config.device)


def optimizer_of(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that `config` asks for."""
    lr, decay = config.preset().lr, config.weight_decay
    return make_optimizer(model, lr=lr, weight_decay=decay, inner=config.inner, muon_lr=config.muon_lr)


def make_optimizer(
    model: nn.Module, *, lr: float, weight_decay: float, inner: str = "adamw", muon_lr: float | None = None
) -> torch.optim.Optimizer:
    """AdamW, betas 0.9 and 0.95, or Muon with it; weight decay on matrices only (not on gains)."""
    matrices = hidden_matrices(model) if inner == "muon" else []
    elsewhere = {id(p) for p in matrices}
    parameters = [p for p in model.parameters() if p.requires_grad and id(p) not in elsewhere]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=(0.9, 0.95))
    if inner != "muon":
        return adamw
    return MuonAdamW(make_muon(matrices, lr=lr, muon_lr=muon_lr or MUON_LR, weight_decay=weight_decay), adamw)


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """One rate for every group; Muon's is a fixed multiple of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(RATE_SHARE, 1.0)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    targets: Tensor,
    *,
    clip: float,
    who: str,
    reduce: Callable[[float], float] | None = None,
) -> float:
    """One step on int64 [B, T] each; the loss in nats per byte, without what balances experts. Raises DivergedError
    before a bad step is taken.

    reduce: makes every gradient the mean over all ranks, given this rank's loss; returns the mean loss.
    """
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    value = loss.item()  # device sync
    optimizer.zero_grad(set_to_none=True)
    balance = model.balance() if isinstance(model, ByteModel) else 0.0
    (loss + BALANCE_WEIGHT * balance if isinstance(balance, Tensor) else loss).backward()
    if reduce is not None:
        value = reduce(value)  # before any check: a rank that leaves alone would keep the others waiting
    if not math.isfinite(value):
        raise DivergedError(f"loss {value} of {who} is not finite; lower the learning rate or check the data")
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip).item()  # device sync
    if not math.isfinite(norm):
        raise DivergedError(f"gradient norm {norm} of {who} is not finite; lower the learning rate")
    optimizer.step()
    return value


def slow_factor(settings: Sequence[str], name: str) -> float:
    """`--slow NAME=FACTOR`, any number of times: this learner's factor, 1.0 where it is not named."""
    factor = 1.0
    for setting in settings:
        who, _, value = setting.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not who or not 1 <= number < math.inf:
            raise ConfigError(f"slow {setting!r} must be NAME=FACTOR with a factor of at least 1, like l1=4")
        if who == name:
            factor = number
    return factor
