"""What trials of these tests train on."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.recipes.data import Corpus


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    """Text that is easy to learn."""
    text = np.frombuffer(b"the atoll is a ring of islands; " * 4000, dtype=np.uint8)
    return Corpus(name="islands", train=text[:100_000], heldout=text[100_000:])
