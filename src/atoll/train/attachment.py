"""What is watched of a user's model and optimizer between steps: what would go wrong in silence is said once."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from atoll.core.layout import PARAMETER, Layout
from atoll.tensors.names import ModelTensors

_log = logging.getLogger("atoll")
LOOK_EVERY_STEPS = 16
SAMPLE_VALUES = 64
TAKES_WATCHED = 50
TAKES_UNDONE_MAX = 3
NEAR = 0.5


class Attachment:
    """Looks at one model now and then; cheap enough for every step."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._tensors = ModelTensors(model)
        self._trained = {spec.name for piece in layout.pieces for spec in piece.tensors if spec.kind == PARAMETER}
        self._aliases = {alias for spec in layout.tensors() for alias in spec.aliases}
        self._largest = [max(piece.parameters.tensors, key=lambda spec: spec.size).name for piece in layout.pieces]
        self._told: set[str] = set()
        self._took: tuple[int, Tensor, Tensor] | None = None
        self._takes = self._undone = 0

    def stepped(self, step: int) -> None:
        """At the entrance of `step`."""
        self._look_at_what_was_taken()
        if step % LOOK_EVERY_STEPS == 0:
            self._look_at_what_is_trained()

    # ------------------------------------------------------------ trained or frozen since

    def _look_at_what_is_trained(self) -> None:
        now = {name for name, tensor in self._tensors.items() if tensor.requires_grad and tensor.is_leaf}
        new = sorted(now - self._trained - self._aliases)
        frozen = sorted(self._trained - now)
        if new:
            self._say_once(
                "new",
                f"{_names(new)} became trainable after atoll.join: this is not exchanged and not in the merged model; "
                "join again with all that is to be trained",
            )
        if frozen:
            self._say_once(
                "frozen",
                f"{_names(frozen)} was frozen after atoll.join: it is still exchanged, and changes with every update",
            )

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            _log.warning("%s", text)

    # ------------------------------------------------------------ an optimizer with weights of its own

    def taking(self, piece: int, take: Callable[[], None]) -> None:
        """Carry out a take; remember a sample of what it changed."""
        if self._takes >= TAKES_WATCHED:
            take()
            return
        self._takes += 1
        before = self._sample(piece)
        take()
        self._took = piece, before, self._sample(piece)

    def _sample(self, piece: int) -> Tensor:
        flat = self._tensors[self._largest[piece]].detach().reshape(-1)
        return flat[:: max(1, len(flat) // SAMPLE_VALUES)].to("cpu", torch.float32, copy=True)

    def _look_at_what_was_taken(self) -> None:
        """The optimizer has stepped since: are the weights those that were taken, or those from before?"""
        if self._took is None:
            return
        (piece, before, after), self._took = self._took, None
        now = self._sample(piece)
        if now.shape != after.shape:
            return
        change = float((after - before).norm())
        undone = float((now - before).norm()) < NEAR * change < float((now - after).norm())
        self._undone = self._undone + 1 if undone else 0
        if self._undone == TAKES_UNDONE_MAX:
            self._say_once(
                "undone",
                "the optimizer undoes what is taken from the run: it keeps a copy of the weights of its own (master "
                "weights) and writes it back, so this learner drifts away from the others; use one that steps the "
                "model's own parameters",
            )


def _names(names: list[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"{', '.join(map(repr, names[:2]))}{more}"
