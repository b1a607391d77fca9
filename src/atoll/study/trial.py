"""One trial: train a model under one setting, and say how good it became.

All methods of a comparison see the same data, schedule, model and number of tokens. `atoll` is the real core with the
real tensors on a virtual clock (sim.world): it costs the arithmetic of its steps and hardly more. The baselines are a
few lines each and know nothing of it:

* data-parallel: one model, the mean gradient of all learners' batches in every step;
* alone: one learner with its own share of the data, as many steps as each of the others;
* averaged-once: every learner alone, the mean of their weights at the end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.config import choice
from atoll.core.layout import make_layout
from atoll.core.messages import Life
from atoll.core.records import LifeEndLine, SlotLine
from atoll.errors import ConfigError
from atoll.recipes.data import Corpus
from atoll.recipes.loop import INNERS, TrainConfig, make_optimizer, set_rate, train_step
from atoll.recipes.muon import ADAMW_SHARE
from atoll.recipes.schedule import rate_factor
from atoll.sim.plan import MS, LearnerSpec
from atoll.sim.world import World
from atoll.study.bodies import ModelBody, TensorShop
from atoll.study.ideas import IDEAS, remember
from atoll.study.tasks import Task, task_of
from atoll.tensors.measure import cosine
from atoll.tensors.names import specs_of

METHODS = ("atoll", "data-parallel", "alone", "averaged-once")
STEP_NS, JITTER = 100 * MS, 0.02
CURVE_POINTS = 20


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is tried. `settings` are those of RunConfig that are not the default."""

    method: str = "atoll"
    model: str = "tiny"
    learners: int = 4
    steps: int = 600
    """Of each learner."""
    seed: int = 0
    lr: float = 1e-3
    """Peak rate of the inner optimizer."""
    inner: str = "adamw"
    """adamw or muon. `lr` is AdamW's rate, and ADAMW_SHARE of Muon's: one number tunes both."""
    settings: dict[str, Any] = field(default_factory=dict)
    way_steps: float = 0.01
    """How long a message is on its way to or from the syncer, in steps of a learner. Tokens do not change with it."""
    memory: float = 1.0
    """The inner optimizer's averages over past gradients reach so many times as far back as the recipe's."""
    idea: str = ""
    """One of study.ideas."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"method={self.method!r} is unknown; use one of {', '.join(METHODS)}")
        choice("inner", self.inner, INNERS)
        choice("idea", self.idea, tuple(IDEAS))
        if self.method != "atoll" and (self.settings or self.idea):
            told = [*sorted(self.settings), *([f"idea={self.idea}"] if self.idea else [])]
            raise ConfigError(f"method={self.method!r} takes no settings, and has {told}")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of it."""

    loss: float
    """Mean nats per byte of held-out text, by the final model."""
    tokens: int
    """Computed by all learners together. `atoll` computes a step or two more per learner: the end is heard of late."""
    train_s: float
    """Wall time of the trial; what it was run on is not part of it."""
    curve: list[float]
    """Mean training loss of each twentieth of the steps, over the learners, each with its own model before its step."""
    participation: float | None = None
    """Share of (slot, learner) pairs merged."""
    autocorrelation: float | None = None
    """Mean cosine of one merged outer gradient of a piece and the next of it."""
    agreement: float | None = None
    """Mean cosine of two learners' contributions to the same slot."""


def run_trial(trial: Trial, corpus: Corpus) -> Outcome:
    """Train and evaluate. Uses the threads that torch has; raises DivergedError where a loss is not finite."""
    started = time.perf_counter()
    run = {"atoll": _atoll, "data-parallel": _data_parallel, "alone": _alone, "averaged-once": _averaged_once}
    task = task_of(trial.model, corpus)
    model, trainees, figures = run[trial.method](trial, task)
    figures["curve"] = _curve([trainee.losses for trainee in trainees])
    figures.setdefault("tokens", trial.steps * task.tokens * (1 if trial.method == "alone" else trial.learners))
    return Outcome(loss=task.loss(model), train_s=round(time.perf_counter() - started, 1), **figures)


def _curve(losses: list[list[float]]) -> list[float]:
    """Means of CURVE_POINTS parts, the same steps of all."""
    mean = [fmean(step) for step in zip(*losses, strict=False)]
    size = max(1, len(mean) // CURVE_POINTS)
    return [round(fmean(mean[start : start + size]), 4) for start in range(0, len(mean), size)][:CURVE_POINTS]


class Trainee:
    """A model with its optimizer and its own stream of batches."""

    def __init__(self, trial: Trial, task: Task, index: int) -> None:
        self.model = task.build(trial.seed)
        self._who = f"learner l{index}"
        self._lr = trial.lr
        decay = TrainConfig.weight_decay
        self._optimizer = make_optimizer(
            self.model,
            lr=trial.lr,
            weight_decay=decay,
            inner=trial.inner,
            muon_lr=trial.lr / ADAMW_SHARE,
        )
        remember(self._optimizer, trial.memory)
        self.losses: list[float] = []
        self._batches = task.batches(learner_index=index, learners=trial.learners, seed=trial.seed)

    def batch(self) -> tuple[Tensor, Tensor]:
        """The next (inputs, targets)."""
        return next(self._batches)

    def train(self, progress: float, *others: Trainee) -> None:
        """One step at `progress` of the run, on the mean gradient of its own batch and those of `others`."""
        set_rate(self._optimizer, self._lr * rate_factor(progress, warmup=TrainConfig.warmup))
        drawn = [self.batch(), *(other.batch() for other in others)]
        inputs, targets = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        loss = train_step(self.model, self._optimizer, inputs, targets, clip=TrainConfig.clip, who=self._who)
        self.losses.append(loss)


Result = tuple[nn.Module, list[Trainee], dict[str, Any]]
"""(final model, who trained, figures of the outcome)"""

# ---------------------------------------------------------------- the method


class TraineeBody(ModelBody):
    """A learner of the virtual world that trains for real."""

    def __init__(self, world: World, life: Life, trainee: Trainee) -> None:
        super().__init__(trainee.model, world.layout, world.config.payload)
        self._world = world
        self._life = life
        self._trainee = trainee

    def step(self, tokens: int) -> None:
        core = next(learner.core for learner in self._world.lives if learner.life == self._life)
        self._trainee.train(core.progress)


class Measured:
    """Of the merges of a run: how outer gradients of a piece follow each other, and how far learners agree."""

    def __init__(self) -> None:
        self._last: dict[int, Tensor] = {}
        self.followed: list[float] = []
        self.agreed: list[float] = []

    def on_merge(self, piece: int, deltas: list[Tensor], delta: Tensor) -> None:
        """As TensorShop says."""
        if piece in self._last:
            self.followed.append(_cosine(self._last[piece], delta))
        self._last[piece] = delta
        if len(deltas) > 1:
            pairs = [(a, b) for i, a in enumerate(deltas) for b in deltas[:i]]
            self.agreed.append(fmean(_cosine(a, b) for a, b in pairs))


def _cosine(a: Tensor, b: Tensor) -> float:
    return cosine(a, b) or 0.0


def _atoll(trial: Trial, task: Task) -> Result:
    trainees: list[Trainee] = []
    shops: list[TensorShop] = []
    measured = Measured()
    model = task.build(trial.seed)

    def make_body(world: World, life: Life) -> TraineeBody:
        trainees.append(Trainee(trial, task, int(life.name[1:])))
        return TraineeBody(world, life, trainees[-1])

    def make_shop(world: World) -> TensorShop:
        shops.append(IDEAS[trial.idea](world.config, world.layout))
        shops[0].on_merge = measured.on_merge
        return shops[0]

    fragments = int(trial.settings.get("fragments", 8))
    settings = {"interval": 24, **trial.settings, "fragments": fragments}
    specs = [
        LearnerSpec(
            name=f"l{i}", step_ns=STEP_NS, jitter=JITTER, tokens=task.tokens, latency_ns=int(trial.way_steps * STEP_NS)
        )
        for i in range(trial.learners)
    ]
    world = World(
        seed=trial.seed,
        learners=specs,
        steps=trial.steps,
        layout=make_layout(specs_of(model), fragments),
        make_body=make_body,
        make_shop=make_shop,
        **settings,
    )
    world.run()
    body = world.lives[0].body
    assert isinstance(body, ModelBody)
    shops[0].finish(body)
    return body.model, trainees, _figures(world, measured)


def _figures(world: World, measured: Measured) -> dict[str, Any]:
    merged = [len(line.merged) for line in world.records(SlotLine) if line.slot <= world.config.slots]
    return {
        "tokens": sum(line.tokens for line in world.records(LifeEndLine)),
        "participation": round(fmean(merged) / world.config.learners, 4) if merged else None,
        "autocorrelation": round(fmean(measured.followed), 4) if measured.followed else None,
        "agreement": round(fmean(measured.agreed), 4) if measured.agreed else None,
    }


# ---------------------------------------------------------------- what it is compared with


def _data_parallel(trial: Trial, task: Task) -> Result:
    first, *others = [Trainee(trial, task, index) for index in range(trial.learners)]
    for step in range(trial.steps):
        first.train(step / trial.steps, *others)
    return first.model, [first], {}


def _trained_alone(trial: Trial, task: Task, index: int) -> Trainee:
    trainee = Trainee(trial, task, index)
    for step in range(trial.steps):
        trainee.train(step / trial.steps)
    return trainee


def _alone(trial: Trial, task: Task) -> Result:
    trainee = _trained_alone(trial, task, 0)
    return trainee.model, [trainee], {}


def _averaged_once(trial: Trial, task: Task) -> Result:
    trainees = [_trained_alone(trial, task, index) for index in range(trial.learners)]
    with torch.no_grad():
        for first, *rest in zip(*(trainee.model.parameters() for trainee in trainees), strict=True):
            first.copy_(torch.stack([first, *rest]).mean(0))
    return trainees[0].model, trainees, {}
