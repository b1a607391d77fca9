"""Command lines into typed dataclasses."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from typing import TypeVar

import tyro

from atoll.errors import ConfigError

Options = TypeVar("Options")
FRAME = re.compile(r"^[│|╭╰─\s]+|[│|╮╯─\s]+$")
BAD_VALUE = re.compile(r"Error parsing --(\S+): .*?'([^']*)'.* Argument helptext: --\S+ (?:\{None\}\|)?(INT|FLOAT) ")
FROM_LIST = re.compile(r"instantiated from \['([^']*)'\]")
KINDS = {"INT": "a whole number, written in digits", "FLOAT": "a number"}
MISSING = re.compile(r"Missing from atoll [a-z ]+: (?:(--\S+) )?(PATH|STR) (.*?)\.? \(required\)")
POSITIONAL = {"PATH": "a path", "STR": "an argument"}
CODES = re.compile(r"\x1b\[[0-9;]*m")


def parse(kind: type[Options], command: str, argv: Sequence[str]) -> Options:
    """The options of `atoll COMMAND`. A wrong command line is a ConfigError of one line, like every other bad input."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, prog=f"atoll {command}", args=list(argv))
    except SystemExit as error:
        if error.code in (0, None):
            raise
        raise ConfigError(f"{one_line(said.getvalue())}; `atoll {command} --help` lists the options") from None


def one_line(text: str) -> str:
    """What tyro draws in a frame, as one line."""
    lines = [FRAME.sub("", CODES.sub("", line)) for line in text.splitlines()]
    kept = [line for line in lines if line and not line.endswith("options") and "--help" not in line]
    text = " ".join(kept)
    bad, missing = BAD_VALUE.search(text), MISSING.search(text)
    if bad is not None:
        listed = FROM_LIST.search(text)
        value = listed[1] if listed else bad[2]
        return f"{bad[1].replace('-', '_')}={value!r} must be {KINDS[bad[3]]}"
    if missing is not None:
        what = missing[1] or POSITIONAL[missing[2]]
        return f"{what} is missing: {missing[3][:1].lower()}{missing[3][1:]}"
    return text or "the command line is wrong"
