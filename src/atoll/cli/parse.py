"""Command lines into typed dataclasses."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import tyro

from atoll.cli.config import read_options, take_flag
from atoll.errors import ConfigError

Options = TypeVar("Options")
FRAME = re.compile(r"^[│|╭╰─\s]+|[│|╮╯─\s]+$")
BAD_VALUE = re.compile(r"Error parsing --(\S+): .*?'([^']*)'.* Argument helptext: --\S+ (?:\{None\}\|)?(INT|FLOAT) ")
FROM_LIST = re.compile(r"instantiated from \['([^']*)'\]")
KINDS = {"INT": "a whole number, written in digits", "FLOAT": "a number"}
MISSING = re.compile(r"Missing from atoll [a-z ]+: (?:(--\S+) )?(PATH|STR) (.*?)\.? \(required\)")
UNKNOWN = re.compile(r"(Unrecognized options: .*?)[ -]* Perhaps you meant: (--\S+) ")
POSITIONAL = {"PATH": "a path", "STR": "an argument"}
CONFIG_HELP = "Options from a TOML file, by name: steps = 600. The command line wins."
CODES = re.compile(r"\x1b\[[0-9;]*m")


def parse(kind: type[Options], command: str, argv: Sequence[str]) -> Options:
    """The options of `atoll COMMAND`, those of `--config FILE` below those of the command line.

    A wrong command line or file is a ConfigError of one line, like every other bad input.
    """
    path, words = take_flag(argv)
    values: dict[str, Any] = {}
    if path is not None:
        read = read_options(path, kind)
        values = read.values
        if read.note:
            print(f"atoll: {read.note}", file=sys.stderr, flush=True)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found = tyro.cli(with_config(kind), prog=f"atoll {command}", args=words, default=start(kind, values))
            return cast(Options, found)
    except SystemExit as error:
        if error.code in (0, None):
            raise
        raise ConfigError(f"{one_line(said.getvalue())}; `atoll {command} --help` lists the options") from None


@functools.cache
def with_config(kind: type) -> type:
    """`kind` with --config in its help; `take_flag` has read it before tyro looks."""
    option = Annotated[Path | None, tyro.conf.arg(metavar="FILE.toml", help=CONFIG_HELP)]
    field = ("config", option, None)
    made = dataclasses.make_dataclass(kind.__name__, [field], bases=(kind,), frozen=True, kw_only=True)
    made.__doc__ = kind.__doc__
    return made


def start(kind: type, values: dict[str, Any]) -> Any:
    """What holds where the command line is silent: the file, then the defaults of `kind`."""
    unset = dataclasses.MISSING
    needed = [f.name for f in dataclasses.fields(kind) if f.default is unset and f.default_factory is unset]
    return with_config(kind)(**(dict.fromkeys(needed, tyro.MISSING) | values))


def one_line(text: str) -> str:
    """What tyro draws in a frame, as one line."""
    lines = [FRAME.sub("", CODES.sub("", line)) for line in text.splitlines()]
    kept = [line for line in lines if line.strip("- ") and not line.endswith("options") and "--help" not in line]
    text = " ".join(kept)
    bad, missing, unknown = BAD_VALUE.search(text), MISSING.search(text), UNKNOWN.search(text)
    if bad is not None:
        listed = FROM_LIST.search(text)
        value = listed[1] if listed else bad[2]
        return f"{bad[1].replace('-', '_')}={value!r} must be {KINDS[bad[3]]}"
    if missing is not None:
        what = missing[1] or POSITIONAL[missing[2]]
        return f"{what} is missing: {missing[3][:1].lower()}{missing[3][1:]}"
    if unknown is not None:
        return f"{unknown[1]}; did you mean {unknown[2]}"
    return text or "the command line is wrong"
