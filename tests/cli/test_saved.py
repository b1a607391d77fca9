"""The line that says how to load a run's model is typed as it was printed, for every kind of model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import atoll
from atoll.cli.saved import how_to_load, next_step
from atoll.core.layout import make_layout
from atoll.core.messages import Version
from atoll.store.model import export_model
from atoll.tensors.flat import gather
from atoll.tensors.names import ModelTensors, specs_of


class Tied(nn.Module):
    """A head that is the embedding, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


def with_buffers() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for tensor in ModelTensors(model).values():
        with torch.no_grad():
            tensor.copy_(3 * torch.rand(tensor.shape))
    return model


def half() -> nn.Module:
    return nn.Linear(4, 4).to(torch.bfloat16)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4))


def bare(model: nn.Module) -> nn.Module:
    return model


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def replicated(model: nn.Module) -> nn.Module:
    return nn.DataParallel(model)


def both(model: nn.Module) -> nn.Module:
    return compiled(replicated(model))


@pytest.mark.parametrize(
    ("wrap", "wrap_fresh"),
    [(bare, bare), (both, bare), (bare, compiled), (bare, replicated), (bare, both)],
    ids=lambda wrap: wrap.__name__,
)
@pytest.mark.parametrize("build", [plain, Tied, with_buffers, half], ids=lambda build: build.__name__)
def test_printed_line__loads_every_kind_of_model(
    tmp_path: Path, build: Callable[[], nn.Module], wrap: Callable, wrap_fresh: Callable
) -> None:
    run = tmp_path / 'a "run" of d\u00e9j\u00e0 vu'
    run.mkdir()
    torch.manual_seed(1)
    trained, fresh = build(), build()
    layout = make_layout(specs_of(wrap(trained)), 1)
    export_model(run / "model", "r", layout, [gather(ModelTensors(trained), layout.pieces[0])], [Version(0, 1)])
    (run / "run.toml").write_text('run_id = "r"\n')
    told = next_step(run)
    assert told == how_to_load(run)
    assert told.isascii()
    exec(told.partition("in Python: ")[2], {"atoll": atoll, "model": wrap_fresh(fresh)})
    before = ModelTensors(trained)
    for name, tensor in ModelTensors(fresh).items():
        assert torch.equal(tensor, before[name]), name
