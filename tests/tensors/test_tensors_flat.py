"""Flat pieces: names, ties, marks, and the way there and back."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from atoll.core.layout import Piece, TensorSpec, make_layout
from atoll.errors import ConfigError, LayoutError
from atoll.tensors.flat import gather, scatter_
from atoll.tensors.names import parameters_by_name, specs_of


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.zoo = nn.Embedding(7, 3)
        self.out = nn.Linear(3, 7, bias=False)
        self.out.weight = self.zoo.weight
        self.mid = nn.Linear(3, 3)
        self.frozen = nn.Linear(2, 2)
        self.frozen.requires_grad_(False)
        self.bags = nn.EmbeddingBag(5, 2)
        self.lm_head = nn.Linear(2, 2, bias=False)


def test_specs__tied_once_under_first_name_with_marks_and_without_frozen():
    assert specs_of(Tied()) == (
        TensorSpec("bags.weight", (5, 2), "float32", averaged=True),
        TensorSpec("lm_head.weight", (2, 2), "float32", averaged=True),
        TensorSpec("mid.bias", (3,), "float32"),
        TensorSpec("mid.weight", (3, 3), "float32"),
        TensorSpec("out.weight", (7, 3), "float32", averaged=True, aliases=("zoo.weight",)),
    )


def test_specs__two_parameters_over_the_same_memory_are_tied():
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = nn.Parameter(model["a"].weight.data)
    assert specs_of(model) == (TensorSpec("a.weight", (3, 3), "float32", aliases=("b.weight",)),)


def test_specs__same_on_the_meta_device():
    with torch.device("meta"):
        model = Tied()
        model.out.weight = model.zoo.weight
    assert specs_of(model) == specs_of(Tied())


def test_parameters_by_name__are_the_model_s_own_under_the_names_of_specs():
    model = Tied()
    params = parameters_by_name(model)
    assert tuple(params) == tuple(spec.name for spec in specs_of(model))
    assert params["out.weight"] is model.zoo.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("fragments", [1, 3])
def test_gather_scatter__every_value_goes_to_its_place_and_back(dtype, fragments):
    torch.manual_seed(0)
    source, target = Tied().to(dtype), Tied().to(dtype)
    params, others = parameters_by_name(source), parameters_by_name(target)
    for piece in make_layout(specs_of(source), fragments).pieces:
        flat = gather(params, piece)
        assert flat.dtype == torch.float32
        assert flat.device.type == "cpu"
        assert not flat.requires_grad
        assert torch.equal(flat, torch.cat([params[s.name].data.float().flatten() for s in piece.tensors]))
        scatter_(others, piece, flat)
        assert torch.equal(gather(others, piece), flat)
    assert torch.equal(source.mid.weight.float(), target.mid.weight.float())
    assert torch.equal(source.zoo.weight.float(), target.out.weight.float())
    assert not torch.equal(source.frozen.weight, target.frozen.weight)


def test_gather_scatter__transposed_memory_keeps_logical_order():
    weight = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    piece = Piece(0, (TensorSpec("w", (3, 2), "float32"),))
    assert gather({"w": weight}, piece).tolist() == [0, 3, 1, 4, 2, 5]
    scatter_({"w": weight}, piece, torch.arange(6.0))
    assert weight.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_gather__is_a_copy_and_reuses_out():
    model = Tied()
    piece = make_layout(specs_of(model), 1).pieces[0]
    out = torch.empty(piece.size)
    assert gather(parameters_by_name(model), piece, out) is out
    kept = out.clone()
    with torch.no_grad():
        model.mid.weight.zero_()
    assert torch.equal(out, kept)


def test_scatter__keeps_parameters_leaves_that_still_train():
    model = Tied()
    piece = make_layout(specs_of(model), 1).pieces[0]
    scatter_(parameters_by_name(model), piece, torch.ones(piece.size))
    model.mid(torch.ones(3)).sum().backward()
    assert model.mid.weight.grad is not None


def test_scatter__refused_piece_leaves_the_model_as_it_was():
    model = Tied()
    params = parameters_by_name(model)
    piece = Piece(0, (TensorSpec("mid.bias", (3,), "float32"), TensorSpec("mid.weight", (9,), "float32")))
    before = model.mid.bias.clone()
    with pytest.raises(LayoutError, match=r"'mid.weight' is \[3, 3\] in the model, \[9\] in the run"):
        scatter_(params, piece, torch.full((12,), 5.0))
    assert torch.equal(model.mid.bias, before)


def test_gather_scatter__missing_tensor_and_wrong_flat_are_refused():
    params = parameters_by_name(Tied())
    with pytest.raises(LayoutError, match="tensor 'nope' is missing"):
        gather(params, Piece(0, (TensorSpec("nope", (3,), "float32"),)))
    piece = Piece(4, (TensorSpec("mid.bias", (3,), "float32"),))
    for flat in (torch.zeros(4), torch.zeros(3, dtype=torch.float64), torch.zeros(3, 1)):
        with pytest.raises(ConfigError, match=r"must be torch.float32\[3\] for fragment 4"):
            scatter_(params, piece, flat)


def test_hashing__runs_without_torch():
    code = "import sys, atoll.tensors.hashing as h; print(h.payload_hash(b''), 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["e3b0c44298fc1c149afbf4c8996fb924", "False"]
