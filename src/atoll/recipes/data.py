"""Bytes to train on: corpora, and each learner's share of them.

A file is held out whole (one in twenty, by a hash of its relative path), so every machine makes the same
choice and nothing of a held-out file is ever trained on.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atoll.errors import ConfigError, DataError
from atoll.recipes.texts import STDLIB, Texts

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
    remark: str = ""
    """For people: what of the data was left out, and how much was read; empty: all of it was."""


def _is_heldout(relative: str) -> bool:
    digest = hashlib.blake2b(relative.encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELDOUT_ONE_IN == 0


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

    Paths are text files and folders (recursive). What a folder has beside texts in UTF-8 is left out, and named in
    the corpus's `remark`. One file in twenty is held out; where that leaves either side empty, the last 5% of each
    file. Raises DataError.
    """
    if not sources:
        raise DataError(f"no data given; give text files, folders or {STDLIB!r}")
    texts = Texts()
    for source in sources:
        texts.add(source)
    name = " ".join(map(str, sources))
    train, heldout = _split(texts.files)
    if not len(train):
        why = f" ({texts.left_out})" if texts.left_out else ""
        raise DataError(f"data {name!r} holds no text{why}; give text files or folders with some, or {STDLIB!r}")
    remark = f"data {name!r}: {texts.remark}" if texts.remark else ""
    return Corpus(name=name, train=train, heldout=heldout, remark=remark)


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
