"""What a trial trains: a model of the recipe on text, or a vision transformer on digits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.recipes import data, digits, evaluate
from atoll.recipes.loop import PRESETS
from atoll.recipes.model import build_model

DIGITS = "vit-digits"
DIGITS_BATCH = 32
EVAL_BATCHES = 32


class Task(Protocol):
    """One kind of training."""

    @property
    def tokens(self) -> int:
        """Of one step of one learner."""

    def build(self, seed: int) -> nn.Module:
        """The model, alike for the same seed."""

    def batches(self, *, learner_index: int, learners: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless (inputs, targets) of one learner's share."""

    def loss(self, model: nn.Module) -> float:
        """Mean nats over what is held out."""


class Text:
    """A model of MODELS on bytes."""

    def __init__(self, model: str, corpus: data.Corpus) -> None:
        self._model = model
        self._corpus = corpus
        self._preset = PRESETS[model]

    @property
    def tokens(self) -> int:
        return self._preset.batch * self._preset.length

    def build(self, seed: int) -> nn.Module:
        return build_model(self._model, seed)

    def batches(self, *, learner_index: int, learners: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        return data.batches(
            self._corpus,
            learner_index=learner_index,
            learners=learners,
            seed=seed,
            name=f"l{learner_index}",
            generation=1,
            batch=self._preset.batch,
            length=self._preset.length,
        )

    def loss(self, model: nn.Module) -> float:
        return evaluate.evaluate(model, self._corpus, batches=EVAL_BATCHES, length=self._preset.length)


class DigitPictures:
    """A token is a picture."""

    tokens = DIGITS_BATCH

    def __init__(self) -> None:
        self._digits = digits.load_digits()

    def build(self, seed: int) -> nn.Module:
        return digits.build_digits(seed)

    def batches(self, *, learner_index: int, learners: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        return digits.batches(
            self._digits, learner_index=learner_index, learners=learners, seed=seed, batch=DIGITS_BATCH
        )

    def loss(self, model: nn.Module) -> float:
        return digits.evaluate_digits(model, self._digits)[0]


def task_of(model: str, corpus: data.Corpus) -> Task:
    """By the name of its model; ConfigError where it is unknown."""
    if model == DIGITS:
        return DigitPictures()
    if model not in PRESETS:
        raise ConfigError(f"model={model!r} is unknown; use one of {', '.join([*PRESETS, DIGITS])}")
    return Text(model, corpus)
