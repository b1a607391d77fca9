"""A model's pieces in a learner: capture, taking updates, anchors (protocol R7). Tensors only; no decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from atoll.core.layout import Layout, Piece
from atoll.tensors.codec import decode_piece, encode_piece
from atoll.tensors.flat import gather, scatter_
from atoll.tensors.names import ModelTensors, set_constants
from atoll.tensors.take import displacement, overwrite, rebase, rebase_buffers, revert


class Buffers(Protocol):
    """Where bytes to send and bytes received lie: runtime.memory.SharedMemory, or anything like it."""

    def upload(self, piece: int) -> memoryview:
        """The upload buffer of a piece."""

    def place(self, place: int, size_bytes: int) -> memoryview:
        """The first `size_bytes` of a download place."""


class Pieces:
    """Moves pieces between a model and buffers.

    Per piece it keeps the anchor A, the bits as received. What was sent lies in the piece's upload buffer until the
    contribution is settled. Buffers of the model (R29) travel as they are, not as differences: their average is then
    one of honest statistics, whatever anchors the learners had.
    """

    def __init__(self, model: nn.Module, layout: Layout, payload: str, buffers: Buffers) -> None:
        self._tensors = ModelTensors(model)
        self._layout = layout
        self._payload = payload
        self._buffers = buffers
        self._anchors: dict[int, Tensor] = {}

    def _upload(self, piece: int) -> Tensor:
        return torch.frombuffer(self._buffers.upload(piece), dtype=torch.uint8)

    def _place(self, piece: int, place: int) -> Tensor:
        size_bytes = self._layout.pieces[piece].payload_bytes(self._payload)
        return torch.frombuffer(self._buffers.place(place, size_bytes), dtype=torch.uint8)

    def _decode(self, raw: Tensor, piece: int) -> Tensor:
        return decode_piece(raw, self._layout.pieces[piece], self._payload)

    def _encode(self, flat: Tensor, piece: int, out: Tensor) -> None:
        encode_piece(flat, self._layout.pieces[piece], self._payload, out)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Trained values per piece."""
        return self._layout.piece_sizes

    def move_any(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of them is a tensor of these pieces: the same object, not only the same values."""
        theirs = {id(tensor) for tensor in tensors}
        return any(id(self._tensors.get(spec.name)) in theirs for spec in self._layout.tensors())

    @property
    def anchored(self) -> set[int]:
        """Pieces that have an anchor: first parameters have come."""
        return set(self._anchors)

    def anchor(self, piece: int) -> Tensor:
        """A of a piece, fp32 [P] on the CPU."""
        return self._decode(self._anchors[piece], piece)

    def theta(self, piece: int) -> Tensor:
        """The piece as it is now: fp32 [P] on the CPU; from an accelerator in one copy, and one of its buffers."""
        self._tensors.refresh()
        whole = self._layout.pieces[piece]
        parts = [self._gathered(part) for part in (whole.parameters, whole.buffers) if part.tensors]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _gathered(self, part: Piece) -> Tensor:
        device = self._device(part)
        if device.type == "cpu":
            return gather(self._tensors, part)
        flat = torch.empty(part.size, dtype=torch.float32, device=device)
        return gather(self._tensors, part, flat).to("cpu")

    def _device(self, part: Piece) -> torch.device:
        """Of all tensors of the part, where they have one in common."""
        devices = {self._tensors[spec.name].device for spec in part.tensors if spec.name in self._tensors}
        return devices.pop() if len(devices) == 1 else torch.device("cpu")

    def _write(self, piece: int, flat: Tensor) -> None:
        self._tensors.refresh()
        whole, start = self._layout.pieces[piece], 0
        for part in (whole.parameters, whole.buffers):
            if part.tensors:
                values = flat[start : start + part.size]
                scatter_(self._tensors, part, values.to(self._device(part)))
            start += part.size

    def capture(self, piece: int) -> None:
        """sent = encode(theta - A), and buffers as they are, into the upload buffer."""
        theta, trained = self.theta(piece), self._layout.pieces[piece].parameters.size
        change = displacement(theta[:trained], self.anchor(piece)[:trained])
        whole = change if trained == len(theta) else torch.cat((change, theta[trained:]))
        self._encode(whole, piece, self._upload(piece))

    def capture_seed(self) -> tuple[int, ...]:
        """Version 0: theta of every piece into the upload buffers; sizes in bytes."""
        sizes = []
        for piece in self._layout.pieces:
            buffer = self._upload(piece.index)
            self._encode(self.theta(piece.index), piece.index, buffer)
            sizes.append(len(buffer))
        return tuple(sizes)

    def take(self, piece: int, place: int, how: str, *, subtract_sent: bool) -> None:
        """Take the update at `place`: adopt | overwrite | rebase. It becomes the anchor."""
        raw = self._place(piece, place)
        anchor_new = self._decode(raw, piece)
        taken = self._rebased(piece, anchor_new, subtract_sent) if how == "rebase" else overwrite(anchor_new)
        self._write(piece, taken)
        if piece in self._anchors:
            self._anchors[piece].copy_(raw)
        else:
            self._anchors[piece] = raw.clone()

    def _rebased(self, piece: int, anchor_new: Tensor, subtract_sent: bool) -> Tensor:
        theta, anchor, cut = self.theta(piece), self.anchor(piece), self._layout.pieces[piece].parameters.size
        sent = self._decode(self._upload(piece), piece) if subtract_sent else None
        parameters = rebase(theta[:cut], anchor[:cut], anchor_new[:cut], None if sent is None else sent[:cut])
        if cut == len(theta):
            return parameters
        base = anchor if sent is None else sent
        return torch.cat((parameters, rebase_buffers(theta[cut:], base[cut:], anchor_new[cut:])))

    def revert(self, piece: int) -> None:
        """theta = A: a contribution was refused."""
        self._write(piece, revert(self.anchor(piece)))

    def set_constants(self, values: Mapping[str, bytes]) -> None:
        """Integers of version 0 into the model."""
        set_constants(self._tensors, values)
