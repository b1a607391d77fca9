"""What a learner does while its syncer is away: its progress goes on, and some day it gives up (protocol R22, R28)."""

from __future__ import annotations

from atoll.core.config import SECOND_NS, RunConfig

SYNCER_WAIT_NS = 24 * 3600 * SECOND_NS
"""So long a learner trains on without a syncer, if its own steps do not reach the end of the run before (R28)."""


class Alone:
    """Knows whether the syncer is there, how far the run is, and when to give up. Steps are learner steps."""

    def __init__(self, config: RunConfig, *, wait_ns: int = SYNCER_WAIT_NS, progress_steps: int = 0) -> None:
        self._config = config
        self._wait_ns = wait_ns
        self._lost_at_ns: int | None = None
        self._at_end_since_ns: int | None = None
        self._progress_steps = progress_steps

    @property
    def connected(self) -> bool:
        """The agent has a stream."""
        return self._lost_at_ns is None

    @property
    def progress(self) -> float:
        """Global progress of the run, 0 to 1. It never falls."""
        return min(1.0, self._progress_steps / self._config.whole_steps)

    @property
    def progress_steps(self) -> int:
        """The same in steps of the run."""
        return self._progress_steps

    def lost(self, now_ns: int) -> None:
        """The stream is gone; later tries that fail change nothing."""
        if self._lost_at_ns is None:
            self._lost_at_ns = now_ns

    def back(self) -> None:
        """Welcome came."""
        self._lost_at_ns = self._at_end_since_ns = None

    def look(self, closed: int, own_steps: int, now_ns: int) -> None:
        """`closed`: T; `own_steps`: own steps since T was heard.

        With a syncer, own steps count up to one slot's, so that a schedule waits for the slots; without one for a lease
        they all count, and when it is back progress waits until the slots have caught up.
        """
        steps = self._config.slot_steps
        counted = own_steps if self._lost_for(now_ns, self._config.lease_interval_ns) else min(own_steps, steps)
        self._progress_steps = max(self._progress_steps, closed * steps + counted)
        at_end = not self.connected and closed * steps + own_steps >= self._config.whole_steps
        if at_end and self._at_end_since_ns is None:
            self._at_end_since_ns = now_ns

    def _lost_for(self, now_ns: int, span_ns: int) -> bool:
        return self._lost_at_ns is not None and now_ns >= self._lost_at_ns + span_ns

    def gave_up(self, now_ns: int) -> str:
        """Why it waits no longer; empty: it trains on. At the end of the run it waits a lease more."""
        if self._lost_for(now_ns, self._wait_ns):
            return f"the syncer has been away for {self._wait_ns / 1e9:.0f} s (syncer_wait)"
        ended_ns = self._at_end_since_ns
        if ended_ns is not None and now_ns >= ended_ns + self._config.lease_interval_ns:
            return "the syncer is away, and by its own steps this learner is at the end of the run"
        return ""
