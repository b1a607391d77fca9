"""Transition tables: legal moves as data, one table per small machine.

A table maps (state, cause) to the next state. `move` looks a transition up; what is not in the table is a bug of ours
and an assert. Pictures in the docs are made from the same tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    """Transitions of one machine. `initial` is where it begins, `final` states have no way out."""

    name: str
    initial: str
    final: frozenset[str]
    rows: Mapping[tuple[str, str], str]

    def move(self, state: str, cause: str) -> str:
        """The next state; AssertionError where the table has no such row."""
        assert (state, cause) in self.rows, f"{self.name}: no transition from {state!r} by {cause!r}"
        return self.rows[state, cause]

    def allows(self, state: str, cause: str) -> bool:
        """True where the table has this row."""
        return (state, cause) in self.rows

    def states(self) -> frozenset[str]:
        """All states that the table names."""
        sources = {state for state, _ in self.rows}
        return frozenset(sources | set(self.rows.values()) | {self.initial})


YOUNG = 8
STEADY_FACTOR = 4


class Average:
    """Exponential moving average that starts at its first value; None before."""

    __slots__ = ("count", "rate", "value")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.count = 0
        self.value: float | None = None

    def add(self, value: float) -> None:
        """Weigh one more value in."""
        self.count += 1
        self.value = value if self.value is None else self.value + self.rate * (value - self.value)

    @property
    def young(self) -> bool:
        """Too few values for it to be trusted."""
        return self.count < YOUNG

    def add_steady(self, value: float, least: float = 0.0) -> None:
        """As `add`, but one value counts at most 4 averages (or `least`): an outage is not taken for a new pace.

        Not while the average is young: a first value that is far too small would hold it down for long.
        """
        if not self.young:
            value = min(value, max(STEADY_FACTOR * self.get(), least))
        self.add(value)

    def get(self, default: float = 0.0) -> float:
        """The average, or `default` before the first value."""
        return default if self.value is None else self.value
