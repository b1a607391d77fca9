"""What may come over the wire: names, numbers, texts and hashes, each bounded. A violation is one line."""

from __future__ import annotations

import re
from math import isfinite
from typing import Any

from atoll.errors import AtollError

NUMBER_MAX = 2**63 - 1
COUNT_MAX = 2**53
"""Of tokens and steps: beyond it a count and its floating-point value differ, and nobody gets there."""
TEXT_LENGTH_MAX = 2000
NAME_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,64}")
HASH_PATTERN = re.compile(r"([0-9a-f]{32})?")


class WireError(AtollError):
    """The other side sent what the protocol does not allow."""


def check_name(what: str, value: str, *, empty: bool = False) -> str:
    """`value` if it can be a learner's or run's name: 1 to 64 of A-Z a-z 0-9 . _ - (or, where allowed, empty)."""
    if (empty and not value) or NAME_PATTERN.fullmatch(value):
        return value
    raise WireError(f"{what}={value[:80]!r} must be 1 to 64 letters, digits, '.', '_' or '-'")


def check_number(what: str, value: int, highest: int = NUMBER_MAX) -> int:
    """`value` if 0 <= value <= highest."""
    if 0 <= value <= highest:
        return value
    raise WireError(f"{what}={value} must be between 0 and {highest}")


def check_text(what: str, value: str, longest: int = TEXT_LENGTH_MAX) -> str:
    """`value` if it is one printable line of at most `longest` characters."""
    if len(value) <= longest and (value.isprintable() or not value):
        return value
    raise WireError(f"{what}={value[:80]!r} must be one printable line of at most {longest} characters")


def check_blob(what: str, value: bytes, most: int) -> bytes:
    """`value` if it has at most `most` bytes."""
    if len(value) <= most:
        return value
    raise WireError(f"{what} has {len(value)} bytes; at most {most} are allowed")


def check_hash(what: str, value: str) -> str:
    """`value` if it is empty or 32 hex digits."""
    if HASH_PATTERN.fullmatch(value):
        return value
    raise WireError(f"{what}={value[:80]!r} must be 32 hex digits")


def check_finite(what: str, value: float) -> float:
    """`value` if it is neither NaN nor infinite."""
    if isfinite(value):
        return value
    raise WireError(f"{what}={value} must be finite")


def check_count(what: str, items: Any, most: int) -> Any:
    """`items` if there are at most `most` of them."""
    if len(items) <= most:
        return items
    raise WireError(f"{what} has {len(items)} entries; at most {most} are allowed")


def one_line(text: str) -> str:
    """`text` as `check_text` lets it pass: what we send never breaks the rule that we enforce."""
    line = " ".join(text.split())
    line = "".join(char if char.isprintable() else "?" for char in line)
    return line[:TEXT_LENGTH_MAX]
