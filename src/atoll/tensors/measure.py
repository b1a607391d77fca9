"""What a merge looks like, for people: cosines and lengths. Nothing is decided by them."""

from __future__ import annotations

import math

from torch import Tensor

from atoll.tensors.merge import BAND_VALUES, piece_norm

DECIMALS = 4
"""More would differ between machines."""


def cosine(a: Tensor, b: Tensor, norm_a: float | None = None, norm_b: float | None = None) -> float | None:
    """a.b / (|a| |b|) of two flat tensors [n], fp32, rounded; fp64 inside. None where one of them is all zeros.

    norm_a, norm_b: |a| and |b|, where they are known.
    """
    length = (piece_norm(a) if norm_a is None else norm_a) * (piece_norm(b) if norm_b is None else norm_b)
    if not length or not math.isfinite(length):
        return None
    total = 0.0
    for start in range(0, len(a), BAND_VALUES):
        band = slice(start, start + BAND_VALUES)
        total += float(a[band].double() @ b[band].double())
    return round(total / length, DECIMALS)
