"""The outer optimiser: SGD with Nesterov momentum on merged deltas (DiLoCo, arXiv 2311.08105, algorithm 1).

Delta points from the new parameters back to the old ones (anchor - theta): it is subtracted, like a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def nesterov(
    theta: Tensor, momentum: Tensor, delta: Tensor, *, lr: float, mu: float
) -> tuple[Tensor, Tensor]:
    """buf' = mu*buf + Delta; theta' = theta - lr*(Delta + mu*buf'). All fp32 [P], new tensors: (theta',
    buf').

    lr and mu are rounded to fp32 first; then six fp32 operations, each rounded, in this order: a = buf * mu,
    buf' = a + Delta, b = buf' * mu, c = Delta + b, d = c * lr, theta' = theta - d. No dampening, no weight
    decay.
    """
    mu_32 = torch.tensor(mu, dtype=torch.float32, device="cpu")
    lr_32 = torch.tensor(lr, dtype=torch.float32, device="cpu")
    momentum_new = torch.add(torch.mul(momentum, mu_32), delta)
    step = torch.mul(torch.add(delta, torch.mul(momentum_new, mu_32)), lr_32)
    return torch.sub(theta, step), momentum_new
