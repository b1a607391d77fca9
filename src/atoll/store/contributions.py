"""Kept contributions, so that every merge can be replayed (R18), and the pieces of version 0.

contributions/slot-00000007/<name>-<generation>-<seq>.safetensors   "sent": [n] in its wire dtype; "buffers": fp32 [k]
contributions/version-0/piece-0003.safetensors                      "theta": fp32 [n]
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from atoll.core.messages import Announce, Life
from atoll.errors import RunError
from atoll.store.files import write_atomic
from atoll.tensors.codec import PAYLOADS


def contribution_path(directory: Path, slot: int, life: Life, seq: int) -> Path:
    """Where a contribution is kept. Names are safe: wire/convert.py lets only A-Za-z0-9._- pass."""
    return directory / f"slot-{slot:08d}" / f"{life.name}-{life.generation}-{seq}.safetensors"


def seed_path(directory: Path, piece: int) -> Path:
    """Where a piece of version 0 is kept."""
    return directory / "version-0" / f"piece-{piece:04d}.safetensors"


def keep_contribution(
    directory: Path,
    life: Life,
    announce: Announce,
    payload: bytes | bytearray,
    kind: str,
    payload_hash: str,
    trained_bytes: int,
) -> Path:
    """Write one contribution as received. `kind`: bf16 | fp32, of its first `trained_bytes`; buffers follow, where it
    has any. Atomic, not synced: a replay may lack the last ones.
    """
    path = contribution_path(directory, announce.slot, life, announce.seq)
    path.parent.mkdir(exist_ok=True)
    raw = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    tensors = {"sent": raw[:trained_bytes].view(PAYLOADS[kind])}
    if len(raw) > trained_bytes:
        tensors["buffers"] = raw[trained_bytes:].clone().view(torch.float32)
    header = {"life": life, "announce": announce, "payload": kind, "hash": payload_hash}
    write_atomic(path, save(tensors, {"contribution": msgspec.json.encode(header).decode()}), sync=False)
    return path


def load_contribution(path: Path) -> tuple[dict[str, Any], Tensor]:
    """(header, sent in its wire dtype); RunError where the file is missing or damaged."""
    tensors, metadata = _load(path, "sent")
    try:
        return msgspec.json.decode(metadata["contribution"], type=dict[str, Any]), tensors
    except (KeyError, msgspec.DecodeError) as error:
        raise RunError(f"{path} has no header: {error}") from error


def keep_seed(directory: Path, piece: int, theta: Tensor) -> Path:
    """Write a piece of version 0, durably."""
    path = seed_path(directory, piece)
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, save({"theta": theta}))
    return path


def load_seed(directory: Path, piece: int) -> Tensor:
    """theta of version 0, fp32 [n]; RunError where the file is missing or damaged."""
    return _load(seed_path(directory, piece), "theta")[0]


def _load(path: Path, name: str) -> tuple[Tensor, dict[str, str]]:
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            return file.get_tensor(name), file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
