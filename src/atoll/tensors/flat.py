"""Between a model's parameters and a flat piece.

A flat piece is fp32, 1-D, on the CPU unless the caller gives another place: the tensors of the piece in name
order, each row-major, end to end (`Piece.offsets`). Frozen parameters and buffers are not part of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor, nn

from atoll.core.layout import Piece, TensorSpec, is_embedding_like
from atoll.errors import ConfigError, LayoutError


def _identity(parameter: Tensor) -> Hashable:
    # Two Parameters over the same memory are tied as surely as one with two names; subclasses (DTensor) and
    # meta tensors have no address to compare.
    if type(parameter) is not nn.Parameter or parameter.device.type == "meta" or not parameter.numel():
        return id(parameter)
    return (parameter.data_ptr(), parameter.device, parameter.dtype, parameter.shape, parameter.stride())


def _tied_groups(model: nn.Module) -> list[tuple[list[str], nn.Parameter]]:
    """Trainable parameters with all their names, sorted; groups sorted by first name."""
    groups: dict[Hashable, tuple[list[str], nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            groups.setdefault(_identity(parameter), ([], parameter))[0].append(name)
    return sorted(((sorted(names), parameter) for names, parameter in groups.values()), key=lambda g: g[0][0])


def _embedding_weights(model: nn.Module) -> set[Hashable]:
    modules = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return {_identity(module.weight) for module in modules}


def specs_of(model: nn.Module) -> tuple[TensorSpec, ...]:
    """The trainable tensors of `model`, sorted by name: what a layout is made of.

    Tied tensors appear once, under the name that sorts first. `averaged` marks weights of nn.Embedding and
    nn.EmbeddingBag with everything tied to them, and tensors with a name that says embedding or head.
    """
    embeddings = _embedding_weights(model)
    return tuple(
        TensorSpec(
            name=names[0],
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            averaged=_identity(parameter) in embeddings or any(map(is_embedding_like, names)),
            aliases=tuple(names[1:]),
        )
        for names, parameter in _tied_groups(model)
    )


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Canonical name -> Parameter, for exactly the tensors of `specs_of(model)`."""
    return {names[0]: parameter for names, parameter in _tied_groups(model)}


def _parameter(params: Mapping[str, Tensor], spec: TensorSpec) -> Tensor:
    parameter = params.get(spec.name)
    if parameter is None:
        raise LayoutError(f"tensor {spec.name!r} is missing in the model; join with the run's model")
    if tuple(parameter.shape) != spec.shape:
        raise LayoutError(
            f"tensor {spec.name!r} is {list(parameter.shape)} in the model, {list(spec.shape)} in the run; "
            "join with the run's model"
        )
    return parameter


def _check_flat(flat: Tensor, piece: Piece) -> None:
    if flat.dtype != torch.float32 or tuple(flat.shape) != (piece.size,):
        raise ConfigError(
            f"flat tensor {flat.dtype}{list(flat.shape)} must be torch.float32[{piece.size}] "
            f"for piece {piece.index}"
        )


def gather(params: Mapping[str, Tensor], piece: Piece, out: Tensor | None = None) -> Tensor:
    """Copy the piece out of the parameters: fp32 [piece.size], into `out` (any device) or a new CPU tensor.

    Parameters may live on any device in any float dtype; the cast to fp32 is exact for all but float64.
    """
    flat = torch.empty(piece.size, dtype=torch.float32) if out is None else out
    _check_flat(flat, piece)
    with torch.no_grad():
        for spec, start, stop in piece.offsets():
            flat[start:stop].view(spec.shape).copy_(_parameter(params, spec))
    return flat


def scatter_(params: Mapping[str, Tensor], piece: Piece, flat: Tensor) -> None:
    """Write the piece, fp32 [piece.size], into the parameters in place; narrower dtypes round to nearest.

    Shapes are checked before the first write, so a refused piece leaves the model as it was.
    """
    _check_flat(flat, piece)
    targets = [(_parameter(params, spec), start, stop) for spec, start, stop in piece.offsets()]
    with torch.no_grad():
        for parameter, start, stop in targets:
            parameter.copy_(flat[start:stop].view(parameter.shape))
