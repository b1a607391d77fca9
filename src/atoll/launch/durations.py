"""Durations as people write them: 30s, 10m, 2h. Standard library only."""

from __future__ import annotations

import math
import re

from atoll.errors import ConfigError

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")
LONGEST_S = 366 * 86_400.0


def duration_s(name: str, text: str, *, least_s: float = 1.0) -> float:
    """`10m` -> 600.0; ConfigError names the option, the value and the remedy."""
    found = DURATION.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{name}={text[:40]!r} must be a number with its unit, such as 30s, 10m or 2h")
    seconds = float(found[1]) * UNITS_S[found[2]]
    if not least_s <= seconds <= LONGEST_S or math.isnan(seconds):
        raise ConfigError(f"{name}={text[:40]!r} must be from {least_s:g}s to {LONGEST_S / 86_400:g}d")
    return seconds
