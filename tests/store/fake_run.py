"""A run directory whose commits a test writes."""

from __future__ import annotations

from pathlib import Path

import torch

from atoll.core.config import RunConfig
from atoll.core.layout import Layout, TensorSpec, make_layout
from atoll.core.messages import Version
from atoll.store import rundir
from atoll.store.commits import CommitHead, Commits, tensor_hash

SPECS = (
    TensorSpec("a", (2, 3), "float32"),
    TensorSpec("b", (5,), "bfloat16"),
    TensorSpec("c", (4,), "float32", aliases=("d",)),
)
PIECES = 3


class FakeRun:
    """A run directory whose commits the test writes: in slot t every value of the piece is t + 1/3."""

    def __init__(self, path: Path, payload: str = "bf16") -> None:
        self.path = path
        self.layout: Layout = make_layout(SPECS, PIECES)
        directory = rundir.open_rundir(path, "r")
        config = RunConfig.from_dict(
            {"run_id": "r", "steps": 30, "interval": PIECES, "fragments": PIECES, "payload": payload}
        )
        directory.write_settings(config.to_dict())
        directory.write_layout(self.layout)
        self.commits = Commits(directory.commits)

    def commit(self, slot: int, piece: int | None = None) -> None:
        index = slot % PIECES if piece is None else piece
        theta = self.theta(index, slot)
        momentum = torch.zeros_like(theta)
        head = CommitHead(
            piece=index,
            version=Version(1, slot),
            slot=slot,
            epoch=1,
            theta_hash=tensor_hash(theta),
            momentum_hash=tensor_hash(momentum),
        )
        self.commits.write(head, theta, momentum)

    def theta(self, piece: int, slot: int) -> torch.Tensor:
        return torch.full((self.layout.pieces[piece].size,), slot + 1 / 3)

    def begin(self, last: int) -> None:
        for piece in range(PIECES):
            self.commit(0, piece)
        for slot in range(1, last + 1):
            self.commit(slot)
