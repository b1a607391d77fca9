"""What probably lies behind a contribution that was not merged, in words for people: the same everywhere."""

from __future__ import annotations

FAR_NORM = "is far above this piece's history"
"""Ends the reason of a refusal by norm."""
_CAUSES = {
    FAR_NORM: "another learning rate than the others'? let schedules follow `learner.progress`, also after a return",
    "not finite": "its training diverges: lower its learning rate, clip gradients",
    "do not match their hash": "bytes are damaged on the way or in memory: check that machine and its link",
    "is not valid": "it counts steps or tokens wrongly",
    "slot": "its link, or its steps, are too slow for the run's pace: see `atoll advise`",
    "stale": "its updates arrive too late: its link is too thin for the interval",
    "bytes were not in": "its link is too thin for the interval: see `atoll advise`",
}


def likely_cause(reason: str) -> str:
    """Of a refusal or a miss; empty where nothing is known."""
    return next((cause for words, cause in _CAUSES.items() if words in reason), "")


def with_cause(reason: str) -> str:
    """The reason, and the likely cause in parentheses."""
    cause = likely_cause(reason)
    return f"{reason} ({cause})" if cause else reason


def is_power_of_two(count: int) -> bool:
    """When a count is worth a line: the first, then each doubling."""
    return count > 0 and count & (count - 1) == 0
