"""`atoll evaluate RUN`: the loss of a run's model on held-out text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from atoll.cli.console import warn
from atoll.cli.parse import parse


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Print the mean loss, in nats per byte, of a run's model on text that was never trained on."""

    run: tyro.conf.Positional[Path]
    """Directory of the run."""
    data: tuple[str, ...] | None = None
    """Text files and folders, or stdlib; default: what the run was trained on."""


def main(argv: Sequence[str]) -> int:
    """0 where there was a model to evaluate."""
    options = parse(Evaluate, "evaluate", argv)
    from atoll.cli.saved import load_saved
    from atoll.recipes.data import load_corpus
    from atoll.recipes.evaluate import evaluate
    from atoll.recipes.loop import PRESETS
    from atoll.recipes.texts import STDLIB

    saved = load_saved(options.run)
    data = options.data or saved.data or (STDLIB,)
    corpus = load_corpus(*data)
    if corpus.remark:
        warn(corpus.remark)
    loss = evaluate(saved.model, corpus, length=saved.length or PRESETS[saved.name].length)
    print(f"{saved.name}: {loss:.4f} nats per byte on held-out text of {' '.join(data)}")
    return 0
