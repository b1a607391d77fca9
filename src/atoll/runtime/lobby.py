"""Before a run has a layout: the first learner's Hello, or an init file together with it, decides.

What cannot be a run is refused here, in the driver; everything later is refused by the machine.
"""

from __future__ import annotations

import platform
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from atoll import __version__
from atoll.core.config import RunConfig
from atoll.core.layout import Layout, balance_warning, check_tensors, largest_balanced_fragments, make_layout
from atoll.core.messages import PROTOCOL_VERSION, Hello, Refuse
from atoll.core.records import TAPE_SCHEMA, EpochLine, Record, RunLine
from atoll.errors import AtollError, ConfigError, RunError
from atoll.runtime.options import SyncerOptions
from atoll.store.model import check_model_file, load_pieces, with_constants_of
from atoll.store.rundir import Epoch, RunDir, open_rundir
from atoll.wire.check import WireError, check_name


@dataclass(frozen=True, slots=True)
class Opened:
    """A run that can begin."""

    config: RunConfig
    layout: Layout
    payload_sizes: tuple[int, ...]
    """Bytes per piece on the wire."""
    init: Sequence[Tensor] | None
    warnings: tuple[str, ...]


def new_run_id() -> str:
    """A random name for a run."""
    return f"run-{secrets.token_hex(4)}"


class Lobby:
    """Settings that wait for a model."""

    rundir: RunDir

    def __init__(self, options: SyncerOptions) -> None:
        self._options = options
        self._settings: dict[str, Any] = dict(options.settings)
        self._settings.setdefault("run_id", new_run_id())
        if not self._settings.get("fragments"):
            self._settings.pop("fragments", None)
        try:
            self.run_id = check_name("run_id", str(self._settings["run_id"]))
        except WireError as error:
            raise ConfigError(str(error)) from error
        # What is wrong whatever the model is must be said now, not when the first learner comes.
        RunConfig.from_dict({"fragments": 1, **self._settings})
        if options.init is not None:
            check_model_file(options.init)

    def open_directory(self) -> tuple[RunDir, Epoch]:
        """Take the run directory and an epoch in it."""
        self.rundir = open_rundir(self._options.run_dir, self.run_id)
        if self.rundir.tape.exists():
            raise RunError(f"directory {self._options.run_dir} holds a run that has begun; choose another")
        return self.rundir, self.rundir.take_epoch()

    def open_run(self, hello: Hello) -> Opened | Refuse:
        """The run that fits this learner's model, or why it is refused."""
        refusal = self._stranger(hello)
        if refusal is not None:
            return refusal
        try:
            check_tensors(hello.tensors)
            config = RunConfig.from_dict({"fragments": self._fragments(hello), **self._settings})
            layout = make_layout(hello.tensors, config.fragments, hello.extra)
            init = None
            if self._options.init is not None:
                layout = with_constants_of(self._options.init, layout)
                init = load_pieces(self._options.init, layout)
            self.rundir.write_settings(config.to_dict())
            self.rundir.write_layout(layout)
        except (AtollError, OSError) as error:
            return Refuse("layout", str(error))
        sizes = layout.payload_sizes(config.payload)
        return Opened(config, layout, sizes, init, self._warnings(config, layout))

    def _stranger(self, hello: Hello) -> Refuse | None:
        if hello.protocol != PROTOCOL_VERSION:
            return Refuse(
                "protocol",
                f"the learner speaks protocol {hello.protocol}, the syncer {PROTOCOL_VERSION}; "
                "install the same version of Atoll on both",
            )
        if hello.run_id and hello.run_id != self.run_id:
            return Refuse("run", f"the learner asks for run {hello.run_id!r}, the syncer serves {self.run_id!r}")
        return None

    def _fragments(self, hello: Hello) -> int:
        interval = int(self._settings["interval"])
        return largest_balanced_fragments(hello.tensors, limit=interval, divides=interval)

    def _warnings(self, config: RunConfig, layout: Layout) -> tuple[str, ...]:
        lines = [balance_warning(layout)]
        if config.whole_steps != config.steps:
            lines.append(f"steps={config.steps} is rounded up to {config.whole_steps}, whole slots")
        return tuple(line for line in lines if line is not None)

    def first_lines(self, opened: Opened, epoch: Epoch, now_ns: int) -> tuple[Record, ...]:
        """The tape's first two lines."""
        versions = {
            "atoll": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            **self._options.versions,
        }
        run = RunLine(
            schema=TAPE_SCHEMA,
            now_ns=now_ns,
            wall_time=datetime.now(UTC).isoformat(timespec="seconds"),
            settings=opened.config.to_dict(),
            fingerprint=opened.layout.fingerprint,
            piece_sizes=opened.layout.piece_sizes,
            versions=versions,
            layout=tuple(
                tuple((tensor.name, tensor.size, tensor.averaged) for tensor in piece.tensors)
                for piece in opened.layout.pieces
            ),
            buffer_sizes=opened.layout.buffer_sizes,
        )
        return run, EpochLine(now_ns, epoch.number, epoch.holder)
