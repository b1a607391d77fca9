"""Taking an update (protocol R7): what a learner's piece becomes when a new anchor arrives, or a refusal.

Per piece a learner has theta (what it trains) and the anchor A (the bits as received). Its displacement is
r = theta - A; it sends sent = decode(encode(r)) and the syncer takes Delta = -sent. All flat fp32 [P] (see
`gather`), never parameters. Nothing is written in place, no result shares memory with an argument.
"""

from __future__ import annotations

import torch
from torch import Tensor


def displacement(theta: Tensor, anchor: Tensor) -> Tensor:
    """r = theta - A."""
    return torch.sub(theta, anchor)


def overwrite(anchor_new: Tensor) -> Tensor:
    """theta' = A': the paper's rule. Work since the capture is overwritten."""
    return anchor_new.detach().clone()


def rebase(theta: Tensor, anchor: Tensor, anchor_new: Tensor, sent: Tensor | None) -> Tensor:
    """theta' = A' + r, with r = theta - A, less `sent` where A' contains what was sent (else it is None).

    fp32 operations in this order: theta - A, - sent, A' + r. What the codec lost stays in r (protocol R20).
    """
    rest = torch.sub(theta, anchor)
    if sent is not None:
        rest = torch.sub(rest, sent)
    return torch.add(anchor_new, rest)


def rebase_buffers(theta: Tensor, base: Tensor, anchor_new: Tensor) -> Tensor:
    """A' + (theta - base), kept between A' and theta, value by value: statistics go on from where they are (R29).

    base: what was sent, where A' contains it, else A: so what was observed since then is not forgotten, which a plain
    A' would do at every update. Kept between, because a sum of differences can make a variance negative; A' is a mean
    of honest statistics and theta is one.
    """
    moved = torch.add(anchor_new, torch.sub(theta, base))
    return torch.maximum(torch.minimum(moved, torch.maximum(anchor_new, theta)), torch.minimum(anchor_new, theta))


def revert(anchor: Tensor) -> Tensor:
    """theta' = A, r = 0: after a refusal (protocol R25) the work on this piece is lost."""
    return anchor.detach().clone()
