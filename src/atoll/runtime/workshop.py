"""The syncer's tensors: Theta, momentum, merging, committing. Everything here runs in one worker thread (R23).

The event loop hands over bytes and handles and gets handles back; `Published` is what it may serve afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.core.config import RunConfig
from atoll.core.events import Commit, Merge, MergeDone
from atoll.core.layout import Layout
from atoll.core.messages import Announce, Life, Version
from atoll.store.commits import CommitHead, Commits, tensor_hash
from atoll.store.contributions import keep_contribution, keep_seed
from atoll.store.model import export_model
from atoll.store.rundir import RunDir
from atoll.store.tape import Tape
from atoll.tensors.codec import decode_piece, encode_piece
from atoll.tensors.hashing import payload_hash
from atoll.tensors.measure import cosine
from atoll.tensors.merge import average, is_finite, merge_piece, norm_of, normalised, piece_norm, tensor_norms
from atoll.tensors.outer import nesterov

SEED_VERSION = Version(1, 0)
Payload = bytes | bytearray


@dataclass(frozen=True, slots=True)
class Published:
    """A committed version of a piece as it goes on the wire."""

    version: Version
    slot: int
    data: memoryview
    hash: str
    newest_merged: dict[Life, int]


@dataclass(frozen=True, slots=True)
class Checked:
    """What is known of a payload after its bytes were looked at."""

    hash: str
    hash_ok: bool
    finite: bool
    norm: float
    norms: tuple[float, ...] = ()
    """Of each tensor of the piece."""


@dataclass(slots=True)
class _State:
    version: Version
    theta: Tensor
    momentum: Tensor


@dataclass(slots=True)
class _Staged:
    """A merge that is not committed yet."""

    state: _State
    data: memoryview
    theta_hash: str
    momentum_hash: str
    update_hash: str


class Workshop:
    """Tensors of one run. Not thread-safe: one worker thread calls it."""

    def __init__(self, config: RunConfig, layout: Layout, rundir: RunDir, epoch: int, *, keep: bool) -> None:
        self._config = config
        self._layout = layout
        self._rundir = rundir
        self._epoch = epoch
        self._keep = keep
        self._commits = Commits(rundir.commits)
        self._seed: dict[int, Tensor] = {}
        self._states: dict[int, _State] = {}
        self._staged: dict[int, _Staged] = {}

    def _decode(self, payload: Payload, piece: int) -> Tensor:
        return decode_piece(payload, self._layout.pieces[piece], self._config.payload)

    def _encode(self, theta: Tensor, piece: int) -> memoryview:
        return memoryview(encode_piece(theta, self._layout.pieces[piece], self._config.payload).numpy()).cast("B")

    # ------------------------------------------------------------ version 0

    def check_seed(self, payload: Payload, piece: int, seal: str) -> Checked:
        """Look at a piece of version 0 and keep it if it is sound."""
        digest = payload_hash(payload)
        theta = self._decode(payload, piece)
        finite = is_finite(theta)
        if digest == seal and finite:
            self._seed[piece] = theta
        return Checked(digest, digest == seal, finite, 0.0)

    def seed_from_file(self, pieces: Sequence[Tensor]) -> list[bool]:
        """Take version 0 from a file; per piece: finite."""
        self._seed = dict(enumerate(pieces))
        return [is_finite(theta) for theta in pieces]

    def drop_seed(self) -> None:
        """Forget what came of version 0."""
        self._seed.clear()

    def commit_seed(self) -> list[Published]:
        """Write version 0 of every piece. OSError: nothing is published; it can be called again."""
        published = []
        for piece in self._layout.pieces:
            theta = self._seed[piece.index]
            momentum = torch.zeros_like(theta)
            state = _State(SEED_VERSION, theta, momentum)
            data = self._encode(theta, piece.index)
            head = CommitHead(
                piece=piece.index,
                version=SEED_VERSION,
                slot=0,
                epoch=self._epoch,
                theta_hash=tensor_hash(theta),
                momentum_hash=tensor_hash(momentum),
            )
            keep_seed(self._rundir.contributions, piece.index, theta)
            self._commits.write(head, theta, momentum)
            self._states[piece.index] = state
            published.append(Published(SEED_VERSION, 0, data, payload_hash(data), {}))
        self._seed.clear()
        return published

    # ------------------------------------------------------------ contributions and merges

    def check_contribution(self, life: Life, announce: Announce, payload: Payload, seal: str) -> Checked:
        """Hash, finiteness and norm; keeps the bytes for replay where that is wanted."""
        digest = payload_hash(payload)
        if digest != seal:
            return Checked(digest, False, False, 0.0)
        # Squares of fp32 cannot overflow the fp64 of a norm: it is finite exactly where every value is.
        flat, piece = self._decode(payload, announce.piece), self._layout.pieces[announce.piece]
        norms = tuple(tensor_norms(flat, piece.parameters))
        norm = norm_of(norms)
        finite = math.isfinite(norm) and is_finite(flat[piece.parameters.size :])
        return Checked(digest, True, finite, norm if finite else 0.0, norms)

    def keep(self, life: Life, announce: Announce, payload: Payload, digest: str) -> None:
        """Write a contribution that is merged now, where `keep` says so. OSError where the disk is full."""
        if self._keep:
            directory = self._rundir.contributions
            trained_bytes = self._layout.pieces[announce.piece].parameters.payload_bytes(self._config.payload)
            keep_contribution(directory, life, announce, payload, self._config.payload, digest, trained_bytes)

    def merge(
        self, action: Merge, payloads: Sequence[Payload], norms: Sequence[Sequence[float]]
    ) -> MergeDone:
        """Delta = -sent per input, merged, then the outer step; the result is staged until it is committed.

        Buffers are averaged by the same weights, with no outer step (R29).
        norms: per input, of each parameter, as `check_contribution` found them.
        """
        piece = self._layout.pieces[action.piece]
        state = self._states[action.piece]
        assert state.version == action.base, f"piece {piece.index} is at {state.version}, not {action.base}"
        trained = piece.parameters.size
        sent = [self._decode(payload, action.piece) for payload in payloads]
        deltas = [each[:trained].neg_() for each in sent]
        weights = [entry.weight for entry in action.inputs]
        delta = merge_piece(deltas, weights, piece.parameters, self._config.merge, norms)
        before = _State(state.version, state.theta[:trained], state.momentum[:trained])
        lr, mu = self._config.outer_lr, self._config.outer_momentum
        theta, momentum = nesterov(before.theta, before.momentum, delta, lr=lr, mu=mu)
        step_norm = piece_norm(theta - before.theta)
        if piece.buffers.tensors:
            theta = torch.cat((theta, average([each[trained:] for each in sent], normalised(weights))))
            momentum = torch.cat((momentum, state.momentum[trained:]))
        data = self._encode(theta, action.piece)
        finite = is_finite(theta) and is_finite(momentum) and is_finite(self._decode(data, action.piece))
        staged = _Staged(
            _State(action.version, theta, momentum),
            data,
            tensor_hash(theta),
            tensor_hash(momentum),
            payload_hash(data),
        )
        self._staged[action.piece] = staged
        hashes = staged.theta_hash, staged.momentum_hash, staged.update_hash
        if not finite:
            return MergeDone(action.slot, False, *hashes, len(data), 0.0)
        length = piece_norm(delta)
        return MergeDone(
            action.slot,
            True,
            *hashes,
            len(data),
            length,
            tuple(cosine(each, delta, norm_of(own), length) for each, own in zip(deltas, norms, strict=True)),
            cosine(delta, before.momentum, length),
            step_norm,
        )

    def commit(self, action: Commit, tape: Tape) -> Published:
        """Sync the tape, then write and sync the commit file. OSError: the staged merge stays, to be tried again."""
        staged = self._staged[action.piece]
        assert staged.state.version == action.version
        tape.flush()
        head = CommitHead(
            piece=action.piece,
            version=action.version,
            slot=action.slot,
            epoch=self._epoch,
            theta_hash=staged.theta_hash,
            momentum_hash=staged.momentum_hash,
            newest_merged=action.newest_merged,
            record=_plain(action.record),
        )
        self._commits.write(head, staged.state.theta, staged.state.momentum)
        self._states[action.piece] = staged.state
        del self._staged[action.piece]
        merged = dict(action.newest_merged)
        return Published(action.version, action.slot, staged.data, staged.update_hash, merged)

    # ------------------------------------------------------------ the end

    def export(self) -> str | None:
        """Write model/; its path. None where there is no version 0."""
        states = [self._states.get(piece.index) for piece in self._layout.pieces]
        if any(state is None for state in states):
            return None
        known = [state for state in states if state is not None]
        thetas, versions = [s.theta for s in known], [s.version for s in known]
        return str(export_model(self._rundir.model, self._config.run_id, self._layout, thetas, versions))


def _plain(record: Any) -> dict[str, Any]:
    return asdict(record)
