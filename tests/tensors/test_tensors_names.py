"""Which tensors of a model belong to a run: names without wrappers, buffers, constants (R29)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atoll.core.layout import BUFFER, CONSTANT, PARAMETER, fingerprint, make_layout
from atoll.errors import LayoutError
from atoll.tensors.codec import decode_piece, encode_piece
from atoll.tensors.names import ModelTensors, local_names, set_constants, specs_of


class Net(nn.Module):
    """A bit of everything that a state_dict may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.register_buffer("angles", torch.tensor([0.1, 1 / 3]))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("cache", torch.zeros(5), persistent=False)
        self.register_buffer("ids", torch.arange(3))
        self.register_buffer("none", None)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x):
        return self.body(x) + self.angles


def kinds(model: nn.Module, **options: str) -> dict[str, str]:
    return {spec.name: spec.kind for spec in specs_of(model, **options)}


def test_specs__buffers_of_a_state_dict_are_averaged_or_constant() -> None:
    found = kinds(Net())
    assert {name for name, kind in found.items() if kind == BUFFER} == {
        "angles", "body.1.running_mean", "body.1.running_var",
    }  # fmt: skip
    assert {name for name, kind in found.items() if kind == CONSTANT} == {"ids", "body.1.num_batches_tracked"}
    assert len([name for name, kind in found.items() if kind == PARAMETER]) == 6
    assert local_names(Net(), specs_of(Net())) == ["frozen.bias", "frozen.weight", "mask"]


def test_specs__local_buffers_are_left_out() -> None:
    assert set(kinds(Net(), buffers="local").values()) == {PARAMETER}


@pytest.mark.parametrize("wrap", [
    lambda net: torch.compile(net, backend="eager"),
    nn.DataParallel,
    lambda net: torch.compile(nn.DataParallel(net), backend="eager"),
], ids=["compile", "data-parallel", "both"])  # fmt: skip
def test_names__of_a_wrapped_model_are_those_of_the_plain_one(wrap) -> None:
    net = Net()
    assert specs_of(wrap(net)) == specs_of(net)
    assert ModelTensors(wrap(net))["body.0.weight"] is net.body[0].weight


def test_names__of_a_compiled_part_too__and_a_user_s_own_module_keeps_its_name() -> None:
    net, part = Net(), Net()
    part.body[0] = torch.compile(part.body[0], backend="eager")  # type: ignore[assignment]
    assert kinds(part) == kinds(net)
    own = nn.ModuleDict({"module": nn.Linear(2, 2)})
    assert set(kinds(own)) == {"module.weight", "module.bias"}


def test_names__ddp(tmp_path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1)
    try:
        net = Net()
        assert specs_of(nn.parallel.DistributedDataParallel(net)) == specs_of(net)
    finally:
        dist.destroy_process_group()


def test_tensors__are_those_that_the_module_has_now() -> None:
    net = Net()
    tensors = ModelTensors(net)
    net.angles = torch.ones(2)
    assert torch.equal(tensors["angles"], torch.ones(2))


def test_tied_buffers__are_one() -> None:
    norm = nn.BatchNorm1d(4)
    specs = {spec.name: spec for spec in specs_of(nn.ModuleDict({"a": norm, "b": norm}))}
    assert specs["a.running_mean"].aliases == ("b.running_mean",)
    assert "b.running_mean" not in specs


def test_constants__those_that_fit_travel__and_are_set() -> None:
    big = Net()
    big.register_buffer("table", torch.zeros(200_000, dtype=torch.int64))
    assert "table" not in kinds(big)
    assert "table" in local_names(big, specs_of(big))
    model, other = Net(), Net()
    model.ids += 7
    values = {spec.name: spec.value for spec in specs_of(model) if spec.kind == CONSTANT}
    set_constants(ModelTensors(other), values)
    assert torch.equal(other.ids, model.ids)
    assert fingerprint(specs_of(model)) == fingerprint(specs_of(Net())), "models may differ in a constant"
    with pytest.raises(LayoutError, match="constant 'ids'"):
        set_constants(ModelTensors(other), {"ids": b"1"})


def test_payload__parameters_round_and_buffers_do_not() -> None:
    layout = make_layout(specs_of(Net()), 2)
    assert sum(layout.piece_sizes) == 3 * 4 + 4 + 4 + 4 + 4 * 2 + 2
    assert sum(layout.buffer_sizes) == 2 + 4 + 4
    for piece in layout.pieces:
        flat = torch.rand(piece.size)
        for payload in ("bf16", "fp32"):
            coded = encode_piece(flat, piece, payload)
            assert len(coded) == piece.payload_bytes(payload)
            back, trained = decode_piece(coded, piece, payload), piece.parameters.size
            assert torch.equal(back[trained:], flat[trained:])
            rounded = flat[:trained].bfloat16().float() if payload == "bf16" else flat[:trained]
            assert torch.equal(back[:trained], rounded)


def test_layout__every_fragment_has_a_parameter() -> None:
    specs = specs_of(nn.Sequential(nn.Linear(2, 2), *(nn.BatchNorm1d(500, affine=False) for _ in range(6))))
    assert all(piece.parameters.tensors for piece in make_layout(specs, 2).pieces)
    with pytest.raises(Exception, match="more than the model's 2 tensors"):
        make_layout(specs, 3)


def test_layout__what_else_must_agree() -> None:
    specs = specs_of(nn.Linear(2, 2))
    assert make_layout(specs, 1).fingerprint == fingerprint(specs)
    assert make_layout(specs, 1, "relu").fingerprint == fingerprint(specs, "relu") != fingerprint(specs, "tanh")
