"""Merging the deltas of one piece: the average and radial-directional averaging (RDA).

Shapes: delta_P is fp32 [P], P = piece.size; a tensor of the piece is the slice [start:stop]. L learners,
in id order.

The arithmetic (protocol R17), to the last bit. "float" is a Python float: IEEE double, round to nearest even.
All of it runs on the CPU. Nothing is fused: a product is rounded before it is added. No tensor is
ever divided.

1. Weights. total = w_0 + w_1 + ... (floats, learner order, from the left); wn_l = w_l / total.
2. Weighted sum S(c) of the deltas with float coefficients c_l: x_l = fp64(delta_l) * c_l, elementwise;
   s = x_0, then s = s + x_1, s = s + x_2, ... in learner order, all in fp64.
3. Norm N(x): x as fp64, squared elementwise in fp64 (x * x), cut into blocks of 65,536 values, the last one
   padded with zeros at its end. A block is summed by halving: for h = 32,768, 16,384, ..., 1:
   y = y[:h] + y[h:2h]. The block sums are added as floats in block order, from the left, starting at 0.0.
   N = sqrt of that, correctly rounded. A tensor's blocks start at its own first value, not at the piece's.
4. Average, for tensors marked `averaged` and for every tensor under method "average": fp32(S(wn)).
5. RDA, for every other tensor under method "rda": n_l = N(delta_l); m = 0.0 + wn_0*n_0 + wn_1*n_1 + ...
   (floats, from the left); c_l = wn_l / n_l, or 0.0 where n_l is 0; d = S(c), fp64; n_d = N(d);
   result = fp32(d * (m / n_d)), where m / n_d is one float; all zeros where n_d < 2**-20.

Casts: fp32 to fp64 before the first operation (exact), fp64 to fp32 (nearest even) as the last one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from atoll.core.layout import Piece
from atoll.errors import ConfigError

BLOCK_VALUES = 65_536
# Work goes in bands of whole blocks: all of it is elementwise or within a block, so bands bound memory, not
# bits.
BAND_VALUES = 16 * BLOCK_VALUES
# Unit vectors that cancel leave the rounding of fp32 deltas, about 2**-24; phi would blow it up to full
# length.
CANCELLED_BELOW = 2.0**-20

Method = Literal["rda", "average"]
METHODS: tuple[Method, ...] = ("rda", "average")


def weight(c_tokens: int, c_steps: int) -> float:
    """c_tokens * (c_tokens / c_steps), a float: tokens times tokens per step (arXiv 2604.21428). Both > 0."""
    if c_tokens <= 0 or c_steps <= 0:
        raise ConfigError(f"c_tokens={c_tokens}, c_steps={c_steps} must be above 0; leave idle learners out")
    return c_tokens * (c_tokens / c_steps)


def normalised(weights: Sequence[float]) -> list[float]:
    """w_l / (w_0 + w_1 + ...), as floats. Every weight must be finite and positive (hazard 7)."""
    total = 0.0
    for index, value in enumerate(weights):
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"weight {value} of contribution {index} must be finite and above 0; refuse it")
        total = total + value
    if not math.isfinite(total):
        raise ConfigError(f"the {len(weights)} weights add up to {total}; refuse the largest")
    return [value / total for value in weights]


def _block_sums(band: Tensor) -> list[float]:
    """Sum of squares of each block of `band` [n], n <= BAND_VALUES."""
    squares = band.to(torch.float64, copy=True)
    squares.mul_(squares)
    # A short block is padded to a power of two only: the upper levels of its tree would add zeros, which is
    # exact.
    width = BLOCK_VALUES if len(squares) > BLOCK_VALUES else 1 << (len(squares) - 1).bit_length()
    whole = len(squares) // width
    sums = _halve(squares[: whole * width].view(whole, width)) if whole else []
    rest = squares[whole * width :]
    if len(rest):
        sums += _halve(torch.nn.functional.pad(rest, (0, width - len(rest))).view(1, width))
    return sums


def _halve(blocks: Tensor) -> list[float]:
    """Sum of each row of `blocks` [k, 2**m] by the fixed tree; overwrites it."""
    half = blocks.shape[1] // 2
    while half:
        left = blocks[:, :half]
        torch.add(left, blocks[:, half : 2 * half], out=left)
        half //= 2
    sums: list[float] = blocks[:, 0].tolist()
    return sums


def piece_norm(flat: Tensor) -> float:
    """Euclidean norm of `flat` [n], fp32 or fp64, by step 3; the same bits for any thread count."""
    total = 0.0
    for start in range(0, len(flat), BAND_VALUES):
        for partial in _block_sums(flat[start : start + BAND_VALUES]):
            total = total + partial
    return math.sqrt(total)


def is_finite(flat: Tensor) -> bool:
    """True where no value is NaN or infinite. One pass: both bounds are NaN where any value is."""
    if not len(flat):
        return True
    lowest, highest = torch.aminmax(flat)
    return math.isfinite(float(lowest)) and math.isfinite(float(highest))


def _weighted_sum(deltas: Sequence[Tensor], coefficients: Sequence[float]) -> Tensor:
    """sum_l c_l * delta_l, fp64 [n], in learner order (step 2)."""
    out = torch.empty(len(deltas[0]), dtype=torch.float64, device="cpu")
    for start in range(0, len(out), BAND_VALUES):
        band = out[start : start + BAND_VALUES]
        torch.mul(deltas[0][start : start + BAND_VALUES].to(torch.float64), coefficients[0], out=band)
        for delta, coefficient in zip(deltas[1:], coefficients[1:], strict=True):
            scaled = delta[start : start + BAND_VALUES].to(torch.float64) * coefficient
            torch.add(band, scaled, out=band)
    return out


def average(deltas: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """sum_l wn_l * delta_l: fp32 [n] each, shares wn_l add up to 1; fp64 inside, fp32 [n] out (step 4)."""
    return _weighted_sum(deltas, shares).to(torch.float32)


def rda(deltas: Sequence[Tensor], shares: Sequence[float], norms: Sequence[float] | None = None) -> Tensor:
    """(sum_l wn_l |delta_l|) * phi(sum_l wn_l phi(delta_l)), phi(x) = x/|x|, phi(0) = 0 (step 5).

    One tensor, fp32 [n] each, fp64 inside -> fp32 [n]. Radial-directional averaging of arXiv 2604.21428.
    Deviation: directions that cancel down to rounding (norm below 2**-20) count as 0; the plain formula would
    return noise of full length. norms: of the deltas, where they are known already.
    """
    norms = [piece_norm(delta) for delta in deltas] if norms is None else norms
    magnitude = 0.0
    for share, norm in zip(shares, norms, strict=True):
        magnitude = magnitude + share * norm
    direction = _weighted_sum(deltas, [s / n if n else 0.0 for s, n in zip(shares, norms, strict=True)])
    length = piece_norm(direction)
    if length < CANCELLED_BELOW:
        return torch.zeros(len(direction), dtype=torch.float32, device="cpu")
    return (direction * (magnitude / length)).to(torch.float32)


def tensor_norms(flat: Tensor, piece: Piece) -> list[float]:
    """`piece_norm` of each tensor of a flat piece [P], in order."""
    return [piece_norm(flat[start:stop]) for _, start, stop in piece.offsets()]


def norm_of(norms: Sequence[float]) -> float:
    """The norm of the whole from the norms of its parts."""
    total = 0.0
    for norm in norms:
        total = total + norm * norm
    return math.sqrt(total)


def _check_deltas(deltas: Sequence[Tensor], weights: Sequence[float], piece: Piece) -> None:
    if not deltas or len(deltas) != len(weights):
        raise ConfigError(f"{len(deltas)} deltas for {len(weights)} weights; give as many, at least one")
    for index, delta in enumerate(deltas):
        if delta.dtype != torch.float32 or tuple(delta.shape) != (piece.size,):
            raise ConfigError(
                f"delta {index} is {delta.dtype}{list(delta.shape)}, must be torch.float32[{piece.size}] "
                f"for fragment {piece.index}"
            )


def merge_piece(
    deltas: Sequence[Tensor],
    weights: Sequence[float],
    piece: Piece,
    method: Method = "rda",
    norms: Sequence[Sequence[float]] | None = None,
) -> Tensor:
    """The merged delta of a piece: fp32 [P] each, one weight > 0 each, in learner id order -> fp32 [P].

    Under "rda" tensors merge by `rda`, embedding-like ones by `average`; under "average" all by `average`.
    Finite input is the caller's duty (`is_finite`, protocol R25). norms: `tensor_norms` of each delta, where known.
    """
    if method not in METHODS:
        raise ConfigError(f"merge={method!r} is unknown; use one of {', '.join(METHODS)}")
    _check_deltas(deltas, weights, piece)
    shares = normalised(weights)
    merged = torch.empty(piece.size, dtype=torch.float32, device="cpu")
    for index, (spec, start, stop) in enumerate(piece.offsets()):
        parts = [delta[start:stop] for delta in deltas]
        if method == "average" or spec.averaged:
            merged[start:stop] = average(parts, shares)
        else:
            known = None if norms is None else [row[index] for row in norms]
            merged[start:stop] = rda(parts, shares, known)
    return merged
