"""The merged model while its run goes on: read from the commit files of its directory, and written as a model file.

"As of after slot t": every piece at its newest commit with slot <= t, and none of those is left out. Slots of different
pieces may commit out of order; t is the newest that is in, and a lower one that is still being collected comes with a
later model. Reading takes no lock and writes nothing. A commit replaces the *older* file of its piece, so what was seen
as the newest stays readable until its piece has been committed twice more; whoever reads slower than that reads again.

The values are those that learners get: encoded as updates are on the wire (often bf16), decoded, in the dtype of the
model. So a model read here and one pulled from the syncer have the same bits and the same hash.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from atoll.core.config import DATA_PARALLEL, PAYLOAD_BYTES
from atoll.core.layout import Layout
from atoll.core.messages import Version
from atoll.errors import OR_EVERY, NothingMergedError, OvertakenError, RunError
from atoll.store.commits import CommitHead, commit_paths, read_head, read_theta
from atoll.store.files import write_atomic
from atoll.store.model import constants_of
from atoll.store.rundir import read_layout, read_settings
from atoll.store.tape import is_written
from atoll.tensors.codec import decode_piece, encode_piece
from atoll.tensors.hashing import payload_hash

TRIES = 8
FILE_PREFIX = "model-"
FILE_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class MergedPiece:
    """One piece as it is published. data: its payload, as on the wire."""

    version: Version
    slot: int
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class MergedModel:
    """The merged model as of after one slot."""

    run_id: str
    slot: int
    """The newest that is part of it; 0: version 0, nothing was merged into it."""
    versions: tuple[Version, ...]
    """Per piece."""
    hash: str
    """Of the hashes of all payloads, in the order of pieces: the same for the same published bits."""
    fingerprint: str
    """Of the model's tensors."""
    tensors: Mapping[str, Tensor]
    """By canonical name, in the model's shapes and dtypes, on the CPU; tied tensors once."""
    aliases: Mapping[str, tuple[str, ...]]
    """Other names of tied tensors."""
    damage: tuple[str, ...] = ()
    """Fragments that may be older than they could be, and why."""


def assemble(run_id: str, layout: Layout, payload: str, pieces: Sequence[MergedPiece]) -> MergedModel:
    """A model of its published pieces. payload: bf16 | fp32."""
    tensors: dict[str, Tensor] = {}
    for piece, merged in zip(layout.pieces, pieces, strict=True):
        flat = decode_piece(merged.data, piece, payload)
        for spec, start, stop in piece.offsets():
            tensors[spec.name] = flat[start:stop].view(spec.shape).to(getattr(torch, spec.dtype))
    tensors |= constants_of(layout)
    return MergedModel(
        run_id=run_id,
        slot=max(merged.slot for merged in pieces),
        versions=tuple(merged.version for merged in pieces),
        hash=whole_hash([payload_hash(merged.data) for merged in pieces]),
        fingerprint=layout.fingerprint,
        tensors=tensors,
        aliases={spec.name: spec.aliases for spec in layout.tensors() if spec.aliases},
    )


def whole_hash(payload_hashes: Sequence[str]) -> str:
    """Of a whole model, from the hashes of its pieces' payloads."""
    return payload_hash("\n".join(payload_hashes).encode())


# ------------------------------------------------------------------------------------------------ out of a directory


@dataclass(frozen=True, slots=True)
class _Found:
    """A commit file that can be read, as far as its head tells."""

    head: CommitHead
    path: Path


class MergedReader:
    """Reads the merged model of one run directory, again and again. Never writes there."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir
        self.run_id = ""
        self._layout: Layout | None = None
        self._payload = ""
        self._damage: dict[int, str] = {}
        if read_settings(run_dir).get("mode") == DATA_PARALLEL:
            raise RunError(
                f"run {run_dir} is of mode={DATA_PARALLEL}, which merges nothing; when it has ended, its model is in "
                "model/ of its directory"
            )

    @property
    def over(self) -> bool:
        """The run has ended, or its syncer has: nothing newer will come."""
        return self.ended or not is_written(self._path / "tape.jsonl")

    @property
    def ended(self) -> bool:
        """The run has come to its end, and left what it leaves there."""
        return any((self._path / name).exists() for name in ("summary.json", "model/manifest.json"))

    def versions(self) -> tuple[Version, ...]:
        """What `read` would give now, without reading any tensor."""
        layout = self._known_layout()
        return tuple(found[0].head.version for found in self._heads(layout))

    def newest_slot(self) -> int:
        """The newest slot that is committed; 0: only version 0 is."""
        return max(found[0].head.slot for found in self._heads(self._known_layout()))

    def read(self) -> MergedModel:
        """The model as of after the newest committed slot.

        NothingMergedError where there is no version 0 yet; OvertakenError where commits are replaced again and again
        faster than they can be read; RunError where they are damaged or of another layout.
        """
        layout = self._known_layout()
        for _ in range(TRIES):
            pieces = self._try_read(layout)
            if pieces is not None:
                model = assemble(self.run_id, layout, self._payload, pieces)
                return replace(model, damage=tuple(self._damage.values()))
        raise OvertakenError(
            f"the commits of {self._path} were replaced {TRIES} times while they were read; "
            "try again, from a faster disk, or pull over the network"
        )

    def _known_layout(self) -> Layout:
        if self._layout is None:
            layout = read_layout(self._path)
            settings = read_settings(self._path)
            if layout is None and "fragments" not in settings:
                raise NothingMergedError(
                    f"nothing is merged yet in {self._path}: no learner has joined; try again later{OR_EVERY}"
                )
            if layout is None:
                raise RunError(
                    f"run {self._path} has no layout.json: an older version of Atoll made it; when it is over its "
                    "model is in model/"
                )
            self.run_id, self._payload = str(settings.get("run_id")), str(settings.get("payload"))
            if "run_id" not in settings or self._payload not in PAYLOAD_BYTES:
                raise RunError(
                    f"{self._path / 'run.toml'} is damaged: it names no run_id, or payload={self._payload[:40]!r}, "
                    f"which is none of {', '.join(PAYLOAD_BYTES)}; the model of a run that is over is in model/"
                )
            self._layout = layout
        return self._layout

    def _heads(self, layout: Layout) -> list[list[_Found]]:
        """Per piece its readable commits, the newest first; at least one each."""
        found = [self._commits_of(piece.index) for piece in layout.pieces]
        lost = [index for index, (commits, _) in enumerate(found) if not commits]
        if lost:
            reasons = [reason for index in lost for reason in found[index][1]]
            if reasons:
                raise RunError(f"fragment {lost[0]} of {self._path} has no intact commit: {'; '.join(reasons[:2])}")
            raise NothingMergedError(
                f"nothing is merged yet in {self._path}: version 0 is not there; try again later{OR_EVERY}"
            )
        return [commits for commits, _ in found]

    def _commits_of(self, piece: int) -> tuple[list[_Found], list[str]]:
        heads = [(path, read_head(path)) for path in commit_paths(self._path / "commits", piece)]
        commits = [_Found(head, path) for path, head in heads if isinstance(head, CommitHead) and head.piece == piece]
        commits.sort(key=lambda found: found.head.version, reverse=True)
        reasons = [head for _, head in heads if isinstance(head, str) and head]
        if commits and commits[0].head.version.n > 0:  # then there have been two
            reasons += [f"{path.name} is missing" for path, head in heads if head == ""]
        return commits, reasons

    def _try_read(self, layout: Layout) -> list[MergedPiece] | None:
        """None: what was read is not of one slot, because commits came meanwhile."""
        before = self._heads(layout)
        slot = max(commits[0].head.slot for commits in before)
        pieces = []
        for index, commits in enumerate(before):
            merged = self._read_piece(layout, index, commits)
            if merged is None:
                return None
            pieces.append(merged)
        # What came after `slot` does not matter, what came late for a lower one does.
        return pieces if _cut(self._heads(layout), slot) == _cut(before, slot) else None

    def _read_piece(self, layout: Layout, index: int, commits: Sequence[_Found]) -> MergedPiece | None:
        """The newest intact one; None where another has taken its place."""
        _, reasons = self._commits_of(index)
        self._damage.pop(index, None)
        size = layout.pieces[index].size
        for found in commits:
            result = read_theta(found.path)
            if isinstance(result, str):
                reasons.append(result)
                continue
            head, theta = result
            if head.version != found.head.version:
                return None
            if len(theta) != size:
                raise RunError(
                    f"{found.path} has {len(theta)} values, fragment {index} of layout.json {size}: the directory "
                    "holds files of two layouts; pull from the directory of one run"
                )
            if reasons:
                self._damage[index] = _older(index, found.path, reasons)
            data = memoryview(encode_piece(theta, layout.pieces[index], self._payload).numpy()).cast("B")
            return MergedPiece(head.version, head.slot, data)
        reasons = list(dict.fromkeys(reasons))
        raise RunError(f"fragment {index} of {self._path} has no intact commit: {'; '.join(reasons)}")


def _older(index: int, path: Path, reasons: Sequence[str]) -> str:
    return (
        f"a commit of fragment {index} is damaged or gone ({reasons[0]}); its values are those of {path.name}, which "
        "may be one version older"
    )


def _cut(heads: Sequence[Sequence[_Found]], slot: int) -> list[Version | None]:
    """Per piece, its newest version with a slot up to `slot`; None: replaced by newer ones."""
    return [next((f.head.version for f in commits if f.head.slot <= slot), None) for commits in heads]


# ------------------------------------------------------------------------------------------------ into a file


def merged_path(directory: Path, slot: int) -> Path:
    """Where `write_merged` puts the model of a slot."""
    return directory / f"{FILE_PREFIX}{slot:08d}{FILE_SUFFIX}"


def write_merged(directory: Path, model: MergedModel) -> Path:
    """Write `model-<slot>.safetensors`, whole or not at all, durably. Metadata (strings): see `read_metadata`."""
    metadata = {
        "format": "pt",
        "run_id": model.run_id,
        "slot": str(model.slot),
        "hash": model.hash,
        "fingerprint": model.fingerprint,
        "versions": json.dumps(model.versions),
        "aliases": json.dumps({name: list(aliases) for name, aliases in model.aliases.items()}),
    }
    path = merged_path(directory, model.slot)
    write_atomic(path, save(dict(model.tensors), metadata))
    return path


def newest_written(directory: Path) -> tuple[Path, dict[str, str]] | None:
    """The newest file that `write_merged` left in `directory`, with its metadata; None where there is none."""
    for path in sorted(directory.glob(f"{FILE_PREFIX}*{FILE_SUFFIX}"), reverse=True):
        try:
            with safe_open(os.fspath(path), framework="pt") as file:
                metadata = dict(file.metadata() or {})
        except (OSError, SafetensorError):
            continue
        if metadata.keys() >= {"run_id", "slot", "hash", "versions"}:
            return path, metadata
    return None
