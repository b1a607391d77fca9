"""The real core with real tensors in virtual time: `diloco` and `streaming` equal references of a few lines.

A learner's model is two weight vectors, its loss a quadratic of its own that changes with the step; inner SGD. The
references know nothing of slots, seqs or messages.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.core.layout import make_layout
from atoll.core.messages import Life
from atoll.sim.plan import LearnerSpec
from atoll.sim.world import World
from atoll.study.bodies import ModelBody, TensorShop
from atoll.tensors.names import specs_of

SIZE, LEARNERS, TOKENS, RATE = 12, 3, 100, 0.05


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.a = nn.Parameter(torch.randn(SIZE, generator=generator))
        self.b = nn.Parameter(torch.randn(SIZE, generator=generator))


def target(learner: int, step: int) -> Tensor:
    """What learner `learner` pulls towards in its step `step` (from 0)."""
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(1000 * learner + step))


def inner_step(a: Tensor, b: Tensor, learner: int, step: int) -> tuple[Tensor, Tensor]:
    """One SGD step on |a * b - target|^2 / 2, by hand."""
    error = a * b - target(learner, step)
    return a - RATE * error * b, b - RATE * error * a


class QuadraticBody(ModelBody):
    """A learner of the world that trains on its quadratic."""

    def __init__(self, world: World, life: Life) -> None:
        self.quadratic = Model()
        super().__init__(self.quadratic, world.layout, world.config.payload)
        self.steps, self.learner = 0, int(life.name[1:])

    def step(self, tokens: int) -> None:
        with torch.no_grad():
            a, b = inner_step(self.quadratic.a, self.quadratic.b, self.learner, self.steps)
            self.quadratic.a.copy_(a)
            self.quadratic.b.copy_(b)
        self.steps += 1


def shop_of(world: World) -> TensorShop:
    return TensorShop(world.config, world.layout)


def run(fragments: int, **settings: Any) -> list[Tensor]:
    """(a, b) of the final model, after checking that every learner holds it."""
    shops: list[TensorShop] = []

    def make_shop(world: World) -> TensorShop:
        shops.append(shop_of(world))
        return shops[0]

    learners = [LearnerSpec(name=f"l{i}", jitter=0.3, tokens=TOKENS) for i in range(LEARNERS)]
    layout = make_layout(specs_of(Model()), fragments)
    world = World(
        seed=5,
        learners=learners,
        layout=layout,
        fragments=fragments,
        payload="fp32",
        merge="average",
        make_body=QuadraticBody,
        make_shop=make_shop,
        **settings,
    )
    world.run()
    final = torch.cat([shops[0].theta[p] for p in range(fragments)])
    for life in world.lives:
        body = life.body
        assert isinstance(body, QuadraticBody)
        assert torch.equal(torch.cat([body.flat(p) for p in range(fragments)]), final)
    return list(final.split(SIZE))


def mean(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows).mean(0)


def outer(theta: Tensor, buf: Tensor, delta: Tensor, lr: float, mu: float) -> tuple[Tensor, Tensor]:
    buf = mu * buf + delta
    return theta - lr * (delta + mu * buf), buf


def diloco_reference(rounds: int, interval: int, lr: float, mu: float) -> list[Tensor]:
    theta = [Model().a.detach(), Model().b.detach()]
    buf = [torch.zeros(SIZE), torch.zeros(SIZE)]
    for turn in range(rounds):
        ends = []
        for learner in range(LEARNERS):
            a, b = theta
            for step in range(turn * interval, (turn + 1) * interval):
                a, b = inner_step(a, b, learner, step)
            ends.append((a, b))
        for i in range(2):
            theta[i], buf[i] = outer(theta[i], buf[i], theta[i] - mean([end[i] for end in ends]), lr, mu)
    return theta


def streaming_reference(slots: int, s: int, tau: int, take: str, lr: float, mu: float) -> list[Tensor]:
    """Fragment k mod 2 is sent at step k*s and its update taken at k*s + tau; what is left goes at the end."""
    theta = [Model().a.detach(), Model().b.detach()]
    anchors, buf = list(theta), [torch.zeros(SIZE), torch.zeros(SIZE)]
    local = [list(theta) for _ in range(LEARNERS)]
    sent: dict[int, list[Tensor]] = {}
    for step in range(slots * s + tau):
        for learner in range(LEARNERS):
            local[learner] = list(inner_step(*local[learner], learner, step))
        for slot in (k for k in range(1, slots + 1) if k * s == step + 1):
            sent[slot] = [row[slot % 2] - anchors[slot % 2] for row in local]
        for slot in (k for k in range(1, slots + 1) if k * s + tau == step + 1):
            i = slot % 2
            new, buf[i] = outer(anchors[i], buf[i], -mean(sent[slot]), lr, mu)
            for learner, row in enumerate(local):
                row[i] = new if take == "overwrite" else new + (row[i] - anchors[i] - sent[slot][learner])
            anchors[i] = new
    for slot in range(slots + 1, slots + 3):
        i = slot % 2
        left = [row[i] - anchors[i] for row in local]
        if any(bool(x.abs().max() > 0) for x in left):
            anchors[i], buf[i] = outer(anchors[i], buf[i], -mean(left), lr, mu)
    return anchors


@pytest.mark.parametrize("take", ["overwrite", "rebase"])
def test_diloco_is_diloco(take: str) -> None:
    settings = {"outer_lr": 0.7, "outer_momentum": 0.9, "take": take}
    got = run(1, mode="diloco", overlap=0, interval=4, steps=20, **settings)
    want = diloco_reference(5, 4, 0.7, 0.9)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("take", ["overwrite", "rebase"])
@pytest.mark.parametrize("tau", [0, 1, 2])
def test_streaming_is_streaming(take: str, tau: int) -> None:
    got = run(2, mode="streaming", overlap=tau, interval=6, steps=30, outer_lr=0.5, outer_momentum=0.8, take=take)
    want = streaming_reference(10, 3, tau, take, 0.5, 0.8)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_one_learner__average_lr_1_mu_0__lands_on_its_own_weights() -> None:
    """Hazard 1: the outer step went in the wrong direction."""
    layout = make_layout(specs_of(Model()), 1)
    shops: list[TensorShop] = []

    def make_shop(world: World) -> TensorShop:
        shops.append(shop_of(world))
        return shops[0]

    world = World(
        seed=1,
        learners=[LearnerSpec(name="l0", tokens=TOKENS)],
        layout=layout,
        fragments=1,
        interval=4,
        steps=8,
        payload="fp32",
        merge="average",
        outer_lr=1.0,
        outer_momentum=0.0,
        mode="diloco",
        overlap=0,
        make_body=QuadraticBody,
        make_shop=make_shop,
    )
    world.run()
    a, b = Model().a.detach(), Model().b.detach()
    for step in range(8):
        a, b = inner_step(a, b, 0, step)
    got = shops[0].theta[0]
    ulp = torch.finfo(torch.float32).eps * torch.maximum(got.abs(), torch.cat([a, b]).abs())
    assert bool(((got - torch.cat([a, b])).abs() <= 16 * ulp + 1e-7).all())
