"""`atoll pull WHERE --to DIR`: the merged model of a run that goes on, once or again and again.

One file per slot, `model-<slot>.safetensors`, rather than one that is replaced: whoever evaluates or serves a model can
open the file at leisure and names what it used, and a bad model does not push out the good one before it. `--keep N`
bounds what that takes.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import tyro

from atoll.cli.parse import parse
from atoll.errors import OR_EVERY, ConfigError, NothingMergedError, OvertakenError, RunError, SyncerGoneError

if TYPE_CHECKING:
    from atoll.store.merged import MergedModel

POLL_S = 0.5
GONE_S = 30.0
ADDRESS = re.compile(r"[^/]+:[0-9]{1,5}")
SOON_S = 5.0
"""How long until another look where there is no model yet."""


@dataclass(frozen=True, kw_only=True)
class Pull:
    """Write the merged model of a run that goes on to a file: model-<slot>.safetensors, with slot, hash, run id and the
    version of every piece in its metadata.

    The values are the published ones, which learners get (bf16 by default). The run is not slowed down by it. With
    --every it ends by itself when the run is over.
    """

    where: tyro.conf.Positional[str]
    """Directory of the run, or HOST:PORT of its syncer (then with ATOLL_TOKEN as for it, where it has one)."""
    to: Path
    """Directory for the files; it is made where it is missing."""
    every: str | None = None
    """Pull again after so long: 30s, 10m, 2h. Without it: once."""
    bulk_address: str | None = None
    """HOST:PORT of the syncer's bulk service, where that is not on the same host."""
    keep: int | None = None
    """With --every: remove what this command wrote but the newest KEEP files; default: keep all."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a source had. model None: nothing newer than what was known."""

    model: MergedModel | None
    over: bool
    """Nothing will come after it."""
    broken_off: bool = False
    """That is so because the syncer is gone."""


Known = tuple[str, str]
"""(run id, versions as JSON) of the newest file."""


class Source(Protocol):
    """Where models come from."""

    def next(self, known: Known | None, wait_s: float) -> Pulled:
        """The model after `wait_s`, or earlier where the run is over before."""


class DirectorySource:
    """The directory of a run."""

    def __init__(self, path: Path) -> None:
        from atoll.store.merged import MergedReader

        self._path = path
        self._reader = MergedReader(path)

    def next(self, known: Known | None, wait_s: float) -> Pulled:
        """As Source says."""
        deadline = time.monotonic() + wait_s
        while not self._reader.over and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(POLL_S, left))
        # Before reading: what is read after the end is the last.
        over = self._reader.over
        broken_off = over and not self._reader.ended
        try:
            versions = json.dumps(self._reader.versions())
        except NothingMergedError:
            if over:
                raise RunError(f"the run in {self._path} ended before anything was merged; there is no model") from None
            raise
        if known == (self._reader.run_id, versions):
            return Pulled(None, over, broken_off)
        return Pulled(self._reader.read(), over, broken_off)


class NetworkSource:
    """A syncer."""

    def __init__(self, address: str, bulk_address: str | None) -> None:
        from atoll.runtime.observer import NetworkReader

        self._address = address
        self._reader = NetworkReader(address, bulk_address)
        self._run_id = ""

    def next(self, known: Known | None, wait_s: float) -> Pulled:
        """As Source says. A syncer that was there and is gone is looked for again for GONE_S."""
        deadline, told = time.monotonic() + wait_s + GONE_S, False
        while True:
            try:
                model, over = self._reader.read(wait_s, lambda run, versions: known == (run, json.dumps(versions)))
            except NothingMergedError:
                self._same_run()
                raise
            except SyncerGoneError as error:
                if not self._run_id:
                    raise
                if not told:
                    warn(f"{error} It is looked for again for {GONE_S:g} s")
                told = True
                if time.monotonic() > deadline:
                    raise SyncerGoneError(
                        f"{error} It was there before: if the run is over, its model is in model/ of its directory"
                    ) from error
                wait_s = 0.0
                time.sleep(POLL_S)
                continue
            self._same_run()
            return Pulled(model, over)

    def _same_run(self) -> None:
        """RunError where another run answers than before."""
        if self._run_id not in ("", self._reader.run_id):
            raise RunError(
                f"run {self._run_id!r} is gone from {self._address}, where {self._reader.run_id!r} is now; if it "
                "is over, its model is in model/ of its directory; pull the other one into another --to"
            )
        self._run_id = self._reader.run_id


def main(argv: Sequence[str]) -> int:
    """0 where there was a model, or the run has come to its end; SyncerGoneError where it broke off."""
    options = parse(Pull, "pull", argv)
    from atoll.launch.durations import duration_s

    every_s = None if options.every is None else duration_s("every", options.every)
    if options.keep is not None and (options.keep < 1 or every_s is None):
        raise ConfigError(f"keep={options.keep} must be at least 1, and goes with --every")
    source = source_of(options.where, options.bulk_address)
    existed = options.to.exists()
    try:
        options.to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"to={str(options.to)!r} cannot be a directory ({error.strerror}); choose another") from error
    try:
        return Follower(source, options.to, options.keep).run(every_s)
    finally:
        if not existed:
            with contextlib.suppress(OSError):
                options.to.rmdir()  # only where nothing came


def source_of(where: str, bulk_address: str | None) -> Source:
    """A directory where there is one of this name, else a syncer where it looks like its address."""
    if ADDRESS.fullmatch(where) and not Path(where).exists():
        return NetworkSource(where, bulk_address)
    if bulk_address is not None:
        raise ConfigError(f"bulk_address={bulk_address!r} goes with the HOST:PORT of a syncer, not with {where!r}")
    return DirectorySource(Path(where))


class Follower:
    """Writes what a source has into a directory."""

    def __init__(self, source: Source, to: Path, keep: int | None) -> None:
        from atoll.store.files import remove_asides
        from atoll.store.merged import newest_written

        self._source = source
        self._to = to
        self._keep = keep
        self._written: list[Path] = []
        self._known: Known | None = None
        self._hash = ""
        remove_asides(to)
        found = newest_written(to)
        if found is not None:
            self._known, self._hash = (found[1]["run_id"], found[1]["versions"]), found[1]["hash"]

    def run(self, every_s: float | None) -> int:
        """Once, or until the run is over."""
        wait_s, told = 0.0, False
        while True:
            over = broken_off = False
            try:
                pulled = self._source.next(self._known, wait_s)
                over, broken_off = pulled.over, pulled.broken_off
                self._take(pulled.model, quiet=every_s is not None)
                wait_s = every_s or 0.0
            except (NothingMergedError, OvertakenError) as error:
                if every_s is None:
                    raise
                wait_s = min(every_s, SOON_S)
                if not told:
                    warn(f"{str(error).removesuffix(OR_EVERY)}; waiting")
                told = True
            except OSError as error:
                reason = f"the model cannot be written to {self._to}: {error.strerror or error}; make room"
                if every_s is None or over:
                    raise RunError(f"{reason}, or give another --to") from error
                wait_s = every_s
                warn(f"{reason}; trying again in {every_s:g} s")
            if every_s is None:
                return 0
            if broken_off:
                raise SyncerGoneError(f"the run broke off: its syncer is gone; {self._to} has its newest model")
            if over:
                print("the run is over", flush=True)
                return 0

    def _take(self, model: MergedModel | None, *, quiet: bool) -> None:
        from atoll.store.merged import write_merged

        if model is not None and self._known is not None and model.run_id != self._known[0]:
            raise RunError(
                f"{self._to} holds models of run {self._known[0]!r}, not {model.run_id!r}; choose another --to"
            )
        if model is None or model.hash == self._hash:
            if not quiet:
                print(f"nothing new: the newest model is in {self._to} already", flush=True)
            return
        for text in model.damage:
            warn(text)
        path = write_merged(self._to, model)
        self._known, self._hash = (model.run_id, json.dumps(model.versions)), model.hash
        print(f"slot {model.slot}: {path}", flush=True)
        if path not in self._written:
            self._written.append(path)
        while self._keep is not None and len(self._written) > self._keep:
            self._written.pop(0).unlink(missing_ok=True)


def warn(text: str) -> None:
    """A line that matters, on stderr."""
    print(f"atoll: {text}", file=sys.stderr, flush=True)
