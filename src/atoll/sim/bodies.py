"""What a learner of the virtual world trains, and what its syncer merges: stand-ins, or the real thing handed in.

The stand-in keeps r = theta - A of every piece as a number of tokens: a step adds its tokens, a capture must find
exactly the tokens that the ledger says, a rebase subtracts what was sent. The syncer's side of it counts the tokens
that are in a version; a learner that takes it must find what was committed. So weights that do not fit the delta
(hazard 5), work that is merged twice (hazard 45) and parameters that were never committed (hazard 10) show at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from atoll.core.messages import Announce, Life

if TYPE_CHECKING:
    from atoll.sim.world import World


OWN_WEIGHTS = 10**15


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

    def check_end(self) -> None:
        """AssertionError where theta is not exactly the final version."""


class Shop(Protocol):
    """The syncer's tensors."""

    def seed(self, piece: int, payload: Any) -> None:
        """Version 0 of a piece."""

    def merge(self, piece: int, payloads: list[Any], weights: list[float]) -> None:
        """Merge and stage."""

    def published(self, piece: int) -> Any:
        """What goes out of the newest version."""


class StandIn:
    """Displacements as numbers of tokens; the anchor as the number of tokens that its version contains."""

    def __init__(self, world: World, life: Life) -> None:
        pieces = world.config.fragments
        self.displacement = [OWN_WEIGHTS] * pieces
        """Before the first parameters are adopted: weights of its own, which nobody must ever see."""
        self.rounding = [False] * pieces
        """A codec rounds what is sent; what it left stays in r."""
        self.anchors: list[int | None] = [None] * pieces
        self._sent = [0] * pieces

    def step(self, tokens: int) -> None:
        assert None not in self.anchors, "a learner trained before it had all first parameters (hazard 8)"
        self.displacement = [r + tokens for r in self.displacement]

    def capture(self, announce: Announce) -> int:
        assert self.displacement[announce.piece] == announce.c_tokens, "weight does not fit the delta"
        self._sent[announce.piece] = announce.c_tokens
        self.rounding[announce.piece] = True
        return announce.c_tokens

    def capture_seed(self) -> list[Any]:
        assert set(self.displacement) <= {0, OWN_WEIGHTS}, "version 0 comes from one that has not trained"
        return [0] * len(self.displacement)

    def take(self, piece: int, payload: Any, how: str, *, subtract_sent: bool) -> None:
        self.anchors[piece] = payload
        if how in ("adopt", "overwrite"):
            self.displacement[piece] = 0
            self.rounding[piece] = False
        elif subtract_sent:
            self.displacement[piece] -= self._sent[piece]
        assert self.displacement[piece] >= 0, "work was subtracted that was not there"

    def revert(self, piece: int) -> None:
        self.displacement[piece] = 0
        self.rounding[piece] = False

    def check(self, piece: int, tokens: int, *, over: bool) -> None:
        if not over and self.anchors[piece] is not None:
            found = self.displacement[piece]
            assert found == tokens, f"theta holds {found} tokens of piece {piece}, the book says {tokens}"

    def check_end(self) -> None:
        assert not any(self.displacement), "theta is not the final version"
        assert not any(self.rounding), "rounding of the codec is left in theta"


class StandInShop:
    """Theta of a piece as the number of tokens that were merged into it."""

    def __init__(self, world: World) -> None:
        self._theta = [0] * world.config.fragments
        self._staged = [0] * world.config.fragments

    def seed(self, piece: int, payload: Any) -> None:
        assert payload == 0, "version 0 holds work already"

    def merge(self, piece: int, payloads: list[Any], weights: list[float]) -> None:
        assert all(weight > 0 for weight in weights)
        self._staged[piece] = self._theta[piece] + sum(payloads)

    def published(self, piece: int) -> int:
        self._theta[piece] = self._staged[piece]
        return self._theta[piece]
