"""What can only be seen with the model and the data in hand; all of it before anything is written or started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.core.config import RunConfig
from atoll.core.layout import Layout, largest_balanced_fragments, make_layout
from atoll.launch.plan import preset_fragments
from atoll.recipes.data import Corpus, check_corpus, load_corpus
from atoll.recipes.loop import TrainConfig
from atoll.recipes.model import build_model
from atoll.store.model import load_pieces
from atoll.tensors.names import specs_of


def resolve_fragments(settings: Mapping[str, Any], model: str) -> tuple[RunConfig, Layout]:
    """The whole RunConfig and the layout of the model: P as given, else the preset's, else the layout's rule."""
    specs = specs_of(build_model(model, 0))
    interval = int(settings["interval"])
    fragments = settings.get("fragments") or preset_fragments(model, interval)
    if fragments is None:
        fragments = largest_balanced_fragments(specs, limit=interval, divides=interval)
    config = RunConfig.from_dict({**settings, "fragments": fragments})
    return config, make_layout(specs, fragments)


def check_data(train: TrainConfig) -> Corpus:
    """DataError where the data is not there, empty, unreadable or too short for the learners."""
    corpus = load_corpus(*train.data)
    check_corpus(corpus, learners=train.learners, length=train.preset().length)
    return corpus


def check_init(path: Path, layout: Layout) -> None:
    """RunError that names the first tensor which is missing or has another shape."""
    load_pieces(path, layout)
