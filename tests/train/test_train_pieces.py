"""A model's pieces follow what a script does to its modules after join, and say what cannot be followed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from atoll.core.layout import Layout, make_layout
from atoll.errors import LayoutError
from atoll.tensors.names import specs_of
from atoll.train.pieces import Pieces


class Memory:
    """Buffers of one process."""

    def __init__(self, layout: Layout) -> None:
        self._sizes = layout.payload_sizes("fp32")
        self._uploads = [bytearray(size) for size in self._sizes]
        self._places = [bytearray(max(self._sizes)) for _ in self._sizes]

    def upload(self, piece: int) -> memoryview:
        return memoryview(self._uploads[piece])

    def place(self, place: int, size_bytes: int) -> memoryview:
        return memoryview(self._places[place])[:size_bytes]


def pieces_of(model: nn.Module) -> Pieces:
    layout = make_layout(specs_of(model), 1)
    return Pieces(model, layout, "fp32", Memory(layout))


def model_of_two() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_module_replaced_by_one_of_its_shape__is_followed() -> None:
    model = model_of_two()
    pieces = pieces_of(model)
    model[1] = nn.Linear(2, 2)
    with torch.no_grad():
        model[1].weight.fill_(7.0)
    assert (pieces.theta(0) == 7.0).sum() == 4
    pieces.take(0, 0, "adopt", subtract_sent=False)  # an update of zeros
    assert not model[1].weight.any()


def remove_bias(model: nn.Sequential) -> None:
    model[0].bias = None


def prune_one(model: nn.Sequential) -> None:
    prune.random_unstructured(model[0], "weight", 0.5)


def parametrize(model: nn.Sequential) -> None:
    parametrizations.weight_norm(model[0])


def drop_module(model: nn.Sequential) -> None:
    del model[0]


def reshape(model: nn.Sequential) -> None:
    model[0] = nn.Linear(3, 2)


@pytest.mark.parametrize("change", [remove_bias, prune_one, parametrize, drop_module, reshape])
def test_model_changed_after_join__is_one_line(change) -> None:
    model = model_of_two()
    pieces = pieces_of(model)
    pieces.take(0, 0, "adopt", subtract_sent=False)
    change(model)
    for act in (
        lambda: pieces.theta(0),
        lambda: pieces.capture(0),
        lambda: pieces.take(0, 0, "rebase", subtract_sent=False),
        lambda: pieces.take(0, 0, "overwrite", subtract_sent=False),
    ):
        with pytest.raises(LayoutError, match="join with the run's model") as error:
            act()
        assert "\n" not in str(error.value)
