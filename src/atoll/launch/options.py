"""What `atoll train` can be told. Standard library only."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from atoll.launch.plan import Method


@dataclass(frozen=True, kw_only=True)
class LocalOptions(Method):
    """One run with all its learners on this machine."""

    mode: str = "decoupled"
    """decoupled (waits for nobody), streaming or diloco (both wait for all learners), or data-parallel: no syncer, the
    mean gradient of all learners in each step, what the others are compared with."""
    learners: int = 4
    """M: training processes, named l1 to lM."""
    fragments: int | None = None
    """P: parts of the model, merged in turn; default: 8 for tiny where that divides the interval, else the largest
    number that divides it and splits the model evenly; 1 for diloco."""
    steps: int | None = None
    """Steps of each learner (at even speed); default 300. Rounded up to whole slots of interval/fragments."""
    tokens: int | None = None
    """Instead of steps: tokens of all learners together; steps = tokens / (learners * batch * length), rounded up."""
    run: Path | None = None
    """Directory of the run, new or empty; default runs/<time>-<model>."""
    model: str = "tiny"
    """tiny (0.9M parameters), tiny-moe (2.5M, a mixture of experts) or small (10M)."""
    data: tuple[str, ...] = ("stdlib",)
    """Text files and folders, or stdlib: the source of Python's own standard library."""
    merge: str | None = None
    """rda or average; default average beside Muon, rda beside AdamW (docs/QUALITY.md)."""
    inner_lr: float | None = None
    """Peak rate of AdamW; default 1e-3 beside Muon, alone the model's (4e-3 of tiny, 1e-3 of small)."""
    inner: str | None = None
    """muon: Muon for the hidden matrices, AdamW for embeddings, gains and head; or adamw, for all. Default: muon, where
    torch has it (2.9)."""
    muon_lr: float | None = None
    """Peak rate of Muon; default 0.02."""
    init: Path | None = None
    """A safetensors file to start from, such as model/model.safetensors of another run."""
    threads: int | None = None
    """Torch threads of each learner; default: what is left of the cores, at least 1."""
    slow: tuple[str, ...] = ()
    """NAME=FACTOR: this learner's steps take FACTOR times as long, on purpose."""
    keep_contributions: bool = False
    """Keep every contribution that is merged, for `make audit`."""
    eval_every: str | None = None
    """How often the merged model is evaluated on held-out text while the run goes on: 30s (default), 10m, or a number
    of slots; 0: never. After the first it waits where all would take above 2% of all cores. Results: evals.jsonl."""
    listen: str | None = None
    """Where the syncer listens; default 127.0.0.1:0, port 0 being any free one. Where ATOLL_TOKEN (or ATOLL_TOKEN_FILE)
    was set before, who has it may join by hand and `atoll pull HOST:PORT`."""


STEPS = 300
"""In the run's directory: what its learners train, for `atoll evaluate` and `atoll sample`."""
OPTIONS_FILE = "options.toml"
"""In the run's directory: for --config, to make such a run again."""
LISTEN = "127.0.0.1:0"
EVAL_EVERY = "30s"


def as_told(options: LocalOptions) -> dict[str, Any]:
    """What differs from the defaults, but for the directory: the content of OPTIONS_FILE."""
    values = {field.name: getattr(options, field.name) for field in fields(LocalOptions) if field.name != "run"}
    usual = LocalOptions()
    return {
        name: os.fspath(value) if isinstance(value, Path) else value
        for name, value in values.items()
        if value != getattr(usual, name)
    }
