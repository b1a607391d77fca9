"""Held-out loss: the one figure that says whether merging works."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from atoll.recipes.data import Corpus, check_heldout, windows


def evaluate(
    model: nn.Module, corpus: Corpus, *, batches: int = 8, batch: int = 16, length: int = 128
) -> float:
    """Mean nats per byte over batches*batch windows of the held-out bytes; the same windows at every call.

    Windows are spread evenly; with little held-out text they overlap. The model's mode is as before
    afterwards.
    """
    check_heldout(corpus, length)
    starts = np.linspace(0, len(corpus.heldout) - length - 1, batches * batch).astype(np.int64)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total = 0.0
    with torch.no_grad():
        for rows in starts.reshape(batches, batch):
            inputs, targets = (x.to(device) for x in windows(corpus.heldout, rows, length))
            total += F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten()).item()
    model.train(was_training)
    return total / batches
