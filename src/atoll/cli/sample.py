"""`atoll sample RUN --prompt TEXT`: text from a run's model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from atoll.cli.parse import parse


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Let a run's model go on with a text."""

    run: tyro.conf.Positional[Path]
    """Directory of the run."""
    prompt: str = ""
    """What the text begins with."""
    length: int = 200
    """Bytes to add."""
    temperature: float = 0.8
    """0 takes the likeliest byte each time."""
    seed: int = 0
    """Another seed, another text."""


def main(argv: Sequence[str]) -> int:
    """0 where there was a model."""
    options = parse(Sample, "sample", argv)
    import torch

    from atoll.cli.saved import load_saved
    from atoll.recipes.sample import sample

    torch.set_num_threads(1)  # one byte at a time: more threads only wait for each other
    model = load_saved(options.run).model
    print(
        sample(
            model, options.prompt, length=options.length, temperature=options.temperature, seed=options.seed
        )
    )
    return 0
