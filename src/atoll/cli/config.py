"""`--config FILE.toml`: options of a command from a file. What stands on the command line wins.

    learners = 4                  # a key is an option's name; inner-lr and inner_lr are the same
    data = ["texts", "more.txt"]

A run.toml is such a file too: it begins with run_id, and holds settings that no option sets. The new run has its own
run_id; of the others those are named that differ from what the new run will have. It knows nothing of data, model and
rates; where the options of that run lie beside it (options.toml), it is said.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from atoll.core.config import RunConfig
from atoll.errors import ConfigError, nearest, shown
from atoll.launch.options import OPTIONS_FILE, LocalOptions

FLAG = "--config"
FILE_BYTES_MAX = 1_000_000
WANTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text in quotes",
    Path: "a path in quotes",
    tuple: 'a list of texts, like ["one", "two"]',
}


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """What a file says."""

    values: dict[str, Any]
    """By field of the command's dataclass."""
    note: str = ""
    """What of an earlier run is not taken over, for people."""


def take_flag(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """(the file of --config, the other words)."""
    found: list[str] = []
    others: list[str] = []
    words = iter(argv)
    for word in words:
        if word == FLAG:
            found.append(next(words, ""))
        elif word.startswith(f"{FLAG}="):
            found.append(word.partition("=")[2])
        else:
            others.append(word)
    if len(found) > 1:
        raise ConfigError(f"{FLAG} stands {len(found)} times, and one file is read; put all options into one")
    if found and (not found[0] or found[0].startswith("--")):
        raise ConfigError(f"{FLAG} needs a file, such as {FLAG} run.toml")
    return (Path(found[0]) if found else None), others


def read_options(path: Path, kind: type) -> FileOptions:
    """The options of dataclass `kind` in a file. ConfigError names file, key, value and what is wanted."""
    content = _read(path)
    kinds = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    earlier = "run_id" in content and "run_id" not in names
    values: dict[str, Any] = {}
    left: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if earlier and name not in names and name in RunConfig.__dataclass_fields__:
            left[name] = value
        elif name not in names:
            table = isinstance(value, dict)
            remedy = "options stand without tables, like steps = 600" if table else nearest(name, names)
            raise ConfigError(f"config {str(path)!r}: key {shown(key)} is unknown; {remedy}")
        elif name in values:
            raise ConfigError(f"config {str(path)!r}: {name} stands twice, with - and with _; keep one of them")
        else:
            values[name] = _typed(value, kinds[name], f"config {str(path)!r}: {name}")
    if earlier and values.get("quorum") == 0:
        del values["quorum"]  # run.toml writes the default as 0
    return FileOptions(values=values, note=_note(path, left, kind) if earlier else "")


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"config {str(path)!r} cannot be read: {error.strerror}; give a TOML file") from None
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"config {str(path)!r} has more than {FILE_BYTES_MAX} bytes; give a file of options")
    try:
        return tomllib.loads(os.fsdecode(content))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(
            f"config {str(path)!r} is not TOML: {' '.join(str(error).split())}; write lines like learners = 4"
        ) from None


def _typed(value: Any, kind: Any, where: str) -> Any:
    """`value` as a field of type `kind` has it."""
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    wanted = next(get_origin(option) or option for option in options if option is not NoneType)
    if wanted is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if wanted is Path and isinstance(value, str) and value:
        return Path(value)
    if wanted is float and isinstance(value, int | float) and not isinstance(value, bool):
        return _float(value, where)
    if type(value) is wanted and wanted in (bool, int, str):
        return value
    raise ConfigError(f"{where}={shown(value)} must be {WANTED[wanted]}")


def _float(value: float, where: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{where}={shown(value)} must be {WANTED[float]}") from None


def _note(path: Path, left: Mapping[str, Any], kind: type) -> str:
    """What of an earlier run a new one will not have; "" where all of it is the default anyway."""
    whole = path.with_name(OPTIONS_FILE)
    if issubclass(kind, LocalOptions) and whole.is_file():
        return f"config {str(path)!r} has the settings of merging only; {str(whole)!r} has all options of that run"
    usual = {name: field.default for name, field in RunConfig.__dataclass_fields__.items()}
    changed = [
        f"{name}={shown(value)}"
        for name, value in left.items()
        if name != "run_id" and usual[name] is not MISSING and value != usual[name]
    ]
    if not changed:
        return ""
    return f"config {str(path)!r} is an earlier run's; this command has no option for {', '.join(changed)}"
