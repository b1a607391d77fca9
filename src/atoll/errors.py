"""Errors that a user can cause or must see.

Each message is one line: what is wrong, the value, and the remedy. The command line prints it to stderr and exits
with status 2, without a traceback.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

BITS_MAX = 63
SHOWN_MAX = 60
OR_EVERY = ", or give --every"
"""Ends the words of a NothingMergedError, for who pulls once."""


class AtollError(Exception):
    """Base of every error that Atoll raises on purpose."""


class ConfigError(AtollError):
    """A setting, or two settings together, cannot work."""


class DataError(AtollError):
    """Training data is missing, unreadable, empty or too short."""


class LayoutError(AtollError):
    """Two models do not have the same tensors, or a model cannot be split as asked."""


class JoinError(AtollError):
    """A learner could not join: no syncer, a name in use, another run, another version, no memory for it."""


class SyncerGoneError(JoinError):
    """No syncer answers at an address: it is not there (any more), or the network is down."""


class RunOverError(JoinError):
    """The run had ended before this learner joined: nothing is left to do."""


class SyncerLostError(AtollError):
    """`step`: the syncer was away, or refused this learner, for `syncer_wait_s` or to the run's end by its own steps.

    The model holds what this learner trained; what it did meanwhile is not merged. Save it in `finally`.
    """


class PutOutError(AtollError):
    """`step`: a newer learner has this one's name now, so this one's training ends."""


class RunError(AtollError):
    """A run directory or a run cannot be used as asked."""


class NothingMergedError(RunError):
    """A run has no version 0 yet: nobody has joined it, or the first learner is still handing in its weights."""


class OvertakenError(RunError):
    """Commits of a run were replaced again and again while they were read; a later try may be luckier."""


class FinishedError(AtollError):
    """`step` was called after it had returned False."""


class DivergedError(AtollError):
    """The loss of this learner is not finite."""


# ---------------------------------------------------------------- parts of a message


def literal(value: Any) -> str:
    """A value as TOML has it: text, flag or number."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def shown(value: Any) -> str:
    """A value of a file for a message of one line."""
    if isinstance(value, bool | str):
        text = literal(value)
    elif isinstance(value, dict | list):
        text = "a table" if isinstance(value, dict) else "a list"
    elif isinstance(value, int) and value.bit_length() > BITS_MAX:
        text = "a number of more than 63 bits"
    else:
        text = str(value)
    return text if len(text) <= SHOWN_MAX else f"{text[: SHOWN_MAX - 3]}..."


def nearest(word: str, known: Iterable[str]) -> str:
    """A remedy for an unknown word."""
    words = list(known)
    close = get_close_matches(word, words, n=1)
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(words)}"
