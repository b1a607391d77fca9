"""What a learner of the virtual world trains, and what its syncer merges: stand-ins, or the real thing handed in.

The stand-in keeps r = theta - A of every piece as a number of tokens: a step adds its tokens, a capture must find
exactly the tokens that the ledger says, a rebase subtracts what was sent. So weights that do not fit the delta (hazard
5) or work that is merged twice (hazard 45) show at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from atoll.core.messages import Announce, Life

if TYPE_CHECKING:
    from atoll.sim.world import World


class Body(Protocol):
    """One learner's parameters."""

    def step(self, tokens: int) -> None:
        """One inner step."""

    def capture(self, announce: Announce) -> Any:
        """What is sent of a piece."""

    def capture_seed(self) -> list[Any]:
        """Version 0 of every piece."""

    def take(self, piece: int, payload: Any, how: str, *, subtract_sent: bool) -> None:
        """Take an update: adopt | overwrite | rebase."""

    def revert(self, piece: int) -> None:
        """Back to the anchor."""

    def check(self, piece: int, tokens: int, *, over: bool) -> None:
        """AssertionError where theta does not hold the work of so many tokens."""


class Shop(Protocol):
    """The syncer's tensors."""

    def seed(self, piece: int, payload: Any) -> None:
        """Version 0 of a piece."""

    def merge(self, piece: int, payloads: list[Any], weights: list[float]) -> None:
        """Merge and stage."""

    def published(self, piece: int) -> Any:
        """What goes out of the newest version."""


class StandIn:
    """Displacements as numbers of tokens."""

    def __init__(self, world: World, life: Life) -> None:
        self.displacement = [0] * world.config.fragments
        self._sent = [0] * world.config.fragments

    def step(self, tokens: int) -> None:
        self.displacement = [r + tokens for r in self.displacement]

    def capture(self, announce: Announce) -> int:
        assert self.displacement[announce.piece] == announce.c_tokens, "weight does not fit the delta"
        self._sent[announce.piece] = announce.c_tokens
        return announce.c_tokens

    def capture_seed(self) -> list[Any]:
        return [0] * len(self.displacement)

    def take(self, piece: int, payload: Any, how: str, *, subtract_sent: bool) -> None:
        if how in ("adopt", "overwrite"):
            self.displacement[piece] = 0
        elif subtract_sent:
            self.displacement[piece] -= self._sent[piece]

    def revert(self, piece: int) -> None:
        self.displacement[piece] = 0

    def check(self, piece: int, tokens: int, *, over: bool) -> None:
        assert over or self.displacement[piece] >= tokens, "theta lost work that the book still has"


class StandInShop:
    """Merges nothing."""

    def __init__(self, world: World) -> None:
        pass

    def seed(self, piece: int, payload: Any) -> None:
        pass

    def merge(self, piece: int, payloads: list[Any], weights: list[float]) -> None:
        assert all(weight > 0 for weight in weights)

    def published(self, piece: int) -> Any:
        return None
