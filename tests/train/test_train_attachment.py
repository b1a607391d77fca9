"""What is watched of a model between steps, and steps that are whole or not done."""

from __future__ import annotations

import logging
import os
import signal
import threading

import pytest
import torch
from torch import nn

from atoll.core.layout import make_layout
from atoll.errors import RunError
from atoll.tensors.names import specs_of
from atoll.train.attachment import LOOK_EVERY_STEPS, TAKES_UNDONE_MAX, Attachment
from atoll.train.whole import Whole


def attached(model: nn.Module) -> Attachment:
    return Attachment(model, make_layout(specs_of(model), 1))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_unfrozen_and_frozen_later__is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    watch = attached(model)
    watch.stepped(0)
    assert not said(caplog)
    model[0].requires_grad_(True)
    model[1].bias.requires_grad_(False)
    for step in range(3 * LOOK_EVERY_STEPS):
        watch.stepped(step)
    unfrozen, frozen = said(caplog)
    assert "'0.bias', '0.weight' was added or became trainable after atoll.join" in unfrozen
    assert "'1.bias' was frozen after atoll.join" in frozen


def test_tied_parameters__are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    attached(model).stepped(0)
    assert not said(caplog)


def untie(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(model[0].weight.detach().clone())


def tie(model: nn.Sequential) -> None:
    model[2].weight = model[0].weight


def add(model: nn.Sequential) -> None:
    model.register_parameter("extra", nn.Parameter(torch.ones(3)))


def add_module(model: nn.Sequential) -> None:
    model.add_module("3", nn.Linear(2, 2, bias=False))


@pytest.mark.parametrize(("change", "words"), [
    (untie, "'1.weight' was tied to another parameter"),
    (tie, "'0.weight', '2.weight' became one parameter"),
    (add, "'extra' was added"),
    (add_module, "'3.weight' was added"),
])  # fmt: skip
def test_changes_of_structure_after_join__are_said_once(change, words, caplog) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    model[1].weight = model[0].weight
    watch = attached(model)
    watch.stepped(0)
    assert not said(caplog)
    change(model)
    for step in range(3 * LOOK_EVERY_STEPS):
        watch.stepped(step)
    (told,) = said(caplog)
    assert words in told


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9),
    lambda p: torch.optim.AdamW(p, lr=0.05),
], ids=["sgd", "momentum", "adamw"])  # fmt: skip
@pytest.mark.parametrize("size", [0.0, 1e-4, 0.1, 3.0])
def test_optimizers_that_step_the_model_s_own_weights__raise_no_alarm(make, size, caplog) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    watch, optimizer = attached(model), make(model.parameters())

    def take() -> None:
        with torch.no_grad():
            model.weight.add_(size * torch.randn(16, 16))

    for step in range(40):
        optimizer.zero_grad()
        (model(torch.randn(8, 16)) - 1).square().mean().backward()
        optimizer.step()
        watch.stepped(step)
        watch.taking(0, take)
    assert not said(caplog)


def test_optimizer_with_weights_of_its_own__is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    watch, master = attached(model), model.weight.detach().clone()

    def take() -> None:
        with torch.no_grad():
            model.weight.add_(0.1 * torch.randn(16, 16))

    for step in range(TAKES_UNDONE_MAX + 5):
        master += 0.001 * torch.randn(16, 16)
        with torch.no_grad():
            model.weight.copy_(master)
        watch.stepped(step)
        watch.taking(0, take)
    [line] = said(caplog)
    assert "undoes what is taken" in line


def test_ctrl_c__in_the_middle_of_a_step__comes_at_its_end() -> None:
    whole, done = Whole(), []

    def step() -> None:
        with whole:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                done.append(1)
            assert whole.noted

    with pytest.raises(KeyboardInterrupt):
        step()
    assert len(done) == 1000
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with whole:
        assert not whole.noted


def test_two_threads__the_second_is_told() -> None:
    whole, errors = Whole(), []

    def other() -> None:
        try:
            with whole:
                pass
        except RunError as error:
            errors.append(error)

    with whole:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "another thread" in str(errors[0])
    with whole:
        pass


def test_eval_mode__that_was_left_on__is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    watch = attached(model)
    for step in range(3 * LOOK_EVERY_STEPS):
        model.train(step % LOOK_EVERY_STEPS != 0 or step % (2 * LOOK_EVERY_STEPS) != 0)
        watch.stepped(step)
    assert not said(caplog), "back again before the next look"
    model.eval()
    for step in range(5 * LOOK_EVERY_STEPS):
        watch.stepped(step)
    (told,) = said(caplog)
    assert "call model.train() after an evaluation" in told


def test_eval_mode__of_a_model_that_is_the_same_in_both__is_no_matter(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)).eval()
    watch = attached(model)
    for step in range(5 * LOOK_EVERY_STEPS):
        watch.stepped(step)
    assert not said(caplog)
