"""Models as files: the final export, and the start from a file (`--init`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from atoll.core.layout import BUFFER, Layout, TensorSpec
from atoll.core.messages import Version
from atoll.errors import RunError
from atoll.store.commits import tensor_hash
from atoll.store.files import write_atomic
from atoll.tensors.hashing import payload_hash


def export_model(
    directory: Path, run_id: str, layout: Layout, thetas: Sequence[Tensor], versions: Sequence[Version]
) -> Path:
    """Write model.safetensors (fp32, canonical names and shapes, tied tensors once; integers as they are), then
    manifest.json with hashes.

    thetas: one fp32 [piece.size] per piece.
    """
    directory.mkdir(exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for piece, theta in zip(layout.pieces, thetas, strict=True):
        for spec, start, stop in piece.offsets():
            tensors[spec.name] = theta[start:stop].view(spec.shape).contiguous()
    tensors |= constants_of(layout)
    data = save(tensors, {"format": "pt", "run_id": run_id, "fingerprint": layout.fingerprint})
    write_atomic(directory / "model.safetensors", data)
    rows = zip(layout.pieces, thetas, versions, strict=True)
    manifest = {
        "run_id": run_id,
        "fingerprint": layout.fingerprint,
        "file": "model.safetensors",
        "file_hash": payload_hash(data),
        "pieces": [
            {"piece": piece.index, "version": list(version), "theta_hash": tensor_hash(theta)}
            for piece, theta, version in rows
        ],
        "aliases": {spec.name: list(spec.aliases) for spec in layout.tensors() if spec.aliases},
    }
    write_atomic(directory / "manifest.json", msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    return directory / "model.safetensors"


FIT = "; start the syncer with --init of the model's own file, or join with the model that the file is of"


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """The open file; RunError where it cannot be read."""
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"init file {path} cannot be read ({' '.join(str(error).split())}); it must be a safetensors file: write "
            "one with safetensors.torch.save_model(model, FILE)"
        ) from error


def load_pieces(path: Path, layout: Layout) -> list[Tensor]:
    """The pieces of a model file, fp32 [piece.size] each; RunError names the first tensor that does not fit."""
    with _reading(path) as file:
        names = set(file.keys())
        return [torch.cat([_tensor(file, names, spec, path) for spec in p.tensors]) for p in layout.pieces]


def constants_of(layout: Layout) -> dict[str, Tensor]:
    """Integer tensors of version 0 by name (R29)."""
    found = {}
    for spec in layout.constants:
        flat = torch.frombuffer(bytearray(spec.value), dtype=getattr(torch, spec.dtype))
        found[spec.name] = flat.view(spec.shape)
    return found


def with_constants_of(path: Path, layout: Layout) -> Layout:
    """The layout with the integers of a file, where that has them in the same shape and dtype. RunError as above."""
    with _reading(path) as file:
        names = set(file.keys())
        return replace(layout, constants=tuple(_constant(file, names, spec) for spec in layout.constants))


def _constant(file, names: set[str], spec: TensorSpec) -> TensorSpec:  # type: ignore[no-untyped-def]
    known = [name for name in (spec.name, *spec.aliases) if name in names]
    found = file.get_tensor(known[0]) if known else None
    if found is None or tuple(found.shape) != spec.shape or str(found.dtype) != f"torch.{spec.dtype}":
        return spec
    return replace(spec, value=found.contiguous().numpy().tobytes())


def check_model_file(path: Path) -> None:
    """RunError where `path` is no safetensors file: seen before any learner waits for it."""
    with _reading(path) as file:
        file.keys()


def _tensor(file, names: set[str], spec, path: Path) -> Tensor:  # type: ignore[no-untyped-def]
    known = [name for name in (spec.name, *spec.aliases) if name in names]
    if not known:
        remedy = "; save it too, or join with buffers='local'" if spec.kind == BUFFER else ""
        raise RunError(f"init file {path} lacks tensor {spec.describe()}, which the learner has{remedy or FIT}")
    shape = tuple(file.get_slice(known[0]).get_shape())
    if shape != spec.shape:
        raise RunError(
            f"init file {path} has {known[0]!r} as {list(shape)}, the learner {spec.describe()}{FIT}"
        )
    return file.get_tensor(known[0]).to(torch.float32).reshape(-1)
