"""Muon for the hidden matrices, AdamW for the rest: two optimizers that look like one.

Muon (https://kellerjordan.github.io/posts/muon/) makes the momentum of a matrix orthogonal before it steps, so the rate
says how far a matrix turns and does not depend on the size of its gradients. Embeddings, the head and gains are no maps
between hidden states; they stay with AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from atoll.errors import ConfigError
from atoll.tensors.names import parameters_by_name, specs_of

MUON_LR = 0.02
ADAMW_SHARE = 0.05
"""Rate of AdamW beside Muon, as a multiple of Muon's: tuned together (docs/QUALITY.md)."""
TORCH_WITH_MUON = "2.9"
RATE_SHARE = "rate_share"
"""Key of a parameter group: its rate as a multiple of the optimizer's."""


class MuonAdamW(torch.optim.Optimizer):
    """One optimizer to its user; `param_groups` are those of both parts, so rates set there reach them."""

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        self._parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._link()

    def _link(self) -> None:
        """The groups and states of the parts, not copies of them."""
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        self.state.clear()
        for part in self._parts:
            self.state.update(part.state)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Both parts; the loss of `closure`, where there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        self._link()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Of both parts, by their place."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._link()


def has_muon() -> bool:
    """Whether this torch has Muon."""
    return hasattr(torch.optim, "Muon")


def check_muon() -> None:
    """ConfigError where this torch has no Muon."""
    if not has_muon():
        raise ConfigError(
            f"inner='muon' needs torch {TORCH_WITH_MUON} or newer, and this is torch {torch.__version__}; upgrade it, "
            "or use inner='adamw'"
        )


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Trainable matrices that are neither embedding nor head, in name order."""
    named = parameters_by_name(model)
    return [named[spec.name] for spec in specs_of(model) if len(spec.shape) == 2 and not spec.averaged]


def make_muon(matrices: list[nn.Parameter], *, lr: float, muon_lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """torch.optim.Muon with Nesterov momentum 0.95, at `muon_lr` where the rest of the model is at `lr`."""
    check_muon()
    # adjust_lr_fn "original" scales by sqrt(max(1, rows/columns)): every layer's output changes alike at any width.
    # "match_rms_adamw" would scale by the width instead, so as to borrow a rate that was tuned for AdamW.
    return torch.optim.Muon(
        [{"params": matrices, RATE_SHARE: muon_lr / lr}],
        lr=muon_lr,
        weight_decay=weight_decay,
        momentum=0.95,
        nesterov=True,
        adjust_lr_fn="original",
    )
