"""A trial is the whole method in one process: real core, real tensors, virtual time."""

from __future__ import annotations

import math
from typing import Any

import pytest

from atoll.errors import ConfigError
from atoll.recipes.data import Corpus
from atoll.study.trial import METHODS, Trial, run_trial

SHORT: dict[str, Any] = {"learners": 2, "steps": 8, "seed": 3}
SETTINGS = {"fragments": 2, "interval": 4}


@pytest.mark.parametrize("method", METHODS)
def test_trial__every_method_learns_and_says_what_it_cost(method: str, corpus: Corpus) -> None:
    settings = SETTINGS if method == "atoll" else {}
    outcome = run_trial(Trial(method=method, settings=settings, **SHORT), corpus)
    assert outcome.loss < 0.98 * math.log(256), "an untrained model guesses among 256 bytes"
    assert len(outcome.curve) >= 8
    assert outcome.curve[-1] < outcome.curve[0]
    steps = outcome.tokens / (8 * 128) / (1 if method == "alone" else 2)
    assert steps == 8 if method != "atoll" else 8 <= steps <= 10
    assert (outcome.participation == 1.0) == (method == "atoll")


def test_trial__muon_is_another_inner_optimizer(corpus: Corpus) -> None:
    adamw, muon = (run_trial(Trial(inner=inner, settings=SETTINGS, **SHORT), corpus) for inner in ("adamw", "muon"))
    assert muon.loss < 0.98 * math.log(256)
    assert muon.loss != adamw.loss
    with pytest.raises(ConfigError, match="inner='sgd' is unknown"):
        Trial(inner="sgd")


def test_trial__the_same_trial_has_the_same_outcome(corpus: Corpus) -> None:
    first, again = (run_trial(Trial(settings=SETTINGS, **SHORT), corpus) for _ in range(2))
    assert (first.loss, first.autocorrelation, first.agreement) == (again.loss, again.autocorrelation, again.agreement)


def test_trial__one_learner_average_outer_step_1_is_that_learner_alone(corpus: Corpus) -> None:
    """Hazard 1, with the whole recipe. It trains one step more: it hears of the end in the middle of that step."""
    plain = {**SETTINGS, "merge": "average", "outer_lr": 1.0, "outer_momentum": 0.0, "payload": "fp32"}
    short = {**SHORT, "learners": 1}
    merged = run_trial(Trial(settings={**plain, "take": "rebase"}, **short), corpus)
    alone = run_trial(Trial(method="alone", **short), corpus)
    assert merged.tokens == 9 * 8 * 128
    assert merged.loss == pytest.approx(alone.loss, rel=0.02)


def test_trial__unknown_methods_and_settings_that_do_nothing_are_named() -> None:
    with pytest.raises(ConfigError, match="method='sgd' is unknown"):
        Trial(method="sgd")
    with pytest.raises(ConfigError, match="'alone' takes no settings"):
        Trial(method="alone", settings={"fragments": 2})


@pytest.mark.parametrize("model", ["tiny-moe", "vit-digits"])
@pytest.mark.parametrize("method", ["atoll", "data-parallel"])
def test_trial__other_kinds_of_model_learn_too(model: str, method: str, corpus: Corpus) -> None:
    """A mixture of experts on text, a vision transformer on digits."""
    settings = SETTINGS if method == "atoll" else {}
    longer = {"steps": 40, "lr": 3e-3} if model == "vit-digits" else {}
    outcome = run_trial(Trial(method=method, model=model, settings=settings, **{**SHORT, **longer}), corpus)
    guess = math.log(10 if model == "vit-digits" else 256)
    assert outcome.loss < 0.95 * guess


def test_trial__an_unknown_model_is_named(corpus: Corpus) -> None:
    with pytest.raises(ConfigError, match="model='huge' is unknown; use one of tiny, "):
        run_trial(Trial(model="huge", **SHORT), corpus)
