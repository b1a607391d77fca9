"""What probably lies behind a contribution that was not merged, and what to do: the same words everywhere.

Settings in backticks are options of the syncer's command: what cannot be set is not recommended.
"""

from __future__ import annotations

from atoll.core.config import RunConfig

FAR_NORM = "is far above all that is usual on this fragment"
"""Ends the reason of a refusal by norm."""
FIRST_AWAITED = "first parameters are awaited from"
"""Begins a notice about a seeder that hands nothing in."""
_CAUSES = {
    FAR_NORM: (
        "bursts of its gradients: clip them; or another learning rate than the others': let schedules follow "
        "`learner.progress`, also after a return"
    ),
    "not finite": "its training diverges: look at its data, lower its learning rate, clip gradients",
    "do not match their hash": "bytes are damaged on the way or in memory: check that machine and its link",
    "is not valid": "it counts steps or tokens wrongly",
    "had closed": "its link or its steps are too slow for the run's pace: raise `interval`",
    "stale": "its downlink is too slow for a round: raise `interval`",
    "bytes were not in": "its uplink is too slow: raise `interval` (or `overlap`, except in mode diloco)",
}


def likely_cause(reason: str) -> str:
    """Of a refusal or a miss; empty where nothing is known."""
    return next((cause for words, cause in _CAUSES.items() if words in reason), "")


def with_cause(reason: str) -> str:
    """The reason, and the likely cause in parentheses."""
    cause = likely_cause(reason)
    return f"{reason} ({cause})" if cause else reason


def larger_quorum(config: RunConfig, quorum: int) -> str:
    """Options of a command that make merges wait for one learner more. A quorum is refused above the expected."""
    wanted = f"--quorum {quorum + 1}"
    return wanted if quorum < config.learners else f"--min-ready {quorum + 1} {wanted}"


def is_power_of_two(count: int) -> bool:
    """When a count is worth a line: the first, then each doubling."""
    return count > 0 and count & (count - 1) == 0
