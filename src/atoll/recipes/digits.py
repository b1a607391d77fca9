"""A small vision transformer on the 1,797 digits of 8 x 8 grey values that scikit-learn ships.

Here to see that the method does not live on text alone. Shapes: B batch, N patches, C width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.recipes.data import generator_of
from atoll.recipes.model import Block, ModelConfig, initialise

SIDE, PATCH, CLASSES = 8, 2, 10
HELDOUT_ONE_IN = 5
SHAPE = ModelConfig(layers=4, width=64, heads=4, hidden=168, context=(SIDE // PATCH) ** 2, vocabulary=CLASSES)


@dataclass(frozen=True, kw_only=True)
class Digits:
    """Pictures, fp32 [n, 64] from 0 to 1, and what they show, int64 [n]."""

    train: tuple[np.ndarray, np.ndarray]
    heldout: tuple[np.ndarray, np.ndarray]


def load_digits() -> Digits:
    """One in five is held out. ConfigError where scikit-learn is missing."""
    try:
        from sklearn.datasets import load_digits as load
    except ModuleNotFoundError as error:
        raise ConfigError("the digits need scikit-learn, which is not installed; pip install 'atoll[study]'") from error
    pictures, shown = load(return_X_y=True)
    pictures, shown = (pictures / 16).astype(np.float32), shown.astype(np.int64)
    out = np.arange(len(shown)) % HELDOUT_ONE_IN == 0
    return Digits(train=(pictures[~out], shown[~out]), heldout=(pictures[out], shown[out]))


def batches(
    digits: Digits, *, learner_index: int, learners: int, seed: int, batch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (pictures [batch, 64], shown [batch, 1]) of the learner's own share, drawn with replacement."""
    pictures, shown = (part[learner_index % learners :: learners] for part in digits.train)
    chance = generator_of(seed, f"l{learner_index}", 1)
    while True:
        rows = chance.integers(0, len(shown), size=batch)
        yield torch.from_numpy(pictures[rows]), torch.from_numpy(shown[rows])[:, None]


class DigitModel(nn.Module):
    """Patches in, one position of logits out: a transformer whose positions all see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH * PATCH, SHAPE.width, bias=False)
        self.place = nn.Parameter(torch.zeros(SHAPE.context, SHAPE.width))
        self.blocks = nn.ModuleList(Block(SHAPE, causal=False) for _ in range(SHAPE.layers))
        self.norm = nn.RMSNorm(SHAPE.width)
        self.lm_head = nn.Linear(SHAPE.width, CLASSES, bias=False)
        self.apply(initialise)
        nn.init.normal_(self.place, std=0.1)
        for block in self.blocks:
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.mlp.down.weight)
        nn.init.normal_(self.lm_head.weight, std=0.02)

    def forward(self, pictures_BX: Tensor) -> Tensor:
        """fp32 [B, 64] -> logits [B, 1, 10]."""
        grid = pictures_BX.unflatten(1, (SIDE // PATCH, PATCH, SIDE // PATCH, PATCH))
        patches_BNP = grid.transpose(2, 3).flatten(3).flatten(1, 2)
        x_BNC = self.embed(patches_BNP) + self.place
        for block in self.blocks:
            x_BNC = block(x_BNC)
        return self.lm_head(self.norm(x_BNC.mean(dim=1, keepdim=True)))


def build_digits(seed: int) -> DigitModel:
    """The same weights for the same seed. Global chance is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DigitModel()


def evaluate_digits(model: nn.Module, digits: Digits) -> tuple[float, float]:
    """(mean nats, share of right answers) over all that is held out."""
    pictures, shown = (torch.from_numpy(part) for part in digits.heldout)
    with torch.no_grad():
        logits = model(pictures).float().flatten(0, 1)
    return F.cross_entropy(logits, shown).item(), (logits.argmax(dim=-1) == shown).float().mean().item()
