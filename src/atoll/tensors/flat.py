"""Between a model's tensors and a flat piece.

A flat piece is fp32, 1-D, on the CPU unless the caller gives another place: the tensors of the piece in its order, each
row-major, end to end (`Piece.offsets`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from atoll.core.layout import Piece, TensorSpec
from atoll.errors import ConfigError, LayoutError


def _parameter(params: Mapping[str, Tensor], spec: TensorSpec) -> Tensor:
    parameter = params.get(spec.name)
    if parameter is None:
        raise LayoutError(
            f"tensor {spec.name!r} is missing in the model; join with the run's model, and change none of its parts "
            "(weight norm, pruning, removal) afterwards"
        )
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
            f"for fragment {piece.index}"
        )


def gather(params: Mapping[str, Tensor], piece: Piece, out: Tensor | None = None) -> Tensor:
    """Copy the piece out of the parameters: fp32 [piece.size], into `out` (any device) or a new CPU tensor.

    Parameters may live on any device in any float dtype; the cast to fp32 is exact for all but float64.
    """
    flat = torch.empty(piece.size, dtype=torch.float32, device="cpu") if out is None else out
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
