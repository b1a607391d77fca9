"""What is watched of a user's model and optimizer between steps: what would go wrong in silence is said once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

from atoll.core.layout import PARAMETER, Layout
from atoll.tensors.names import ModelTensors, identity_of

_log = logging.getLogger("atoll")
LOOK_EVERY_STEPS = 16
SAMPLE_VALUES = 64
TAKES_WATCHED = 50
TAKES_UNDONE_MAX = 3
NEAR = 0.5
EVALS_SEEN = 2
OF_MODES = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)
"""What does something else in eval mode."""


class Attachment:
    """Looks at one model now and then; cheap enough for every step."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._model = model
        self._tensors = ModelTensors(model)
        specs = [spec for piece in layout.pieces for spec in piece.tensors]
        self._trained = {spec.name for spec in specs if spec.kind == PARAMETER}
        self._tied = {alias: spec.name for spec in specs for alias in spec.aliases}
        self._largest = [max(piece.parameters.tensors, key=lambda spec: spec.size).name for piece in layout.pieces]
        self._told: set[str] = set()
        self._took: tuple[int, Tensor, Tensor] | None = None
        self._takes = self._undone = self._evals = 0

    def stepped(self, step: int) -> None:
        """At the entrance of `step`."""
        self._look_at_what_was_taken()
        if step % LOOK_EVERY_STEPS == 0:
            self._look_at_the_model()

    # ------------------------------------------------------------ trained, frozen, tied or untied since

    def _look_at_the_model(self) -> None:
        self._tensors.refresh()
        now = {name: tensor for name, tensor in self._tensors.items() if tensor.requires_grad and tensor.is_leaf}
        self._look_at_the_mode()
        self._look_at_what_is_trained(set(now))
        self._look_at_ties({name: identity_of(tensor) for name, tensor in now.items()})

    def _look_at_the_mode(self) -> None:
        """Evaluated in the loop, and left so. Seen twice running: a step may be called from inside an evaluation."""
        self._evals = 0 if self._model.training else self._evals + 1
        if self._evals == EVALS_SEEN and any(isinstance(module, OF_MODES) for module in self._model.modules()):
            self._say_once(
                "eval",
                "the model is in eval mode while it trains: statistics of its batch norms stand still and go into the "
                "merged model so, dropout is off; call model.train() after an evaluation",
            )

    def _look_at_what_is_trained(self, now: set[str]) -> None:
        new = sorted(now - self._trained - self._tied.keys())
        frozen = sorted(self._trained - now)
        if new:
            self._say_once(
                "new",
                f"{_names(new)} was added or became trainable after atoll.join: this is not exchanged and not in the "
                "merged model; join again with all that is to be trained",
            )
        if frozen:
            self._say_once(
                "frozen",
                f"{_names(frozen)} was frozen after atoll.join: it is still exchanged, and changes with every update",
            )

    def _look_at_ties(self, now: dict[str, Hashable]) -> None:
        """What had one name has two places, or the other way round."""
        untied = sorted(name for name, first in self._tied.items() if name in now and now[name] != now.get(first))
        places = Counter(now[name] for name in self._trained if name in now)
        shared = sorted(name for name in self._trained if name in now and places[now[name]] > 1)
        if untied:
            self._say_once(
                "untied",
                f"{_names(untied)} was tied to another parameter at atoll.join and is not any more: it is not "
                "exchanged, and the merged model has it tied; join again with the model as it is now",
            )
        if shared:
            self._say_once(
                "shared",
                f"{_names(shared)} became one parameter after atoll.join: the run holds them apart, and each update of "
                "one overwrites the other; join again with the model as it is now",
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
        self._tensors.refresh()
        before = self._sample(piece)
        take()
        self._took = piece, before, self._sample(piece)

    def _sample(self, piece: int) -> Tensor:
        tensor = self._tensors.get(self._largest[piece])
        if tensor is None:
            return torch.empty(0, device="cpu", dtype=torch.float32)
        flat = tensor.detach().reshape(-1)
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
