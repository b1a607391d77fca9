"""`atoll.load`: a model file of a run into a model, whatever that is wrapped in."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from atoll.errors import LayoutError, RunError
from atoll.tensors.names import ModelTensors

_log = logging.getLogger("atoll")


def load(model: nn.Module, file: str | os.PathLike[str]) -> None:
    """Load `model/model.safetensors` of a run, or a file that `atoll pull` wrote, into `model`, in place.

    Compiled and data-parallel models are looked through; tied tensors are in the file once. RunError where the file
    cannot be read, LayoutError where a tensor of it is not in the model or has another shape; then nothing was changed.
    What the model has and the file lacks (frozen parameters, local buffers) stays, and is named in a warning.
    """
    path, ours = Path(file), ModelTensors(model)
    try:
        with safe_open(os.fspath(path), framework="pt") as source:
            theirs = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    for name, tensor in theirs.items():
        if name not in ours:
            raise LayoutError(f"tensor {name!r} of {path} is not in the model; build the model that the run trained")
        if ours[name].shape != tensor.shape:
            shapes = f"{list(tensor.shape)} in {path} and {list(ours[name].shape)} in the model"
            raise LayoutError(f"tensor {name!r} is {shapes}; build the model that the run trained")
    with torch.no_grad():
        for name, tensor in theirs.items():
            ours[name].copy_(tensor)
    loaded = {id(ours[name]) for name in theirs}
    left = sorted(name for name, tensor in ours.items() if id(tensor) not in loaded)
    if left:
        names = ", ".join(left[:3]) + (", ..." if len(left) > 3 else "")
        _log.warning("%s has no values for %d tensors of the model, which keep theirs: %s", path, len(left), names)
