"""All that decides a virtual run, as plain data: settings, learners, sites, and what goes wrong when.

A plan comes from a seed (`draw.py`), from a scenario file (`scenario.py`) or from the shrinker (`shrink.py`). The same
plan always gives the same trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MS = 1_000_000
S = 1_000 * MS

TAIL_FACTOR = 8

FAULTS = {
    "crash": "kill -9 of a learner and its agent; after for_ms a new life under its name, 0: never",
    "agent dies": "kill -9 of the agent alone: its learner starts another",
    "terminate": "SIGTERM: the learner leaves at its next boundary; after for_ms a new life, 0: never",
    "cut control": "the control connection breaks and cannot be opened for for_ms",
    "cut bulk": "bulk transfers break and cannot begin for for_ms",
    "stall bulk": "bulk bytes stand still for for_ms; no connection breaks",
    "partition up": "what the learner says is held back for for_ms; connections stay open",
    "partition down": "what the syncer says to the learner is held back for for_ms",
    "partition": "both directions are held back for for_ms, bulk too",
    "hang": "the training thread stands still for for_ms, its agent lives",
    "sleep": "learner and agent stand still for for_ms (SIGSTOP, a suspended machine)",
    "straggle": "steps take `factor` times as long for for_ms",
    "thin link": "the learner's link carries 1/factor of its bytes for for_ms",
    "join": "a newcomer, made like `learner`",
    "same name": "a second process under the name of `learner`",
    "stranger": "a Hello of another run, protocol version, layout or an unknown life (factor 1 to 4)",
    "rogue": "a learner joins and breaks the protocol (factor 1 to 9, see rogue.LIES)",
    "disk full": "the syncer's disk takes nothing for for_ms",
    "disk slow": "its writes take `factor` times as long for for_ms",
    "syncer sleeps": "the syncer stands still for for_ms",
    "stop": "Ctrl-C at the syncer",
}
"""What can go wrong. Faults of the syncer name no learner."""

SYNCER_FAULTS = frozenset({"disk full", "disk slow", "syncer sleeps", "stop", "stranger", "rogue"})

SLOT_STATES = ("open", "grace", "final", "collecting", "merging", "committing", "retrying")
"""States of a slot that last. `open`: no slot is in grace or final.

`waiting` does not: a slot waits only while an earlier one of its piece is on its way, and the rules hardly let that be
(one contribution per piece and learner is unsettled, and no slot opens while the syncer is behind with its piece).
"""

WHENS = (*SLOT_STATES, "finished")
"""What a fault may wait for: a state of a slot, or the phase after the last merge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSpec:
    """How a learner of the world is made. Rates 0: no limit."""

    name: str
    step_ns: int = 100 * MS
    jitter: float = 0.02
    """Share of a step, uniform to both sides."""
    tail: float = 0.0
    """Share of steps that take TAIL_FACTOR times as long: a law with a tail."""
    tokens: int = 1000
    """Per step."""
    latency_ns: int = 1 * MS
    """One way."""
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0
    site: str = ""
    """Learners of one site share its link; empty: no shared link."""
    joins_at_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A link that several learners share. Rates 0: no limit."""

    name: str
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that goes wrong at a time, for a time."""

    kind: str
    at_ns: int
    for_ns: int = 0
    learner: str = ""
    factor: float = 1.0
    when: str = ""
    """One of WHENS: strikes when, from `at_ns` on, that is first so. Empty: strikes at `at_ns`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One virtual run."""

    seed: int
    """Of all chance within the run: jitter, which contributions are bad."""
    settings: dict[str, Any]
    """Of RunConfig, without run_id."""
    learners: tuple[LearnerSpec, ...]
    sites: tuple[Site, ...] = ()
    faults: tuple[Fault, ...] = ()
    piece_values: int = 10_000
    lossy: bool = False
    """What is in flight when a control connection breaks is lost; else it still arrives."""
    linger_ns: int = 0
    """The syncer notices a broken connection so much later than the learner: streams of one life overlap."""
    bad_share: float = 0.0
    """Share of contributions that arrive damaged, not finite or huge."""
    norms_rise: float = 0.0
    """In the second half of the run all norms are so many times as large (hazard 46); 0: they stay."""
    merge_ns: int = 2 * MS
    commit_ns: int = 1 * MS
    learners_max: int = 0
    """Lives that the syncer keeps; 0: its default."""
    heal_at_ns: int = 0
    """From then on nothing breaks, except faults that wait for the finish; somebody is kept alive. 0: never heals."""
    limit_ns: int = 3600 * S
    """A run that is not over by then makes no progress."""
    name: str = ""
    """Of a scenario."""
    expect: dict[str, float] = field(default_factory=dict)
    """What a scenario promises: see scenario.EXPECT."""

    def describe(self) -> Iterator[str]:
        """What was drawn, line by line."""
        heals = f"heals at {self.heal_at_ns / S:.1f} s" if self.heal_at_ns else "never heals"
        yield f"seed {self.seed}: limit {self.limit_ns / S:.0f} s, {heals}"
        yield f"  settings {self.settings}"
        yield (
            f"  lossy {self.lossy}, linger {self.linger_ns / MS:.0f} ms, bad {self.bad_share:.2f}, "
            f"norms rise {self.norms_rise}, merge {self.merge_ns / MS:.0f} ms, commit {self.commit_ns / MS:.0f} ms, "
            f"learners_max {self.learners_max}"
        )
        for site in self.sites:
            yield f"  {site}"
        for spec in self.learners:
            yield f"  {spec}"
        for fault in self.faults:
            yield f"  {fault}"
