"""A model's pieces in a learner: capture, taking updates, anchors (protocol R7). Tensors only; no decisions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from atoll.core.layout import Layout
from atoll.errors import ConfigError
from atoll.tensors.codec import decode, encode, payload_bytes
from atoll.tensors.flat import gather, parameters_by_name, scatter_
from atoll.tensors.take import displacement, overwrite, rebase, revert


class Buffers(Protocol):
    """Where bytes to send and bytes received lie: runtime.memory.SharedMemory, or anything like it."""

    def upload(self, piece: int) -> memoryview:
        """The upload buffer of a piece."""

    def place(self, place: int, size_bytes: int) -> memoryview:
        """The first `size_bytes` of a download place."""


class Pieces:
    """Moves pieces between a model and buffers.

    Per piece it keeps the anchor A, the bits as received. What was sent lies in the piece's upload buffer until the
    contribution is settled.
    """

    def __init__(self, model: nn.Module, layout: Layout, payload: str, buffers: Buffers) -> None:
        self._params = parameters_by_name(model)
        self._layout = layout
        self._payload = payload
        self._buffers = buffers
        self._anchors: dict[int, Tensor] = {}
        self._device = _common_device(self._params)

    def _upload(self, piece: int) -> Tensor:
        return torch.frombuffer(self._buffers.upload(piece), dtype=torch.uint8)

    def _place(self, piece: int, place: int) -> Tensor:
        size_bytes = payload_bytes(self._layout.pieces[piece].size, self._payload)
        return torch.frombuffer(self._buffers.place(place, size_bytes), dtype=torch.uint8)

    def _decode(self, raw: Tensor, piece: int) -> Tensor:
        return decode(raw, self._payload, self._layout.pieces[piece].size)

    @property
    def anchored(self) -> set[int]:
        """Pieces that have an anchor: first parameters have come."""
        return set(self._anchors)

    def anchor(self, piece: int) -> Tensor:
        """A of a piece, fp32 [P] on the CPU."""
        return self._decode(self._anchors[piece], piece)

    def theta(self, piece: int) -> Tensor:
        """The piece as it is now: fp32 on the CPU; from an accelerator in one copy."""
        spec = self._layout.pieces[piece]
        if self._device.type == "cpu":
            return gather(self._params, spec)
        flat = torch.empty(spec.size, dtype=torch.float32, device=self._device)
        return gather(self._params, spec, flat).to("cpu")

    def _write(self, piece: int, flat: Tensor) -> None:
        scatter_(self._params, self._layout.pieces[piece], flat.to(self._device))

    def capture(self, piece: int) -> None:
        """sent = encode(theta - A), into the upload buffer."""
        encode(displacement(self.theta(piece), self.anchor(piece)), self._payload, out=self._upload(piece))

    def capture_seed(self) -> tuple[int, ...]:
        """Version 0: theta of every piece into the upload buffers; sizes in bytes."""
        sizes = []
        for piece in self._layout.pieces:
            buffer = self._upload(piece.index)
            encode(self.theta(piece.index), self._payload, out=buffer)
            sizes.append(len(buffer))
        return tuple(sizes)

    def take(self, piece: int, place: int, how: str, *, subtract_sent: bool) -> None:
        """Take the update at `place`: adopt | overwrite | rebase. It becomes the anchor."""
        raw = self._place(piece, place)
        anchor_new = self._decode(raw, piece)
        if how == "rebase":
            sent = self._decode(self._upload(piece), piece) if subtract_sent else None
            self._write(piece, rebase(self.theta(piece), self.anchor(piece), anchor_new, sent))
        else:
            self._write(piece, overwrite(anchor_new))
        if piece in self._anchors:
            self._anchors[piece].copy_(raw)
        else:
            self._anchors[piece] = raw.clone()

    def revert(self, piece: int) -> None:
        """theta = A: a contribution was refused."""
        self._write(piece, revert(self.anchor(piece)))


def _common_device(params: Mapping[str, Tensor]) -> torch.device:
    devices = {parameter.device for parameter in params.values()}
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


def check_optimizers(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """ConfigError names the first trainable parameter that no optimizer holds, or what is foreign to the model."""
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    held_ids = {id(parameter) for parameter in held}
    trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    for identity, name in trainable.items():
        if identity not in held_ids:
            raise ConfigError(f"parameter {name!r} is trainable but not in the optimizer; add it, or freeze it")
    frozen = {id(p): name for name, p in model.named_parameters() if not p.requires_grad}
    for parameter in held:
        if id(parameter) in frozen:
            raise ConfigError(f"the optimizer holds parameter {frozen[id(parameter)]!r}, which is frozen; leave it out")
        if id(parameter) not in trainable:
            shape = list(parameter.shape)
            raise ConfigError(f"the optimizer holds a tensor {shape} that is not a parameter of the model")
