"""Cosines for people."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from atoll.tensors.measure import cosine
from atoll.tensors.merge import BAND_VALUES


@pytest.mark.parametrize("size", [1, 7, BAND_VALUES + 3])
def test_cosine__as_torch_says(size: int) -> None:
    chance = torch.Generator().manual_seed(size)
    a, b = (torch.randn(size, generator=chance) for _ in range(2))
    assert cosine(a, b) == pytest.approx(F.cosine_similarity(a, b, dim=0).item(), abs=1e-4)
    assert cosine(a, a) == 1.0
    assert cosine(a, -a) == -1.0


def test_cosine__of_nothing_or_of_what_is_not_finite_is_none() -> None:
    a = torch.ones(3)
    assert cosine(a, torch.zeros(3)) is None
    assert cosine(a, torch.tensor([1.0, float("inf"), 0.0])) is None
