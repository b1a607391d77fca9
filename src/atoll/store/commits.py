"""Commit files (R11): per piece two alternating files with Theta and momentum, fp32, and the slot's record.

`commits/<piece>.a` and `.b` are safetensors files; a commit replaces the older one, so that the newer one is never
touched while its successor is written. The hashes of both tensors are in the metadata and verified on loading.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from atoll.core.messages import Life, Version
from atoll.store.files import write_atomic
from atoll.tensors.hashing import payload_hash

SUFFIXES = (".a", ".b")


class CommitHead(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a commit file."""

    piece: int
    version: Version
    slot: int
    epoch: int
    theta_hash: str
    momentum_hash: str
    newest_merged: tuple[tuple[Life, int], ...] = ()
    """Newest merged seq of this piece per life (R6)."""
    record: dict[str, Any] = {}
    """The slot's tape line, without `i` and `kind`."""


@dataclass(frozen=True, slots=True)
class Committed:
    """An intact commit. theta, momentum: fp32 [piece.size]."""

    head: CommitHead
    theta: Tensor
    momentum: Tensor


@dataclass(frozen=True, slots=True)
class NotCommitted:
    """No intact commit of the piece; `reasons`: one line per file that is there and damaged."""

    piece: int
    reasons: tuple[str, ...]


def tensor_hash(flat: Tensor) -> str:
    """payload_hash of the bytes of a CPU tensor, without a copy."""
    return payload_hash(memoryview(flat.contiguous().numpy()).cast("B"))


def commit_paths(directory: Path, piece: int) -> tuple[Path, ...]:
    """Where the two commits of a piece lie."""
    return tuple(directory / f"{piece:04d}{suffix}" for suffix in SUFFIXES)


class Commits:
    """The commit files of one run directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._next: dict[int, str] = {}

    def _path(self, piece: int, suffix: str) -> Path:
        return commit_paths(self._directory, piece)[SUFFIXES.index(suffix)]

    def write(self, head: CommitHead, theta: Tensor, momentum: Tensor) -> None:
        """Replace the older file of the piece, durably. OSError (disk full) leaves both files as they were."""
        suffix = self._older(head.piece)
        metadata = {"commit": msgspec.json.encode(head).decode()}
        data = save({"theta": theta, "momentum": momentum}, metadata)
        write_atomic(self._path(head.piece, suffix), data)
        self._next[head.piece] = SUFFIXES[1 - SUFFIXES.index(suffix)]

    def _older(self, piece: int) -> str:
        if piece not in self._next:
            heads = [read_head(self._path(piece, suffix)) for suffix in SUFFIXES]
            ages = [(-1, -1) if isinstance(head, str) else tuple(head.version) for head in heads]
            self._next[piece] = SUFFIXES[ages.index(min(ages))]
        return self._next[piece]

    def load(self, piece: int) -> Committed | NotCommitted:
        """The newest intact commit of the piece."""
        results = [_read(self._path(piece, suffix), piece) for suffix in SUFFIXES]
        found = [result for result in results if isinstance(result, Committed)]
        if found:
            return max(found, key=lambda commit: commit.head.version)
        return NotCommitted(piece, tuple(r for r in results if isinstance(r, str) and r))


def read_head(path: Path) -> CommitHead | str:
    """The metadata, or in words why there is none (empty: no such file)."""
    if not path.exists():
        return ""
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            return _head_of(file)
    except (OSError, SafetensorError, KeyError, msgspec.DecodeError) as error:
        return f"{path.name}: {' '.join(str(error).split())}"


def read_theta(path: Path) -> tuple[CommitHead, Tensor] | str:
    """Metadata and Theta, fp32 [n], of one and the same file; or in words why not. Momentum is not looked at."""
    try:
        # One opening: between two the syncer may have put another commit in its place.
        with safe_open(os.fspath(path), framework="pt") as file:
            head, theta = _head_of(file), file.get_tensor("theta")
    except (OSError, SafetensorError, KeyError, msgspec.DecodeError) as error:
        return f"{path.name}: {' '.join(str(error).split())}"
    if theta.dtype != torch.float32 or theta.dim() != 1:
        return f"{path.name}: theta must be flat float32"
    if tensor_hash(theta) != head.theta_hash:
        return f"{path.name}: the hash does not match"
    return head, theta


def _head_of(file: Any) -> CommitHead:
    return msgspec.json.decode((file.metadata() or {})["commit"], type=CommitHead)


def _read(path: Path, piece: int) -> Committed | str:
    head = read_head(path)
    if isinstance(head, str):
        return head
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            theta, momentum = file.get_tensor("theta"), file.get_tensor("momentum")
    except (OSError, SafetensorError) as error:
        return f"{path.name}: {' '.join(str(error).split())}"
    if head.piece != piece:
        return f"{path.name}: holds fragment {head.piece}"
    if any(t.dtype != torch.float32 or t.dim() != 1 for t in (theta, momentum)) or theta.shape != momentum.shape:
        return f"{path.name}: theta and momentum must be flat float32 of one size"
    if tensor_hash(theta) != head.theta_hash or tensor_hash(momentum) != head.momentum_hash:
        return f"{path.name}: the hash does not match"
    return Committed(head, theta, momentum)
