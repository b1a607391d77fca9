"""Muon beside AdamW, as one optimizer."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.errors import ConfigError
from atoll.recipes.data import Corpus, batches
from atoll.recipes.loop import TrainConfig, make_optimizer, set_rate, train_step
from atoll.recipes.model import ByteModel, ModelConfig
from atoll.recipes.muon import MUON_LR, hidden_matrices
from atoll.recipes.schedule import rate_factor
from atoll.train.checks import check_optimizers

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
NANO = ModelConfig(layers=1, width=16, heads=2, hidden=24, context=16)
TEXT = b"def turn(island, ring):\n    return [ring[i - 1] for i in range(len(ring)) if ring[i] is not island]\n"


def nano(seed: int = 0) -> tuple[ByteModel, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = ByteModel(NANO)
    return model, make_optimizer(model, lr=1e-3, weight_decay=0.1, inner="muon")


def trained(model: ByteModel, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    tokens = torch.arange(12)[None]
    return [train_step(model, optimizer, tokens, tokens, clip=1.0, who="l1") for _ in range(steps)]


def test_muon__hidden_matrices_and_nothing_else():
    model, optimizer = nano()
    names = {id(p): name for name, p in model.named_parameters()}
    hidden = {names[id(p)] for p in hidden_matrices(model)}
    assert hidden == {name for name in names.values() if name.startswith("blocks.") and "norm" not in name}
    check_optimizers(model, [optimizer])
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(names)


def test_muon__one_schedule_two_peaks():
    _, optimizer = nano()
    for factor in (0.1, 1.0, 0.37):
        set_rate(optimizer, 1e-3 * factor)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([MUON_LR * factor, 1e-3 * factor, 1e-3 * factor])


def test_muon__both_parts_step_and_a_rate_of_0_stands_still():
    model, optimizer = nano()
    before = [p.detach().clone() for p in model.parameters()]
    set_rate(optimizer, 0.0)
    trained(model, optimizer, 1)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    set_rate(optimizer, 1e-3)
    trained(model, optimizer, 3)
    assert not any(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())


def test_muon__goes_on_from_its_state_as_if_never_stopped():
    model, optimizer = nano()
    trained(model, optimizer, 3)
    twin, other = nano(seed=1)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch would share the tensors
    set_rate(other, 1e-3)
    assert len(other.state) == len(optimizer.state) == len(list(model.parameters()))
    assert trained(twin, other, 3) == trained(model, optimizer, 3)


def test_muon__learns_within_60_steps():
    text = np.frombuffer(TEXT * 2000, dtype=np.uint8)
    model = ByteModel(ModelConfig(layers=1, width=32, heads=2, hidden=64, context=32))
    optimizer = make_optimizer(model, lr=1e-3, weight_decay=0.1, inner="muon")
    corpus = Corpus(name="islands", train=text, heldout=text)
    feed = batches(corpus, learner_index=0, learners=1, seed=0, name="l1", generation=1, batch=2, length=32)
    losses = []
    for step in range(60):
        set_rate(optimizer, 1e-3 * rate_factor(step / 60, warmup=0.05))
        losses.append(train_step(model, optimizer, *next(feed), clip=1.0, who="l1"))
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert sum(losses[-10:]) / 10 < 0.9 * math.log(256)


def test_muon__on_a_torch_without_it_says_which_torch_has_it(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ConfigError, match=r"inner='muon' needs torch 2\.9 or newer, and this is torch .*; upgrade it"):
        TrainConfig(name="l1", run_dir=Path("run"), inner="muon")


def test_inner__is_muon_where_torch_has_it__with_rates_that_belong_together(monkeypatch):
    chosen = TrainConfig(name="l1", run_dir=Path("run"))
    assert (chosen.inner, chosen.preset().lr) == ("muon", 1e-3)
    assert TrainConfig(name="l1", run_dir=Path("run"), muon_lr=0.04).preset().lr == 2e-3
    assert TrainConfig(name="l1", run_dir=Path("run"), lr=5e-4).preset().lr == 5e-4
    monkeypatch.delattr(torch.optim, "Muon")
    plain = TrainConfig(name="l1", run_dir=Path("run"))
    assert (plain.inner, plain.preset().lr) == ("adamw", 4e-3)
