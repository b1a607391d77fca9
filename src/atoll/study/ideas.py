"""Ideas that are no part of the method: tried by trials, and built only if they help (docs/QUALITY.md)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.core.config import RunConfig
from atoll.core.layout import Layout, Piece
from atoll.study.bodies import ModelBody, TensorShop
from atoll.tensors.merge import average, normalised

WARM_MERGES = 10
TAIL = 0.1


def remember(optimizer: torch.optim.Optimizer, times: float) -> None:
    """Averages over past gradients reach so many times as far back."""

    def longer(beta: float) -> float:
        return 1 - (1 - beta) / times

    for group in optimizer.param_groups:
        if "betas" in group:
            group["betas"] = tuple(map(longer, group["betas"]))
        if "momentum" in group:
            group["momentum"] = longer(group["momentum"])


class MomentumWarmUp(TensorShop):
    """The outer momentum of a piece grows from 0 to the configured one in its first WARM_MERGES merges."""

    def __init__(self, config: RunConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        self._merges: dict[int, int] = {}

    def mu(self, piece: int) -> float:
        done = self._merges.get(piece, 0)
        self._merges[piece] = done + 1
        return super().mu(piece) * min(1.0, done / WARM_MERGES)


class RdaByRow(TensorShop):
    """RDA of each row of a matrix by itself: the lengths and directions of one output's weights."""

    def joined(self, deltas: Sequence[Tensor], weights: Sequence[float], piece: Piece) -> Tensor:
        shares = normalised(weights)
        merged = torch.empty(piece.size, dtype=torch.float32)
        for spec, start, stop in piece.offsets():
            parts = [delta[start:stop] for delta in deltas]
            rows = 1 if len(spec.shape) < 2 else spec.shape[0]
            merged[start:stop] = average(parts, shares) if spec.averaged else by_row(parts, shares, rows)
        return merged


def by_row(deltas: Sequence[Tensor], shares: Sequence[float], rows: int) -> Tensor:
    """`tensors.merge.rda` for every row; fp32 [n] each, n a multiple of `rows`, fp64 inside."""
    stacked = torch.stack([delta.view(rows, -1).double() for delta in deltas])
    weights = torch.tensor(shares, dtype=torch.float64).view(-1, 1, 1)
    norms = stacked.norm(dim=2, keepdim=True)
    direction = (weights * stacked / norms.clamp(min=1e-300)).sum(0)
    length = (weights * norms).sum(0)
    return (direction * (length / direction.norm(dim=1, keepdim=True).clamp(min=1e-300))).float().view(-1)


class TailAverage(TensorShop):
    """The final model is the mean of the versions of the last tenth of the run."""

    def __init__(self, config: RunConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        self._versions: dict[int, list[Tensor]] = {}

    def published(self, piece: int) -> Tensor:
        self._versions.setdefault(piece, []).append(self.theta[piece])
        return super().published(piece)

    def finish(self, body: ModelBody) -> None:
        for piece, versions in self._versions.items():
            last = versions[-max(1, round(TAIL * len(versions))) :]
            body.take(piece, self.encoded(torch.stack(last).mean(0)), "adopt", subtract_sent=False)


IDEAS: dict[str, type[TensorShop]] = {
    "": TensorShop,
    "momentum-warm-up": MomentumWarmUp,
    "rda-by-row": RdaByRow,
    "tail-average": TailAverage,
}
