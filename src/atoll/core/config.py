"""Settings of a run. The syncer holds them and hands them to every learner."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from math import ceil
from typing import Any

from atoll.errors import ConfigError

MODES = ("decoupled", "streaming", "diloco")
DATA_PARALLEL = "data-parallel"
"""What run.toml of a run without a syncer has as its mode."""
MERGES = ("rda", "average")
TAKES = ("overwrite", "rebase")
PAYLOADS = ("bf16", "fp32")
LEARNERS_MAX = 4096
STEPS_MAX = 10**12
SEED_MAX = 2**63 - 1
FRAGMENTS_MAX = 2**20
SECOND_NS = 1_000_000_000
WAIT_MAX_NS = 366 * 86_400 * SECOND_NS
OUTER_LR_MAX = 100.0
"""Far above what has been useful (about 1): a slip of the keyboard, which would spoil the model at the first merge."""
PLACES = 4
PAYLOAD_BYTES = {"bf16": 2, "fp32": 4}
"""Bytes of a value on the wire."""


def choice(name: str, value: str, known: tuple[str, ...]) -> str:
    """`value` if it is one of `known`; else ConfigError that lists them."""
    if value not in known:
        raise ConfigError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")
    return value


def between(name: str, value: int, least: int, most: int) -> None:
    """ConfigError where `value` is not."""
    if not least <= value <= most:
        raise ConfigError(f"{name}={value} must be between {least} and {most}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that learners and syncer must agree on. Checked when built."""

    run_id: str
    """Random name of the run; a learner of another run is refused."""
    steps: int
    """Length of the run in learner steps; rounded up to a multiple of `interval / fragments` by `resolve`."""
    fragments: int
    """P: parts of the model that are merged in turn."""
    interval: int
    """H: learner steps between two merges of the same fragment; a multiple of P."""
    overlap: int = 2
    """tau: steps that a transfer may take before the syncer stops collecting, and what lock modes wait at."""
    mode: str = "decoupled"
    """decoupled | streaming | diloco: settings of one core."""
    learners: int = 1
    """M: slots begin when so many are ready, or `start_wait_ns` after the first."""
    quorum: int = 0
    """K: 0 means half of the ready learners, rounded up. Ignored in the lock modes, which wait for all."""
    merge: str = "rda"
    """rda | average (method.md, Merge)."""
    take: str = "rebase"
    """overwrite (the paper) | rebase (protocol R7)."""
    outer_lr: float = 0.7
    """Learning rate of the outer Nesterov step."""
    outer_momentum: float = 0.5
    """Momentum of the outer Nesterov step."""
    payload: str = "bf16"
    """Format of contributions and updates on the wire."""
    stale_max: int = 1
    """How many versions an anchor may be behind when its contribution is merged."""
    grace_factor: float = 0.8
    """gamma of the grace window; 0 switches it off."""
    average_rate: float = 0.1
    """Rate of the exponential moving averages of waits."""
    seed: int = 0
    """Seed of the run; learners derive theirs from it, their name and generation."""
    heartbeat_interval_ns: int = SECOND_NS // 2
    """Time between two signs of life of a learner's agent."""
    lease_interval_ns: int = 5 * SECOND_NS
    """Without a sign of life for so long, a learner is away."""
    start_wait_ns: int = 120 * SECOND_NS
    """Slots begin so long after the first learner is ready, whoever is missing."""

    def __post_init__(self) -> None:
        choice("mode", self.mode, MODES)
        choice("merge", self.merge, MERGES)
        choice("take", self.take, TAKES)
        choice("payload", self.payload, PAYLOADS)
        self._check_counts()
        self._check_rates()

    def _check_counts(self) -> None:
        between("steps", self.steps, 1, STEPS_MAX)
        between("seed", self.seed, -SEED_MAX, SEED_MAX)
        between("fragments", self.fragments, 1, FRAGMENTS_MAX)
        if self.interval < 1 or self.interval % self.fragments:
            remedy = self.fragments * max(1, ceil(self.interval / self.fragments))
            raise ConfigError(
                f"interval={self.interval} must be a multiple of fragments={self.fragments}; try {remedy}"
            )
        between("interval", self.interval, 1, STEPS_MAX)
        between("overlap", self.overlap, 0, STEPS_MAX)
        between("learners", self.learners, 1, LEARNERS_MAX)
        if self.quorum < 0 or self.quorum > self.learners:
            raise ConfigError(f"quorum={self.quorum} must be between 1 and learners={self.learners}")
        between("stale_max", self.stale_max, 0, STEPS_MAX)
        if self.mode == "diloco" and (self.fragments != 1 or self.overlap != 0):
            raise ConfigError(
                f"mode=diloco needs fragments=1 and overlap=0, not fragments={self.fragments} "
                f"and overlap={self.overlap}; leave them out or use mode=streaming"
            )
        if self.mode == "streaming" and self.overlap >= self.interval:
            raise ConfigError(f"overlap={self.overlap} must be below interval={self.interval} in mode=streaming")
        between("lease_interval_ns", self.lease_interval_ns, 1, WAIT_MAX_NS)
        if not 0 < self.heartbeat_interval_ns < self.lease_interval_ns:
            raise ConfigError(
                f"heartbeat_interval_ns={self.heartbeat_interval_ns} must be above 0 and below "
                f"lease_interval_ns={self.lease_interval_ns}"
            )
        between("start_wait_ns", self.start_wait_ns, 0, WAIT_MAX_NS)

    def _check_rates(self) -> None:
        if not 0 < self.outer_lr <= OUTER_LR_MAX:
            raise ConfigError(f"outer_lr={self.outer_lr} must be above 0 and at most {OUTER_LR_MAX:g}")
        if not 0 <= self.outer_momentum < 1:
            raise ConfigError(f"outer_momentum={self.outer_momentum} must be at least 0 and below 1")
        if not 0 <= self.grace_factor < 1:
            raise ConfigError(f"grace_factor={self.grace_factor} must be at least 0 and below 1")
        if not 0 < self.average_rate <= 1:
            raise ConfigError(f"average_rate={self.average_rate} must be above 0 and at most 1")

    @property
    def locked(self) -> bool:
        """True in the modes that wait for all learners."""
        return self.mode != "decoupled"

    @property
    def places(self) -> int:
        """Updates that a learner's agent may stage at once.

        The lock modes hold updates back until their step, and may get them in any order: one per fragment, and one on
        its way. With fewer, all learners could wait for an update that has no place to arrive in.
        """
        return self.fragments + 1 if self.locked else PLACES

    @property
    def overslept_ns(self) -> int:
        """A syncer that did nothing for longer stood still itself: nobody's silence counts (R10)."""
        return self.lease_interval_ns // 4

    @property
    def slot_steps(self) -> int:
        """s = H / P: learner steps per slot."""
        return self.interval // self.fragments

    @property
    def slots(self) -> int:
        """N: regular slots of the run; the finish adds P more (R22)."""
        return ceil(self.steps / self.slot_steps)

    @property
    def whole_steps(self) -> int:
        """`steps` rounded up to whole slots."""
        return self.slots * self.slot_steps

    def piece_of(self, slot: int) -> int:
        """Slot t serves piece t mod P."""
        return slot % self.fragments

    def next_slot_of(self, piece: int, after: int) -> int:
        """First slot above `after` that serves `piece`."""
        return after + 1 + (piece - after - 1) % self.fragments

    def quorum_of(self, ready: int) -> int:
        """K_eff = max(1, min(K, ready)); the default K is half of the ready, rounded up (R3)."""
        if self.locked:
            return max(1, ready)
        wanted = self.quorum if self.quorum else (ready + 1) // 2
        return max(1, min(wanted, ready))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for run.toml, the tape and the wire."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunConfig:
        """The inverse of `to_dict`; ConfigError names an unknown or ill-typed key."""
        known = {field.name: field for field in fields(cls)}
        kinds: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "float": (int, float)}
        for name, value in values.items():
            if name not in known:
                raise ConfigError(f"setting {name!r} is unknown to this version of Atoll")
            if not isinstance(value, kinds[str(known[name].type)]) or isinstance(value, bool):
                raise ConfigError(f"setting {name}={value!r} must be of type {known[name].type}")
        missing = [n for n in ("run_id", "steps", "fragments", "interval") if n not in values]
        if missing:
            raise ConfigError(f"setting {missing[0]!r} is missing")
        return cls(**values)
