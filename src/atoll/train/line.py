"""What a script's log is told of the line to the syncer: that it is away and why, that it is back, what it refused."""

from __future__ import annotations

import logging
from typing import Any

from atoll.core import events
from atoll.core.causes import is_power_of_two, with_cause
from atoll.core.messages import Fate, Welcome

_log = logging.getLogger("atoll")


class Line:
    """Reads what the agent says, before the machine does."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._away: events.StreamLost | None = None
        self._refused = 0
        self.joined = False
        """Before that nothing trains, and what is wrong is the answer of `join`."""

    @property
    def put_out(self) -> str:
        """The syncer's words, where it has just ended this life; empty: it has not."""
        away = self._away
        return away.reason if away is not None and away.refusal == "put out" else ""

    def hear(self, item: Any, progress: float) -> None:
        """One event. progress: of the run, 0 to 1."""
        if isinstance(item, events.StreamLost):
            self._lost(item, progress)
        elif isinstance(item, events.Heard) and isinstance(item.message, Welcome):
            if self._away is not None and self.joined:
                what = "is reached again" if self._away.of_agent else "is back"
                _log.warning("the syncer at %s %s", self._address, what)
            self._away = None
        elif isinstance(item, events.Heard) and isinstance(item.message, Fate) and item.message.fate == "refused":
            self._refusal(item.message.reason)

    def _lost(self, item: events.StreamLost, progress: float) -> None:
        """Said once, and again where a syncer answers there now and refuses. Of an agent its client has spoken."""
        before, self._away = self._away, item
        known = before is not None and (before.refusal, before.of_agent) == (item.refusal, item.of_agent)
        if not self.joined or known or item.of_agent:
            return
        what = "refuses this learner" if item.refusal else "does not answer"
        _log.warning(
            "the syncer at %s %s (%s); training goes on alone from %.0f%% of the run, and it is tried again",
            self._address,
            what,
            item.reason or "connection closed",
            100 * progress,
        )

    def _refusal(self, reason: str) -> None:
        """The first time, and whenever their number has doubled."""
        self._refused += 1
        if is_power_of_two(self._refused):
            told = "the syncer refused work of this learner (%d times so far): %s"
            _log.warning(told, self._refused, with_cause(reason))
