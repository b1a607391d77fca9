"""The training loop against a learner of wood, and the schedule it follows."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import ConfigError, DivergedError
from atoll.recipes import loop
from atoll.recipes.loop import TrainConfig, make_optimizer, slow_factor, train, train_step
from atoll.recipes.model import ByteModel, ModelConfig
from atoll.recipes.schedule import rate_factor, rewarm_factor

NANO = ModelConfig(layers=1, width=16, heads=2, hidden=24, context=16)


class WoodenLearner:
    """Counts, and says stop after `limit` steps."""

    def __init__(self, limit: int, generation: int = 1, start: float = 0.0) -> None:
        self.limit, self.generation, self.start = limit, generation, start
        self.calls: list[tuple[int, float]] = []
        self.rates: list[float] = []

    def join(self, model, optimizer, *, name, **options):
        self.model, self.optimizer, self.name, self.options = model, optimizer, name, options
        return self

    @property
    def progress(self) -> float:
        return self.start + (1 - self.start) * len(self.calls) / self.limit

    def step(self, *, tokens, loss):
        self.calls.append((tokens, loss))
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        return len(self.calls) < self.limit

    def close(self, reason):
        self.closed = reason


@pytest.fixture
def config(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    monkeypatch.setitem(loop.MODELS, "tiny", NANO)
    before = torch.get_num_threads()
    yield lambda **changes: TrainConfig(
        **({"name": "l0", "run_dir": tmp_path, "data": (str(text),), "batch": 4, "length": 12} | changes)
    )
    torch.set_num_threads(before)


def test_train__steps_until_told_to_stop_and_learns(config, tmp_path):
    learner = WoodenLearner(limit=60)
    result = train(config(lr=0.02), join=learner.join, address="here")
    assert (result.steps, result.tokens) == (60, 60 * 48)
    assert learner.options == {"address": "here", "steps_dir": tmp_path / "steps"}
    assert {tokens for tokens, _ in learner.calls} == {48}
    losses = [loss for _, loss in learner.calls]
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5
    assert result.loss == losses[-1]
    assert result.model is learner.model


def test_train__says_what_of_its_data_is_left_out(config, tmp_path, caplog):
    """`atoll learner` has its own data, so it says so itself."""
    (tmp_path / "empty.md").write_bytes(b"")
    train(config(data=(str(tmp_path / "text.txt"), str(tmp_path / "empty.md"))), join=WoodenLearner(limit=1).join)
    assert "left out: 1 empty (empty.md)" in caplog.text


def test_train__follows_the_run_s_progress(config):
    learner = WoodenLearner(limit=20)
    train(config(inner="adamw", lr=0.01, warmup=0.25), join=learner.join)
    assert learner.rates == pytest.approx([0.01 * rate_factor(i / 20, warmup=0.25) for i in range(20)])


def test_train__one_that_comes_back_warms_up_again(config):
    learner = WoodenLearner(limit=10, start=0.5)
    train(config(inner="adamw", lr=0.01, rewarm_steps=4), join=learner.join)
    plain = [0.01 * rate_factor(0.5 + i / 20, warmup=0.05) for i in range(10)]
    factors = [rate / base for rate, base in zip(learner.rates, plain, strict=True)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1])


def test_train__same_seed_same_run_and_a_new_life_reads_elsewhere(config):
    runs = [WoodenLearner(limit=4, generation=g) for g in (1, 1, 2)]
    for learner in runs:
        train(config(), join=learner.join)
    assert runs[0].calls == runs[1].calls != runs[2].calls


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_train__bad_loss_stops_before_the_optimizer_steps(config, poison):
    learner = WoodenLearner(limit=9)
    kept: list[torch.Tensor] = []

    def step(*, tokens, loss):
        learner.calls.append((tokens, loss))
        if len(learner.calls) == 2:
            with torch.no_grad():
                learner.model.lm_head.weight[0, 0] = poison
            kept[:] = [p.detach().clone() for p in learner.model.parameters()]
        return True

    learner.step = step
    with pytest.raises(DivergedError, match="learner 'l0' at step 3 is not finite"):
        train(config(), join=learner.join)
    assert len(learner.calls) == 2
    for parameter, before in zip(learner.model.parameters(), kept, strict=True):
        torch.testing.assert_close(parameter.detach(), before, rtol=0, atol=0, equal_nan=True)


def test_train_step__bad_gradient_stops_before_the_optimizer_steps():
    model = ByteModel(NANO)
    optimizer = make_optimizer(model, lr=0.1, weight_decay=0.0)
    before = model.norm.weight.detach().clone()
    model.lm_head.weight.register_hook(lambda grad: grad * math.inf)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(DivergedError, match="gradient norm"):
        train_step(model, optimizer, tokens, tokens, clip=1.0, who="l0")
    assert torch.equal(model.norm.weight, before)


def test_train_step__clips_the_gradient():
    model = ByteModel(NANO)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    tokens = torch.arange(8)[None]
    train_step(model, sgd, tokens, tokens, clip=0.01, who="l0")
    moved = sum((p - b).square().sum() for p, b in zip(model.parameters(), before, strict=True)).sqrt()
    assert moved.item() == pytest.approx(0.01, rel=1e-3)


def test_optimizer__decays_matrices_only():
    model = ByteModel(NANO)
    matrices, gains = make_optimizer(model, lr=0.1, weight_decay=0.3).param_groups
    assert (matrices["weight_decay"], gains["weight_decay"], matrices["betas"]) == (0.3, 0.0, (0.9, 0.95))
    assert all(p.dim() >= 2 for p in matrices["params"])
    assert all(p.dim() == 1 for p in gains["params"])
    assert len(matrices["params"]) + len(gains["params"]) == len(list(model.parameters()))


def test_train__slow_sleeps_in_proportion_and_threads_are_set(config, monkeypatch):
    clock = itertools.count()
    slept: list[float] = []
    monkeypatch.setattr(loop.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(loop.time, "sleep", slept.append)
    train(config(slow=4.0, threads=1), join=WoodenLearner(limit=3).join)
    assert slept == [3.0, 3.0, 3.0]  # each step lasts 1 s by this clock
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "huge"}, "model='huge' is unknown"),
        ({"slow": 0.5}, "slow=0.5 must be at least 1"),
        ({"batch": 0}, "batch=0"),
        ({"threads": -1}, "threads=-1"),
        ({"warmup": 1.5}, "warmup=1.5"),
        ({"length": 17}, "length=17 must be at most context=16 of model='tiny'"),
    ],
)
def test_config__is_checked_when_built(config, change, message):
    with pytest.raises(ConfigError, match=message):
        config(**change)


def test_slow_factor__is_by_name_and_checked():
    assert slow_factor(["a=2", "b=1.5"], "b") == 1.5
    assert slow_factor(["a=2"], "b") == 1.0
    for bad in ("a", "a=", "=2", "a=fast", "a=0.5", "a=nan", "a=inf"):
        with pytest.raises(ConfigError, match="must be NAME=FACTOR"):
            slow_factor([bad], "b")


def test_rate__rises_to_the_peak_then_falls_to_a_tenth_and_is_never_zero():
    rates = [rate_factor(i / 100, warmup=0.1) for i in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[10] == max(rates) == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)


@settings(deadline=None, derandomize=True)
@given(st.floats(-1, 2), st.floats(0, 1))
def test_rate__is_between_a_tenth_and_one_everywhere(progress, warmup):
    assert 0.1 - 1e-12 <= rate_factor(progress, warmup=warmup) <= 1


def test_rewarm__only_for_those_who_joined_after_the_warm_up():
    late = [rewarm_factor(i, steps=4, joined_at=0.3, warmup=0.1) for i in range(6)]
    assert late == [0.25, 0.5, 0.75, 1, 1, 1]
    assert {rewarm_factor(i, steps=4, joined_at=0.1, warmup=0.1) for i in range(6)} == {1.0}
    assert rewarm_factor(0, steps=0, joined_at=0.9, warmup=0.1) == 1.0
