"""Layout: which tensor belongs to which fragment, and the fingerprint that two models must share.

Whole tensors go into P fragments, largest first, each into the fragment that is smallest so far (greedy "longest
processing time", within 4/3 of the best possible peak); parameters first, then buffers (R29). Ties are broken by name,
so the result does not depend on the order in which tensors are listed. With one shard a fragment is one *piece*
(protocol R21).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from atoll.core.config import PAYLOAD_BYTES
from atoll.errors import ConfigError, LayoutError

TENSORS_MAX = 100_000
NAME_LENGTH_MAX = 512
RESERVED_NAME = "__metadata__"
"""Of the header of a safetensors file, where the names of its tensors stand."""
DIMENSIONS_MAX = 8
BALANCE_MAX = 1.25
DTYPES = ("float32", "float16", "bfloat16", "float64")
CONSTANT_BYTES = {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
"""Types that a constant may have, and the bytes of a value."""
CONSTANTS_BYTES_MAX = 1024 * 1024
"""Of all constants of a model: they travel with Hello."""
EXTRA_LENGTH_MAX = 200
PARAMETER, BUFFER, CONSTANT = "parameter", "buffer", "constant"
KINDS = (PARAMETER, BUFFER, CONSTANT)
EMBEDDING_WORDS = ("embed", "wte", "wpe", "lm_head", "unembed")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the run's model. `averaged` marks embedding-like ones, which merge by average, never by RDA.

    A tied tensor is listed once, under the name that sorts first; `aliases` are its other names, sorted.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    averaged: bool = False
    aliases: tuple[str, ...] = ()
    kind: str = PARAMETER
    """parameter: trained and merged. buffer: floating-point, averaged (R29). constant: integers, which every learner
    and every file has as they were in version 0."""
    value: bytes = b""
    """Of a constant: its values, row-major, little-endian. Two models may differ in it."""

    @property
    def size(self) -> int:
        """Number of values."""
        return prod(self.shape)

    def describe(self) -> str:
        """`name float32[3,4]`, with aliases and the merge kind: what two models must agree on."""
        shape = ",".join(map(str, self.shape))
        tied = f" = {' = '.join(self.aliases)}" if self.aliases else ""
        marks = f"{' averaged' if self.averaged else ''}{'' if self.kind == PARAMETER else f' {self.kind}'}"
        return f"{self.name}{tied} {self.dtype}[{shape}]{marks}"


@dataclass(frozen=True, slots=True)
class Piece:
    """The versioned, committed, hashed thing: the tensors of one fragment, laid end to end.

    Parameters come first, then buffers, each sorted by name.
    """

    index: int
    tensors: tuple[TensorSpec, ...]

    @property
    def size(self) -> int:
        """Number of values."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def parameters(self) -> Piece:
        """Its first part: what is trained and merged."""
        return Piece(self.index, tuple(t for t in self.tensors if t.kind == PARAMETER))

    @property
    def buffers(self) -> Piece:
        """Its second part: what is averaged (R29). Often empty."""
        return Piece(self.index, tuple(t for t in self.tensors if t.kind == BUFFER))

    def payload_bytes(self, payload: str) -> int:
        """Bytes of the whole on the wire: parameters in the run's payload format, buffers always in fp32.

        A statistic, a table of angles or a mask would not survive bf16, and they are few.
        """
        width, exact = PAYLOAD_BYTES[payload], PAYLOAD_BYTES["fp32"]
        return sum(tensor.size * (width if tensor.kind == PARAMETER else exact) for tensor in self.tensors)

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
    constants: tuple[TensorSpec, ...] = ()
    """Tensors that no fragment holds, sorted by name."""
    extra: str = ""
    """What users said must agree beside the tensors."""

    @property
    def size(self) -> int:
        """Number of trained values of the whole model, tied tensors once."""
        return sum(self.piece_sizes)

    @property
    def piece_sizes(self) -> tuple[int, ...]:
        """Trained values per piece, buffers not counted: what a token's work on a piece is weighed by."""
        return tuple(piece.parameters.size for piece in self.pieces)

    @property
    def buffer_sizes(self) -> tuple[int, ...]:
        """Values of buffers per piece."""
        return tuple(piece.buffers.size for piece in self.pieces)

    def payload_sizes(self, payload: str) -> tuple[int, ...]:
        """Bytes per piece on the wire."""
        return tuple(piece.payload_bytes(payload) for piece in self.pieces)

    @property
    def balance(self) -> float:
        """Largest piece over mean piece: 1.0 is perfect."""
        return max(self.piece_sizes) * len(self.pieces) / self.size

    def tensors(self) -> tuple[TensorSpec, ...]:
        """All tensors, sorted by name."""
        everything = [*(t for piece in self.pieces for t in piece.tensors), *self.constants]
        return tuple(sorted(everything, key=lambda t: t.name))


def is_embedding_like(name: str) -> bool:
    """True where a part of the dotted name says embedding or output head. Module types, where known, decide first."""
    return any(word in part for part in name.lower().split(".") for word in EMBEDDING_WORDS)


def check_tensors(tensors: Sequence[TensorSpec]) -> None:
    """Raise LayoutError when the list could not be a model: empty, doubled names, bad shapes, unknown dtypes."""
    if not any(tensor.kind == PARAMETER for tensor in tensors):
        raise LayoutError("the model has no trainable tensor; check requires_grad")
    if len(tensors) > TENSORS_MAX:
        raise LayoutError(f"the model has {len(tensors)} tensors; at most {TENSORS_MAX} are supported")
    seen: set[str] = set()
    for tensor in tensors:
        for name in (tensor.name, *tensor.aliases):
            if not name or len(name) > NAME_LENGTH_MAX:
                raise LayoutError(f"tensor name {name[:40]!r} must have 1 to {NAME_LENGTH_MAX} characters")
            if name == RESERVED_NAME or not name.isprintable():
                raise LayoutError(
                    f"tensor name {name[:40]!r} cannot stand in a model file (it must be printable, and not "
                    f"{RESERVED_NAME}); rename that parameter or buffer"
                )
            if name in seen:
                raise LayoutError(f"tensor {name!r} is listed twice")
            seen.add(name)
        _check_tensor(tensor)
    total_bytes = sum(len(tensor.value) for tensor in tensors)
    if total_bytes > CONSTANTS_BYTES_MAX:
        raise LayoutError(f"constants of {total_bytes} bytes in all; at most {CONSTANTS_BYTES_MAX} are supported")


def _check_tensor(tensor: TensorSpec) -> None:
    if tensor.kind not in KINDS:
        raise LayoutError(f"tensor {tensor.describe()} is of an unknown kind; known: {', '.join(KINDS)}")
    if len(tensor.shape) > DIMENSIONS_MAX or any(n <= 0 for n in tensor.shape):
        raise LayoutError(f"tensor {tensor.describe()} must have at most {DIMENSIONS_MAX} dimensions, each above 0")
    known = CONSTANT_BYTES if tensor.kind == CONSTANT else DTYPES
    if tensor.dtype not in known:
        raise LayoutError(f"tensor {tensor.describe()} has an unknown dtype; known: {', '.join(known)}")
    value_bytes = tensor.size * CONSTANT_BYTES[tensor.dtype] if tensor.kind == CONSTANT else 0
    if len(tensor.value) != value_bytes:
        raise LayoutError(f"tensor {tensor.describe()} comes with {len(tensor.value)} bytes instead of {value_bytes}")


def fingerprint(tensors: Iterable[TensorSpec], extra: str = "") -> str:
    """blake2b-128 over canonical names, aliases, shapes, dtypes and kinds, in name order (hazard 9), and `extra`."""
    lines = sorted(tensor.describe() for tensor in tensors)
    if extra:
        lines.append(f"extra {extra}")
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _of_kind(tensors: Iterable[TensorSpec], kind: str) -> list[TensorSpec]:
    return [tensor for tensor in tensors if tensor.kind == kind]


def _assign(tensors: Sequence[TensorSpec], fragments: int) -> list[list[TensorSpec]]:
    bins: list[list[TensorSpec]] = [[] for _ in range(fragments)]
    loads = [0] * fragments
    for kind in (PARAMETER, BUFFER):
        for tensor in sorted(_of_kind(tensors, kind), key=lambda t: (-t.size, t.name)):
            target = min(range(fragments), key=lambda i: (loads[i], i))
            bins[target].append(tensor)
            loads[target] += tensor.size
    return bins


def make_layout(tensors: Sequence[TensorSpec], fragments: int, extra: str = "") -> Layout:
    """Split `tensors` into `fragments` pieces. Raises LayoutError or ConfigError when that cannot be done."""
    check_tensors(tensors)
    trained = len(_of_kind(tensors, PARAMETER))
    if fragments < 1:
        raise ConfigError(f"fragments={fragments} must be at least 1")
    if fragments > trained:
        raise ConfigError(f"fragments={fragments} is more than the model's {trained} tensors; use at most that")
    bins = _assign(tensors, fragments)
    pieces = tuple(
        Piece(index, tuple(sorted(members, key=lambda t: (KINDS.index(t.kind), t.name))))
        for index, members in enumerate(bins)
    )
    constants = tuple(sorted(_of_kind(tensors, CONSTANT), key=lambda t: t.name))
    return Layout(pieces, fingerprint(tensors, extra), constants, extra)


def largest_balanced_fragments(tensors: Sequence[TensorSpec], limit: int, divides: int | None = None) -> int:
    """Largest P <= limit with max/mean <= 1.25; where `divides` is given, P must divide it. At least 1."""
    trained = _of_kind(tensors, PARAMETER)
    total = sum(tensor.size for tensor in trained)
    for fragments in range(min(limit, len(trained)), 1, -1):
        if divides is not None and divides % fragments:
            continue
        peak = max(sum(t.size for t in members) for members in _assign(trained, fragments))
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
        if name not in other and mine[name].kind != PARAMETER:
            return f"buffer {name!r} of the run is none of the learner's; all must join with the same buffers="
        if name not in mine and other[name].kind != PARAMETER:
            return f"buffer {name!r} of the learner is none of the run's; all must join with the same buffers="
        if name not in other:
            return f"tensor {mine[name].describe()} of the run is missing in the learner's model"
        if name not in mine:
            return f"tensor {other[name].describe()} of the learner's model is not in the run"
        if mine[name].describe() != other[name].describe():
            return f"tensor {mine[name].describe()} of the run is {other[name].describe()} in the learner's model"
    return None
