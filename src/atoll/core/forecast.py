"""What a learner knows of the syncer's time, and how wrong it was before (protocol R4).

Three errors are learned from: between when closings were predicted and when they were heard of; announcements that came
when their slot had closed; bytes that came when collecting had ended. The last two widen a margin at once, and merge by
merge it is lost again: too careful costs merges (docs/LOG.md).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from atoll.core.config import RunConfig
from atoll.core.machine import Average
from atoll.core.messages import LATE_ANNOUNCEMENT, LATE_BYTES, Pace

CONTROL_DELAY_NS = 2_000_000
"""First guess of a control message's way there and back; replaced by what echoes show."""
ECHOES = 16
"""The shortest way there and back of so many echoes is the delay: longer ones waited somewhere."""
LATE_MORE = 0.5
"""Announcements that came too late: half a slot more margin. Bytes: half a step, or half as much again
if that is more."""
LATE_LESS = {LATE_ANNOUNCEMENT: 0.8, LATE_BYTES: 0.85}
"""What a merge leaves of a margin."""
LATE_ROUNDS = 0.5
"""No margin is longer: it would leave no slot to name. After an outage in which much came too late they all are."""


@dataclass(frozen=True, slots=True)
class Horizon:
    """What the planner must know of time at one boundary. All in ns of the learner's clock."""

    now_ns: int
    step_ns: int
    """Own step, moving average."""
    closed: int
    """T: newest slot heard to have closed, and when."""
    closed_at_ns: int
    slot_interval_ns: int
    """0 while unknown."""
    slack_ns: int
    """How much longer the newest slot would have waited for one more learner."""
    delay_ns: int
    """Control delay to the syncer and back."""
    miss_ns: int
    """By how much closings were predicted wrong, moving average."""
    own_steps: int
    """Own steps since T was heard."""
    last_slot: int
    """No slot above this is named."""
    joined_at: int
    """T when this life became ready: earlier slots were never its turn."""
    announce_late_ns: float = 0.0
    """Margin for announcements: more after each that came too late, less after each contribution that was merged."""
    bytes_late_ns: float = 0.0
    """The same for bytes."""
    probe: bool = False
    """Nothing was unsettled for a round: perhaps the link is better than its measured rate."""


class Forecast:
    """Hears of closings, echoes and fates. `horizon` is what the planner sees of it."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.closed = 0
        """T: newest slot heard to have closed."""
        self.own_steps_at_closed = 0
        self._closed_at_ns = 0
        self._interval_ns = 0
        self._slack_ns = 0
        self._miss_ns = Average(config.average_rate)
        self._late_ns = {LATE_ANNOUNCEMENT: 0.0, LATE_BYTES: 0.0}
        self._echoes: deque[int] = deque(maxlen=ECHOES)

    @property
    def interval_ns(self) -> int:
        """Between two closings, as the syncer says; 0 while unknown."""
        return self._interval_ns

    def hear_slot(self, slot: int, interval_ns: int, at_ns: int, step_ns: float, own_steps: int) -> None:
        """Slot `slot` has closed, heard at `at_ns`, `own_steps` into this life."""
        if self._interval_ns and slot > self.closed:
            expected_ns = self._closed_at_ns + (slot - self.closed) * self._interval_ns
            self._miss_ns.add_steady(abs(at_ns - expected_ns), step_ns)
        self._interval_ns = interval_ns
        if slot > self.closed or self._closed_at_ns == 0:
            self.closed = slot
            self._closed_at_ns = at_ns
            self.own_steps_at_closed = own_steps

    def hear_pace(self, pace: Pace, at_ns: int) -> None:
        """How long the slot would have waited, and how long a message takes there and back."""
        self._slack_ns = pace.slack_ns
        if pace.echo_ns:
            self._echoes.append(max(0, at_ns - pace.echo_ns - pace.echo_age_ns))

    def too_late(self, what: str, step_ns: float) -> None:
        """A contribution was lost by it, if `what` is not empty."""
        if what not in self._late_ns:
            return
        margin_ns, most_ns = self._late_ns[what], LATE_ROUNDS * self._config.fragments * self._interval_ns
        more_ns = max(step_ns, margin_ns) if what == LATE_BYTES else self._interval_ns
        self._late_ns[what] = min(margin_ns + LATE_MORE * more_ns, most_ns)

    def merged(self) -> None:
        """A contribution was in time."""
        for what in self._late_ns:
            self._late_ns[what] *= LATE_LESS[what]

    def horizon(self, *, now_ns: int, step_ns: float, own_steps: int, joined_at: int, probe: bool) -> Horizon:
        """All of it, for the boundary at `now_ns`."""
        return Horizon(
            now_ns,
            int(step_ns),
            self.closed,
            self._closed_at_ns,
            self._interval_ns,
            self._slack_ns,
            min(self._echoes, default=CONTROL_DELAY_NS),
            int(self._miss_ns.get()),
            own_steps - self.own_steps_at_closed,
            self._config.slots,
            joined_at,
            self._late_ns[LATE_ANNOUNCEMENT],
            self._late_ns[LATE_BYTES],
            probe,
        )
