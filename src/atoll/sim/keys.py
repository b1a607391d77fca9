"""Keys of a scenario file: to which field each belongs, what it takes, and how its values are read and written.

Times are in milliseconds and exact: a file is read with decimals, so `at_ms = 1234.000001` is 1,234,000,001 ns and is
written back as it was. Parts of a nanosecond are cut off.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from math import inf, isfinite
from typing import Any

from atoll.errors import ConfigError, literal, shown
from atoll.sim.plan import FAULTS, MS, WHENS

TIME_MS_MAX = 10**12
"""Some 31 years."""
WHOLE_MAX = 2**63 - 1
TAKES = {
    "ms": "milliseconds",
    "whole": "a whole number",
    "number": "a finite number",
    "rate": "a finite number",
    "text": "text in quotes",
    "flag": "true or false",
}


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a table. `field`: of the dataclass that the table becomes; empty: of none."""

    name: str
    field: str
    takes: str
    text: str
    low: float = 0
    high: float = inf
    high_is_out: bool = False
    needed: bool = False

    def read(self, value: Any, where: str) -> Any:
        """The field's value. ConfigError names `where`, the key, the value and what it must be."""
        if not self._fits(value):
            raise ConfigError(f"{where}: {self.name}={shown(value)} must be {TAKES[self.takes]}")
        if self.takes in ("text", "flag"):
            return value
        high = min(self.high, TIME_MS_MAX if self.takes == "ms" else self.high, WHOLE_MAX if self._whole else inf)
        if value < self.low or value > high or (self.high_is_out and value == high):
            raise ConfigError(f"{where}: {self.name}={shown(value)} must be {self._range(high)}")
        if self.takes == "rate" and 0 < value < 1:
            raise ConfigError(f"{where}: {self.name}={shown(value)} must be 0 (no limit) or at least 1")
        if self.takes == "ms":
            return int(value * MS)
        return value if self._whole else float(value)

    @property
    def _whole(self) -> bool:
        return self.takes == "whole"

    def _fits(self, value: Any) -> bool:
        if self.takes == "flag":
            return isinstance(value, bool)
        if self.takes == "text":
            return isinstance(value, str)
        if isinstance(value, bool) or not isinstance(value, int | Decimal):
            return False
        return isinstance(value, int) or (not self._whole and value.is_finite() and isfinite(float(value)))

    def _range(self, high: float) -> str:
        least = f"{self.low:.6f}".rstrip("0").rstrip(".")
        if high == inf:
            return f"{least} or more"
        limit = f"{high:g}" if high < TIME_MS_MAX else f"{int(high)}"
        return f"at least {least} and {'below' if self.high_is_out else 'at most'} {limit}"

    def write(self, value: Any) -> str:
        """`value` of the field as it stands in a file."""
        if self.takes == "ms":
            return milliseconds(value)
        return literal(value)


def milliseconds(time_ns: int) -> str:
    """Exact, without zeros at the end."""
    whole, rest = divmod(time_ns, MS)
    return f"{whole}.{rest:06d}".rstrip("0") if rest else str(whole)


TOP = (
    Key("seed", "seed", "whole", "of all chance within the run: jitter, which contributions are bad"),
    Key("piece_values", "piece_values", "whole", "values in a fragment; 2 bytes each on the wire with bf16", low=1),
    Key("lossy", "lossy", "flag", "what is in flight when a control connection breaks is lost"),
    Key("linger_ms", "linger_ns", "ms", "the syncer notices a broken connection so much later than the learner"),
    Key("norms_rise", "norms_rise", "number", "in the second half norms are so many times as large; 0: they stay"),
    Key("bad_share", "bad_share", "number", "share of contributions that arrive damaged, not finite or huge", high=1),
    Key("merge_ms", "merge_ns", "ms", "a merge takes so long, and checking a contribution half of it"),
    Key("commit_ms", "commit_ns", "ms", "a commit takes so long"),
    Key("learners_max", "learners_max", "whole", "lives that the syncer keeps; 0: its default"),
    Key("heal_at_ms", "heal_at_ns", "ms", "from then on nothing breaks and somebody is kept alive; 0: never heals"),
    Key("limit_ms", "limit_ns", "ms", "a run that is not over by then makes no progress", low=1),
)

LEARNER = (
    Key("name", "name", "text", "its name; left out: l0, l1, ... With `count` it is the first part: fast0, fast1, ..."),
    Key("count", "", "whole", "so many learners made alike", low=1, high=4096),
    Key("step_ms", "step_ns", "ms", "length of a training step", low=0.000_001),
    Key("jitter", "jitter", "number", "share of a step, uniform to both sides", high=1, high_is_out=True),
    Key("tail", "tail", "number", "share of steps that take 8 times as long", high=1),
    Key("tokens", "tokens", "whole", "per step; its weight in a merge", low=1),
    Key("latency_ms", "latency_ns", "ms", "of its link, one way"),
    Key("up_bytes_per_s", "up_bytes_per_s", "rate", "rate of its link to the syncer; 0: no limit"),
    Key("down_bytes_per_s", "down_bytes_per_s", "rate", "rate of its link from the syncer; 0: no limit"),
    Key("site", "site", "text", "name of the [[site]] whose link it shares"),
    Key("joins_at_ms", "joins_at_ns", "ms", "it starts then"),
)

SITE = (
    Key("name", "name", "text", "what learners call it", needed=True),
    Key("up_bytes_per_s", "up_bytes_per_s", "rate", "shared by its learners, to the syncer; 0: no limit"),
    Key("down_bytes_per_s", "down_bytes_per_s", "rate", "shared by its learners, from the syncer; 0: no limit"),
)

FAULT = (
    Key("kind", "kind", "text", f"what goes wrong, one of {', '.join(FAULTS)}", needed=True),
    Key("at_ms", "at_ns", "ms", "when it strikes, from the start of the run", needed=True),
    Key("for_ms", "for_ns", "ms", "for how long"),
    Key("learner", "learner", "text", "whom it strikes; faults of the syncer name nobody"),
    Key("factor", "factor", "number", "how much slower or thinner", low=1),
    Key("when", "when", "text", f"strikes when, from at_ms on, a slot or the run is first {', '.join(WHENS)}"),
)

LASTING = frozenset(FAULTS) - {"crash", "terminate", "join", "same name", "stranger", "rogue", "stop"}
"""Faults that do nothing without for_ms."""
