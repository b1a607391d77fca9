"""Layout: which tensor belongs to which fragment, and the fingerprint that two models must share.

Whole tensors go into P fragments, largest first, each into the fragment that is smallest so far (greedy "longest
processing time", within 4/3 of the best possible peak). Ties are broken by name, so the result does not depend on the
order in which tensors are listed. With one shard a fragment is one *piece* (protocol R21).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from atoll.errors import ConfigError, LayoutError

TENSORS_MAX = 100_000
NAME_LENGTH_MAX = 512
DIMENSIONS_MAX = 8
BALANCE_MAX = 1.25
DTYPES = ("float32", "float16", "bfloat16", "float64")
EMBEDDING_WORDS = ("embed", "wte", "wpe", "lm_head", "unembed")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One trainable tensor. `averaged` marks embedding-like ones, which merge by average, never by RDA.

    A tied tensor is listed once, under the name that sorts first; `aliases` are its other names, sorted.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    averaged: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of values."""
        return prod(self.shape)

    def describe(self) -> str:
        """`name float32[3,4]`, with aliases and the merge kind: what two models must agree on."""
        shape = ",".join(map(str, self.shape))
        tied = f" = {' = '.join(self.aliases)}" if self.aliases else ""
        return f"{self.name}{tied} {self.dtype}[{shape}]{' averaged' if self.averaged else ''}"


@dataclass(frozen=True, slots=True)
class Piece:
    """The versioned, committed, hashed thing: the tensors of one fragment, sorted by name, laid end to end."""

    index: int
    tensors: tuple[TensorSpec, ...]

    @property
    def size(self) -> int:
        """Number of values."""
        return sum(tensor.size for tensor in self.tensors)

    def offsets(self) -> tuple[tuple[TensorSpec, int, int], ...]:
        """(tensor, start, stop) of each tensor in the flat piece, in values."""
        rows = []
        start = 0
        for tensor in self.tensors:
            rows.append((tensor, start, start + tensor.size))
            start += tensor.size
        return tuple(rows)


@dataclass(frozen=True, slots=True)
class Layout:
    """All pieces of a model. Build it with `make_layout`."""

    pieces: tuple[Piece, ...]
    fingerprint: str

    @property
    def size(self) -> int:
        """Number of values of the whole model, tied tensors once."""
        return sum(piece.size for piece in self.pieces)

    @property
    def piece_sizes(self) -> tuple[int, ...]:
        """Values per piece."""
        return tuple(piece.size for piece in self.pieces)

    @property
    def balance(self) -> float:
        """Largest piece over mean piece: 1.0 is perfect."""
        return max(self.piece_sizes) * len(self.pieces) / self.size

    def tensors(self) -> tuple[TensorSpec, ...]:
        """All tensors, sorted by name."""
        return tuple(sorted((t for piece in self.pieces for t in piece.tensors), key=lambda t: t.name))


def is_embedding_like(name: str) -> bool:
    """True where a part of the dotted name says embedding or output head. Module types, where known, decide first."""
    return any(word in part for part in name.lower().split(".") for word in EMBEDDING_WORDS)


def check_tensors(tensors: Sequence[TensorSpec]) -> None:
    """Raise LayoutError when the list could not be a model: empty, doubled names, bad shapes, unknown dtypes."""
    if not tensors:
        raise LayoutError("the model has no trainable tensor; check requires_grad")
    if len(tensors) > TENSORS_MAX:
        raise LayoutError(f"the model has {len(tensors)} tensors; at most {TENSORS_MAX} are supported")
    seen: set[str] = set()
    for tensor in tensors:
        for name in (tensor.name, *tensor.aliases):
            if not name or len(name) > NAME_LENGTH_MAX:
                raise LayoutError(f"tensor name {name[:40]!r} must have 1 to {NAME_LENGTH_MAX} characters")
            if name in seen:
                raise LayoutError(f"tensor {name!r} is listed twice")
            seen.add(name)
        if len(tensor.shape) > DIMENSIONS_MAX or any(n <= 0 for n in tensor.shape):
            raise LayoutError(f"tensor {tensor.describe()} must have at most {DIMENSIONS_MAX} dimensions, each above 0")
        if tensor.dtype not in DTYPES:
            raise LayoutError(f"tensor {tensor.describe()} has an unknown dtype; known: {', '.join(DTYPES)}")


def fingerprint(tensors: Iterable[TensorSpec]) -> str:
    """blake2b-128 over canonical names, aliases, shapes, dtypes and merge kinds, in name order (hazard 9)."""
    lines = sorted(tensor.describe() for tensor in tensors)
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _assign(tensors: Sequence[TensorSpec], fragments: int) -> list[list[TensorSpec]]:
    bins: list[list[TensorSpec]] = [[] for _ in range(fragments)]
    loads = [0] * fragments
    for tensor in sorted(tensors, key=lambda t: (-t.size, t.name)):
        target = min(range(fragments), key=lambda i: (loads[i], i))
        bins[target].append(tensor)
        loads[target] += tensor.size
    return bins


def make_layout(tensors: Sequence[TensorSpec], fragments: int) -> Layout:
    """Split `tensors` into `fragments` pieces. Raises LayoutError or ConfigError when that cannot be done."""
    check_tensors(tensors)
    if fragments < 1:
        raise ConfigError(f"fragments={fragments} must be at least 1")
    if fragments > len(tensors):
        raise ConfigError(f"fragments={fragments} is more than the model's {len(tensors)} tensors; use at most that")
    bins = _assign(tensors, fragments)
    pieces = tuple(
        Piece(index, tuple(sorted(members, key=lambda t: t.name))) for index, members in enumerate(bins)
    )
    return Layout(pieces, fingerprint(tensors))


def largest_balanced_fragments(tensors: Sequence[TensorSpec], limit: int, divides: int | None = None) -> int:
    """Largest P <= limit with max/mean <= 1.25; where `divides` is given, P must divide it. At least 1."""
    total = sum(tensor.size for tensor in tensors)
    for fragments in range(min(limit, len(tensors)), 1, -1):
        if divides is not None and divides % fragments:
            continue
        peak = max(sum(t.size for t in members) for members in _assign(tensors, fragments))
        if peak * fragments <= BALANCE_MAX * total:
            return fragments
    return 1


def balance_warning(layout: Layout) -> str | None:
    """One line for people when the pieces are uneven (max/mean above 1.25), with the largest P that stays below."""
    if layout.balance <= BALANCE_MAX:
        return None
    better = largest_balanced_fragments(layout.tensors(), len(layout.pieces))
    return (
        f"fragments={len(layout.pieces)} are uneven: the largest is {layout.balance:.2f} times the mean "
        f"(at most {BALANCE_MAX} is good); the largest even number is fragments={better}"
    )


def first_difference(ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> str | None:
    """In words, the first tensor in name order in which two models differ; None when they are the same."""
    mine = {tensor.name: tensor for tensor in ours}
    other = {tensor.name: tensor for tensor in theirs}
    for name in sorted(mine.keys() | other.keys()):
        if name not in other:
            return f"tensor {mine[name].describe()} of the run is missing in the learner's model"
        if name not in mine:
            return f"tensor {other[name].describe()} of the learner's model is not in the run"
        if mine[name] != other[name]:
            return f"tensor {mine[name].describe()} of the run is {other[name].describe()} in the learner's model"
    return None
