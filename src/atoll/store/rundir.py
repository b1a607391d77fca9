"""A run's directory: who it belongs to, its settings, and its epochs.

run.toml             resolved settings
options.toml, recipe.toml    what `atoll train` was told, and what its learners train
layout.json          the tensors of the model: names, shapes, dtypes (the split into pieces follows from them)
tape.jsonl           every choice (store/tape.py)
epochs/0000000001    one per life of the syncer, taken by exclusive create, holding a random name (R13)
commits/             Theta and momentum (store/commits.py)
contributions/       what was merged, where it is kept (store/contributions.py)
model/               the final model (store/model.py)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from atoll.core.layout import Layout, TensorSpec, make_layout
from atoll.errors import AtollError, RunError
from atoll.store.files import is_vacant, remove_asides, sync_directory, write_all, write_atomic, write_first

Value = str | int | float | bool | tuple[str, ...]
SETTINGS_BYTES_MAX = 1024 * 1024
LAYOUT_BYTES_MAX = 256 * 1024 * 1024
LAYOUT_SCHEMA = 1
RECIPE_FILE = "recipe.toml"
EPOCH_DIGITS = 10
EPOCH_NAME = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Epoch:
    """One life of a syncer: (number, random holder)."""

    number: int
    holder: str


class LayoutFile(msgspec.Struct, frozen=True, kw_only=True):
    """layout.json. Fields are only added, with defaults."""

    schema: int = LAYOUT_SCHEMA
    fingerprint: str
    fragments: int
    tensors: tuple[TensorSpec, ...]
    extra: str = ""


@dataclass(frozen=True, slots=True)
class RunDir:
    """An opened directory of one run."""

    path: Path
    run_id: str

    @property
    def tape(self) -> Path:
        return self.path / "tape.jsonl"

    @property
    def commits(self) -> Path:
        return self.path / "commits"

    @property
    def contributions(self) -> Path:
        return self.path / "contributions"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def settings_file(self) -> Path:
        return self.path / "run.toml"

    def write_settings(self, settings: Mapping[str, Value]) -> None:
        """Write run.toml; `run_id` must be this run's."""
        if settings.get("run_id") != self.run_id:
            raise RunError(
                f"settings of run {settings.get('run_id')!r} do not belong in {self.path} of {self.run_id!r}"
            )
        write_atomic(self.settings_file, toml_bytes(settings))

    def write_layout(self, layout: Layout) -> None:
        """Write layout.json: commit files hold flat pieces, and it alone tells names and shapes."""
        file = LayoutFile(
            fingerprint=layout.fingerprint,
            fragments=len(layout.pieces),
            tensors=layout.tensors(),
            extra=layout.extra,
        )
        write_atomic(layout_file(self.path), msgspec.json.encode(file) + b"\n")

    def take_epoch(self) -> Epoch:
        """The next number, by exclusive create: two syncers never get the same one."""
        directory = self.path / "epochs"
        directory.mkdir(exist_ok=True)
        holder = secrets.token_hex(8)
        number = 1 + max((int(p.name) for p in directory.iterdir() if EPOCH_NAME.fullmatch(p.name)), default=0)
        while True:
            try:
                fd = os.open(directory / f"{number:0{EPOCH_DIGITS}d}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                number += 1
                continue
            try:
                write_all(fd, holder.encode() + b"\n")
                os.fsync(fd)
            finally:
                os.close(fd)
            sync_directory(directory)
            return Epoch(number, holder)


def open_rundir(path: Path, run_id: str) -> RunDir:
    """Create `path` for this run, or open it again. RunError where it holds another run, or something else, or where
    another process was first: of two that begin here at the same time only one goes on.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        owner = owner_of(path)
        if owner is not None and owner != run_id:
            raise RunError(f"directory {path} holds run {owner!r}, not {run_id!r}; choose another directory")
        if owner is None:
            _claim(path, {"run_id": run_id})
        for name in ("commits", "contributions", "epochs"):
            (path / name).mkdir(exist_ok=True)
        for folder in (path, path / "commits", path / "epochs", path / "model"):
            remove_asides(folder)
        sync_directory(path)
    except OSError as error:
        raise RunError(f"directory {path} cannot be used: {error}; choose another") from error
    return RunDir(path, run_id)


def take_directory(path: Path, settings: Mapping[str, Value]) -> None:
    """A directory for a run that has nothing but settings. RunError as in `open_rundir`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        _claim(path, settings)
    except OSError as error:
        raise RunError(f"directory {path} cannot be used: {error}; choose another") from error


def _claim(path: Path, settings: Mapping[str, Value]) -> None:
    if not is_vacant(path):
        owner = owner_of(path)  # looked at last: another may have begun here since the first look
        holds = "is not empty and holds no run" if owner is None else f"holds run {owner!r}"
        raise RunError(f"directory {path} {holds}; choose another directory")
    if not write_first(path / "run.toml", toml_bytes(settings)):
        raise RunError(f"directory {path} was taken by another run just now; choose another directory")


OURS = (
    "run.toml", "options.toml", "recipe.toml", "layout.json", "tape.jsonl", "listening.json", "processes.json",
    "evals.jsonl", "rendezvous", "commits", "contributions", "epochs", "steps", "logs", "model", "summary.json",
)  # fmt: skip
"""All that a run makes in its directory."""


def remove_run(path: Path, *, keep: bool) -> None:
    """Remove what a run that did not start has made; only its owner may. `keep`: the directory was there before.

    What is not ours stays, and with it the directory. run.toml goes last: until then nobody else begins here.
    """
    if not path.is_dir():
        return
    remove_asides(path, age_s=0.0)
    for name in (*OURS[1:], OURS[0]):
        found = path / name
        if found.is_dir() and not found.is_symlink():
            shutil.rmtree(found, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                found.unlink(missing_ok=True)
    if not keep:
        with contextlib.suppress(OSError):
            path.rmdir()


def is_gone(path: Path, inode: int) -> bool:
    """Whether a directory was removed, or moved away, since it had this inode."""
    try:
        return path.stat().st_ino != inode
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False  # a file system that does not answer now


def gone_text(path: Path) -> str:
    """The same in words."""
    return f"the run directory {path} was removed or moved: nothing can be merged or written"


def _check_file(file: Path, bytes_max: int) -> None:
    """RunError where reading it would not end: a pipe, a device, very many bytes."""
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise RunError(f"{file} is not a regular file; give the directory of a run")
    if found.st_size > bytes_max:
        raise RunError(f"{file} has {found.st_size} bytes; at most {bytes_max} are read")


def read_settings(path: Path) -> dict[str, Value]:
    """run.toml of the run in directory `path`; RunError where it is missing or broken."""
    file = path / "run.toml"
    try:
        _check_file(file, SETTINGS_BYTES_MAX)
        return read_toml(file)
    except FileNotFoundError as error:
        raise RunError(
            f"directory {path} holds no run: run.toml is missing; give the directory that `--run` named"
        ) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RunError(f"{file} cannot be read: {' '.join(str(error).split())}") from error


def layout_file(path: Path) -> Path:
    """layout.json of the run in directory `path`."""
    return path / "layout.json"


def read_layout(path: Path) -> Layout | None:
    """The layout of the run in directory `path`; None before the first learner came. RunError where it is damaged."""
    file = layout_file(path)
    try:
        _check_file(file, LAYOUT_BYTES_MAX)
        found = msgspec.json.decode(file.read_bytes(), type=LayoutFile)
        layout = make_layout(found.tensors, found.fragments, found.extra)
    except FileNotFoundError:
        return None
    except RunError:
        raise
    except (OSError, msgspec.DecodeError, AtollError) as error:
        raise RunError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if layout.fingerprint != found.fingerprint:
        raise RunError(f"{file} is damaged: its tensors do not have the fingerprint that it names")
    return layout


def owner_of(path: Path) -> str | None:
    """Run id of the run in `path`; None where there is none."""
    if not (path / "run.toml").exists():
        return None
    run_id = read_settings(path).get("run_id")
    if not isinstance(run_id, str):
        raise RunError(f"{path / 'run.toml'} names no run_id; choose another directory")
    return run_id


def toml_bytes(values: Mapping[str, Value]) -> bytes:
    """As a file. Names of files keep their bytes, whatever encoding they and this process have."""
    return os.fsencode(to_toml(values))


def read_toml(file: Path) -> dict[str, Any]:
    """What `toml_bytes` made, or somebody's own; OSError, tomllib.TOMLDecodeError."""
    return tomllib.loads(os.fsdecode(file.read_bytes()))


def to_toml(values: Mapping[str, Value]) -> str:
    """Flat TOML: one `name = value` per line."""
    return "".join(f"{name} = {_toml_value(value)}\n" for name, value in values.items())


def _toml_value(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
