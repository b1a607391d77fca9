"""What trials try beside the method does what it says."""

from __future__ import annotations

import pytest
import torch

from atoll.core.config import RunConfig
from atoll.core.layout import Layout, make_layout
from atoll.study.bodies import ModelBody
from atoll.study.ideas import IDEAS, MomentumWarmUp, RdaByRow, TailAverage, by_row
from atoll.study.trial import Trial, run_trial
from atoll.tensors.codec import encode
from atoll.tensors.merge import rda
from atoll.tensors.names import specs_of
from tests.study.test_trial import SETTINGS, SHORT


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def layout() -> Layout:
    return make_layout(specs_of(model()), 1)


def config() -> RunConfig:
    return RunConfig(run_id="r", steps=100, fragments=1, interval=1, payload="fp32")


def seeded(shop):
    shop.seed(0, encode(torch.ones(layout().pieces[0].size), "fp32"))
    return shop


@pytest.mark.parametrize("idea", [name for name in IDEAS if name])
def test_ideas__each_changes_the_outcome(idea, corpus, monkeypatch):
    monkeypatch.setattr("atoll.study.ideas.TAIL", 0.5)
    base, tried = (run_trial(Trial(settings=SETTINGS, idea=name, **SHORT), corpus).loss for name in ("", idea))
    assert tried != base
    assert tried == pytest.approx(base, rel=0.2)


def test_by_row__is_rda_of_each_row():
    generator = torch.Generator().manual_seed(5)
    deltas = [torch.randn(4 * 6, generator=generator) for _ in range(3)]
    deltas[0][6:12] = 0.0
    rows = [rda([delta[start : start + 6] for delta in deltas], [0.5, 0.3, 0.2]) for start in range(0, 24, 6)]
    assert torch.allclose(by_row(deltas, [0.5, 0.3, 0.2], 4), torch.cat(rows))


def test_by_row__nothing_becomes_nothing():
    assert torch.equal(by_row([torch.zeros(6)] * 2, [0.5, 0.5], 2), torch.zeros(6))


def test_rda_by_row__averages_what_is_averaged():
    piece = layout().pieces[0]
    deltas = [torch.ones(piece.size), torch.full((piece.size,), -0.5)]
    merged = RdaByRow(config(), layout()).joined(deltas, [1.0, 1.0], piece)
    assert torch.isfinite(merged).all()
    averaged = [(start, stop) for spec, start, stop in piece.offsets() if spec.averaged]
    assert averaged
    for start, stop in averaged:
        assert torch.equal(merged[start:stop], torch.full((stop - start,), 0.25))


def test_momentum_warm_up__grows_to_what_is_configured():
    shop = seeded(MomentumWarmUp(config(), layout()))
    assert [shop.mu(0) for _ in range(12)] == pytest.approx([*(0.05 * n for n in range(11)), 0.5])


def test_tail_average__of_the_newest_tenth():
    class Still(ModelBody):
        def step(self, tokens: int) -> None:
            """Trains nothing."""

    body = Still(model(), layout(), "fp32")
    body.capture_seed()
    shop = seeded(TailAverage(config(), layout()))
    for value in range(20):
        shop.theta[0] = torch.full_like(shop.theta[0], float(value))
        shop.published(0)
    shop.finish(body)
    assert torch.equal(body.flat(0), torch.full((layout().pieces[0].size,), 18.5))
