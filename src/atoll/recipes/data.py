"""Bytes to train on: corpora, and each learner's share of them.

A file is held out whole (one in twenty, by a hash of its relative path), so every machine makes the same
choice and nothing of a held-out file is ever trained on.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from atoll.errors import ConfigError, DataError

STDLIB = "stdlib"
HELDOUT_ONE_IN = 20
CHUNK_BYTES = 65_536
WINDOWS_MIN = 8


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Training and held-out bytes, uint8."""

    name: str
    """What it was loaded from."""
    train: np.ndarray
    """uint8 [n]."""
    heldout: np.ndarray
    """uint8 [m], never trained on."""


def _is_heldout(relative: str) -> bool:
    digest = hashlib.blake2b(relative.encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELDOUT_ONE_IN == 0


def _walk(root: Path, suffix: str = "", without: frozenset[str] = frozenset()) -> list[Path]:
    """Files below root, sorted by relative path; hidden names and folders named in `without` are left out."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in without]
        found += [Path(folder, name) for name in names if name.endswith(suffix) and not name.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _read_or_skip(path: Path) -> bytes | None:
    try:
        return path.read_bytes() if path.is_file() else None
    except OSError:
        return None


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def _stdlib_files() -> list[tuple[str, bytes]]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = _walk(root, ".py", frozenset({"site-packages", "dist-packages", "__pycache__"}))
    read = ((path.relative_to(root).as_posix(), _read_or_skip(path)) for path in paths)
    return [(name, content) for name, content in read if content]


def _files_of(path: Path) -> list[tuple[str, bytes]]:
    """(relative path, content) of a text file, or of all text files in a folder."""
    if path.is_dir():
        read = ((p.relative_to(path).as_posix(), _read_or_skip(p)) for p in _walk(path))
        return [(name, content) for name, content in read if content and _is_text(content)]
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"data {str(path)!r} does not exist; give a file, a folder or {STDLIB!r}") from None
    except OSError as error:
        raise DataError(f"data {str(path)!r} is unreadable ({error.strerror}); check its mode") from None
    if not _is_text(content):
        raise DataError(f"data {str(path)!r} is not UTF-8 text; give a text file or a folder with some")
    return [(path.name, content)] if content else []


def _array(contents: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(contents), dtype=np.uint8)


def _split(files: Sequence[tuple[str, bytes]]) -> tuple[np.ndarray, np.ndarray]:
    heldout = [content for name, content in files if _is_heldout(name)]
    train = [content for name, content in files if not _is_heldout(name)]
    if heldout and train:
        return _array(train), _array(heldout)
    cuts = [(content, len(content) - len(content) // HELDOUT_ONE_IN) for _, content in files]
    return _array([c[:cut] for c, cut in cuts]), _array([c[cut:] for c, cut in cuts])


def load_corpus(*sources: str | os.PathLike[str]) -> Corpus:
    """`load_corpus("stdlib")`, the running Python's own library sources, or `load_corpus(path, ...)`.

    Paths are text files and folders (recursive; binary and unreadable files in folders are skipped). One file
    in twenty is held out; where that leaves either side empty, the last 5% of each file. Raises DataError.
    """
    if not sources:
        raise DataError(f"no data given; give text files, folders or {STDLIB!r}")
    files: list[tuple[str, bytes]] = []
    for source in sources:
        files += _stdlib_files() if source == STDLIB else _files_of(Path(source))
    name = " ".join(map(str, sources))
    train, heldout = _split(files)
    if not len(train):
        raise DataError(f"data {name!r} holds no text; give text files or folders with some, or {STDLIB!r}")
    return Corpus(name=name, train=train, heldout=heldout)


def shard_of(corpus: Corpus, *, learner_index: int, learners: int) -> np.ndarray:
    """The learner's own 1/learners of the training bytes, uint8.

    Chunks of about 64 KiB are dealt out in turn, so that shards are alike though files are sorted; a corpus
    of less than that per learner is cut into `learners` parts. An index beyond `learners` shares with index %
    learners.
    """
    if learners < 1 or learner_index < 0:
        raise ConfigError(f"learner_index={learner_index} must be >= 0 and learners={learners} >= 1")
    size = len(corpus.train)
    chunks = learners * max(1, size // (learners * CHUNK_BYTES))
    borders = [size * k // chunks for k in range(chunks + 1)]
    own = range(learner_index % learners, chunks, learners)
    return np.concatenate([corpus.train[borders[k] : borders[k + 1]] for k in own])


def check_corpus(corpus: Corpus, *, learners: int, length: int) -> None:
    """Raise DataError where a learner would get less than 8 windows, or the held-out part less than one."""
    share, needed = len(corpus.train) // learners, WINDOWS_MIN * (length + 1)
    if share < needed:
        raise DataError(
            f"data {corpus.name!r} has {len(corpus.train)} training bytes, {share} for each of {learners} "
            f"learners; length={length} needs {needed}; give more text or fewer learners"
        )
    check_heldout(corpus, length)


def check_heldout(corpus: Corpus, length: int) -> None:
    """Raise DataError where the held-out part is shorter than one window."""
    if len(corpus.heldout) < length + 1:
        raise DataError(
            f"data {corpus.name!r} has {len(corpus.heldout)} held-out bytes; length={length} needs "
            f"{length + 1}; give more text"
        )


def generator_of(seed: int, name: str, generation: int) -> np.random.Generator:
    """Chance of one life of a learner."""
    digest = hashlib.blake2b(f"{seed}\0{name}\0{generation}".encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


def windows(data: np.ndarray, starts: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets), int64 [B, length] each; targets are the inputs one byte on."""
    rows = torch.from_numpy(data[starts[:, None] + np.arange(length + 1)].astype(np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def batches(
    corpus: Corpus,
    *,
    learner_index: int,
    learners: int,
    seed: int,
    name: str,
    generation: int,
    batch: int,
    length: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs, targets), int64 [batch, length]: random windows of the learner's own shard.

    Drawn by a generator seeded with (seed, name, generation): a life can be replayed, a new life reads on
    elsewhere.
    """
    if batch < 1 or length < 1:
        raise ConfigError(f"batch={batch} and length={length} must be at least 1")
    check_corpus(corpus, learners=learners, length=length)
    shard = shard_of(corpus, learner_index=learner_index, learners=learners)
    chance = generator_of(seed, name, generation)
    return _draw(shard, chance, batch, length)


def _draw(
    shard: np.ndarray, chance: np.random.Generator, batch: int, length: int
) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield windows(shard, chance.integers(0, len(shard) - length, size=batch), length)
