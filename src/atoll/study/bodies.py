"""Real tensors for the virtual world (sim.bodies): a learner's model and the syncer's pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import cast

import torch
from torch import Tensor, nn

from atoll.core.config import RunConfig
from atoll.core.layout import Layout
from atoll.core.messages import Announce
from atoll.tensors.codec import decode, encode
from atoll.tensors.flat import gather, parameters_by_name, scatter_
from atoll.tensors.merge import Method, merge_piece
from atoll.tensors.outer import nesterov
from atoll.tensors.take import displacement, rebase


class ModelBody(ABC):
    """One learner's model (sim.bodies.Body). What a step does is the subclass's."""

    def __init__(self, model: nn.Module, layout: Layout, payload: str) -> None:
        self.model = model
        self._layout = layout
        self._payload = payload
        self._params = parameters_by_name(model)
        self._anchors: dict[int, Tensor] = {}
        self._sent: dict[int, Tensor] = {}

    @abstractmethod
    def step(self, tokens: int) -> None:
        """One inner step."""

    def flat(self, piece: int) -> Tensor:
        """Theta of a piece, fp32 [P]."""
        return gather(self._params, self._layout.pieces[piece])

    def _decode(self, data: Tensor, piece: int) -> Tensor:
        return decode(data, self._payload, self._layout.pieces[piece].size)

    def capture(self, announce: Announce) -> Tensor:
        """theta - A of a piece, encoded."""
        piece = announce.piece
        data = encode(displacement(self.flat(piece), self._anchors[piece]), self._payload)
        self._sent[piece] = self._decode(data, piece)
        return data

    def capture_seed(self) -> list[Tensor]:
        """Version 0 of every piece, encoded."""
        return [encode(self.flat(piece.index), self._payload) for piece in self._layout.pieces]

    def take(self, piece: int, payload: Tensor, how: str, *, subtract_sent: bool) -> None:
        """Take an update: adopt | overwrite | rebase."""
        anchor = self._decode(payload, piece)
        theta = anchor
        if how == "rebase":
            sent = self._sent[piece] if subtract_sent else None
            theta = rebase(self.flat(piece), self._anchors[piece], anchor, sent)
        scatter_(self._params, self._layout.pieces[piece], theta)
        self._anchors[piece] = anchor

    def revert(self, piece: int) -> None:
        """Back to the anchor."""
        scatter_(self._params, self._layout.pieces[piece], self._anchors[piece])

    def check(self, piece: int, tokens: int, *, over: bool) -> None:
        """The books are checked with stand-ins; a tensor does not tell its tokens."""
        assert piece in self._anchors or not tokens, f"piece {piece} was trained without first parameters"

    def check_end(self) -> None:
        """AssertionError where theta is not exactly the final version."""
        for piece, anchor in self._anchors.items():
            assert torch.equal(self.flat(piece), anchor), f"piece {piece} is not the final version"


class TensorShop:
    """The syncer's tensors (sim.bodies.Shop), with the functions that the real syncer uses."""

    def __init__(self, config: RunConfig, layout: Layout) -> None:
        self._config = config
        self._layout = layout
        self.theta: dict[int, Tensor] = {}
        self._momentum: dict[int, Tensor] = {}

    def seed(self, piece: int, payload: Tensor) -> None:
        """Version 0 of a piece."""
        self.theta[piece] = self._decode(payload, piece)
        self._momentum[piece] = torch.zeros_like(self.theta[piece])

    def _decode(self, data: Tensor, piece: int) -> Tensor:
        return decode(data, self._config.payload, self._layout.pieces[piece].size)

    def merge(self, piece: int, payloads: list[Tensor], weights: list[float]) -> None:
        """Outer gradient of the contributions, then the outer step."""
        deltas = [-self._decode(payload, piece) for payload in payloads]
        delta = merge_piece(deltas, weights, self._layout.pieces[piece], cast(Method, self._config.merge))
        self.merged(piece, deltas, delta)
        self.theta[piece], self._momentum[piece] = nesterov(
            self.theta[piece],
            self._momentum[piece],
            delta,
            lr=self._config.outer_lr,
            mu=self._config.outer_momentum,
        )

    def merged(self, piece: int, deltas: list[Tensor], delta: Tensor) -> None:
        """For those who measure: the contributions, and what came of them. fp32 [P] each."""

    def published(self, piece: int) -> Tensor:
        """What goes out of the newest version."""
        return encode(self.theta[piece], self._config.payload)
