"""Real tensors for the virtual world (sim.bodies): a learner's model and the syncer's pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from atoll.core.config import RunConfig
from atoll.core.layout import Layout, Piece
from atoll.core.messages import Announce
from atoll.tensors.codec import decode, encode
from atoll.tensors.merge import Method, merge_piece
from atoll.tensors.outer import nesterov
from atoll.train.pieces import Pieces


class Heap:
    """Buffers of one learner in ordinary memory (train.pieces.Buffers); one place, since an update is taken at once."""

    def __init__(self, layout: Layout, payload: str) -> None:
        self._uploads = [bytearray(size) for size in layout.payload_sizes(payload)]
        self._place = bytearray(max(map(len, self._uploads)))

    def upload(self, piece: int) -> memoryview:
        """The upload buffer of a piece."""
        return memoryview(self._uploads[piece])

    def place(self, place: int, size_bytes: int) -> memoryview:
        """Where the update that is taken lies."""
        return memoryview(self._place)[:size_bytes]


class ModelBody(ABC):
    """One learner's model (sim.bodies.Body), with the pieces of a real learner. What a step does is the subclass's."""

    def __init__(self, model: nn.Module, layout: Layout, payload: str) -> None:
        self.model = model
        self._heap = Heap(layout, payload)
        self._pieces = Pieces(model, layout, payload, self._heap)

    @abstractmethod
    def step(self, tokens: int) -> None:
        """One inner step."""

    def flat(self, piece: int) -> Tensor:
        """Theta of a piece, fp32 [P]."""
        return self._pieces.theta(piece)

    def _uploaded(self, piece: int) -> Tensor:
        return torch.frombuffer(self._heap.upload(piece), dtype=torch.uint8).clone()

    def capture(self, announce: Announce) -> Tensor:
        """theta - A of a piece, encoded."""
        self._pieces.capture(announce.piece)
        return self._uploaded(announce.piece)

    def capture_seed(self) -> list[Tensor]:
        """Version 0 of every piece, encoded."""
        return [self._uploaded(piece) for piece in range(len(self._pieces.capture_seed()))]

    def take(self, piece: int, payload: Tensor, how: str, *, subtract_sent: bool) -> None:
        """Take an update: adopt | overwrite | rebase."""
        torch.frombuffer(self._heap.place(0, len(payload)), dtype=torch.uint8).copy_(payload)
        self._pieces.take(piece, 0, how, subtract_sent=subtract_sent)

    def revert(self, piece: int) -> None:
        """Back to the anchor."""
        self._pieces.revert(piece)

    def check(self, piece: int, tokens: int, *, over: bool) -> None:
        """The books are checked with stand-ins; a tensor does not tell its tokens."""
        assert piece in self._pieces.anchored or not tokens, f"piece {piece} was trained without first parameters"

    def check_end(self) -> None:
        """AssertionError where theta is not exactly the final version."""
        for piece in self._pieces.anchored:
            assert torch.equal(self.flat(piece), self._pieces.anchor(piece)), f"piece {piece} is not the final version"


class TensorShop:
    """The syncer's tensors (sim.bodies.Shop), with the functions that the real syncer uses."""

    def __init__(self, config: RunConfig, layout: Layout) -> None:
        self._config = config
        self._layout = layout
        self.theta: dict[int, Tensor] = {}
        self._momentum: dict[int, Tensor] = {}
        self.on_merge: Callable[[int, list[Tensor], Tensor], None] | None = None
        """For those who measure: piece, contributions, and what came of them; fp32 [P] each."""

    def seed(self, piece: int, payload: Tensor) -> None:
        """Version 0 of a piece."""
        self.theta[piece] = self._decode(payload, piece)
        self._momentum[piece] = torch.zeros_like(self.theta[piece])

    def _decode(self, data: Tensor, piece: int) -> Tensor:
        return decode(data, self._config.payload, self._layout.pieces[piece].size)

    def merge(self, piece: int, payloads: list[Tensor], weights: list[float]) -> None:
        """Outer gradient of the contributions, then the outer step."""
        deltas = [-self._decode(payload, piece) for payload in payloads]
        delta = self.joined(deltas, weights, self._layout.pieces[piece])
        if self.on_merge is not None:
            self.on_merge(piece, deltas, delta)
        self.theta[piece], self._momentum[piece] = nesterov(
            self.theta[piece],
            self._momentum[piece],
            delta,
            lr=self._config.outer_lr,
            mu=self.mu(piece),
        )

    def joined(self, deltas: Sequence[Tensor], weights: Sequence[float], piece: Piece) -> Tensor:
        """The outer gradient, fp32 [P]."""
        return merge_piece(deltas, weights, piece, cast(Method, self._config.merge))

    def mu(self, piece: int) -> float:
        """Outer momentum of the merge that is under way."""
        return self._config.outer_momentum

    def published(self, piece: int) -> Tensor:
        """What goes out of the newest version."""
        return self.encoded(self.theta[piece])

    def encoded(self, theta: Tensor) -> Tensor:
        """As it goes over the wire."""
        return encode(theta, self._config.payload)

    def finish(self, body: ModelBody) -> None:
        """After the run: make the final model of that of a learner, which has the final version."""
