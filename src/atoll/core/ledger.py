"""Two books of token-pieces (protocol R8): the learner's, exact and at once; the syncer's, from what it has heard.

The unit is the token-piece: one token's work on one piece. Every token-piece has one fate and

    computed = merged + overwritten + lost + pending          per piece, always
    pending  = local + in flight                              a sum of the learner's two, never a remainder
"""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.core.messages import Counters


@dataclass(slots=True)
class PieceBook:
    """The learner's book of one piece: steps and tokens by where their work is now."""

    local_steps: int = 0
    local_tokens: int = 0
    in_flight_steps: int = 0
    in_flight_tokens: int = 0
    detached: bool = False
    """An overwrite dropped from theta what is in flight; if that is missed too, it counts as overwritten."""
    merged: int = 0
    overwritten: int = 0
    lost: int = 0

    @property
    def pending(self) -> int:
        return self.local_tokens + self.in_flight_tokens

    @property
    def total(self) -> int:
        return self.pending + self.merged + self.overwritten + self.lost

    def step(self, tokens: int) -> None:
        self.local_steps += 1
        self.local_tokens += tokens

    def capture(self) -> tuple[int, int]:
        """local -> in flight; returns (c_steps, c_tokens)."""
        assert self.in_flight_steps == 0, "one contribution per piece is unsettled (R6)"
        assert self.local_steps > 0, "an empty contribution is never captured"
        self.in_flight_steps, self.in_flight_tokens = self.local_steps, self.local_tokens
        self.local_steps = self.local_tokens = 0
        self.detached = False
        return self.in_flight_steps, self.in_flight_tokens

    def take(self, *, contains_in_flight: bool, overwrite: bool) -> None:
        """An update was taken (R7)."""
        if contains_in_flight:
            assert self.in_flight_steps > 0, "an update can contain only what is in flight"
            self.merged += self.in_flight_tokens
            self._clear_in_flight()
        if overwrite:
            self.overwritten += self.local_tokens
            self.local_steps = self.local_tokens = 0
            self.detached = self.in_flight_steps > 0

    def missed(self) -> None:
        """in flight -> local, or -> overwritten if detached."""
        if self.detached:
            self.overwritten += self.in_flight_tokens
        else:
            self.local_steps += self.in_flight_steps
            self.local_tokens += self.in_flight_tokens
        self._clear_in_flight()

    def refused(self) -> bool:
        """What is in flight is lost, and with it what grew on top of it. True: theta must go back to the anchor."""
        revert = not self.detached
        self.lost += self.in_flight_tokens
        self._clear_in_flight()
        if revert:
            self.lost += self.local_tokens
            self.local_steps = self.local_tokens = 0
        return revert

    def end(self) -> None:
        """The life ends: whatever is pending is lost."""
        self.lost += self.pending
        self.local_steps = self.local_tokens = 0
        self._clear_in_flight()

    def _clear_in_flight(self) -> None:
        self.in_flight_steps = self.in_flight_tokens = 0
        self.detached = False


@dataclass(slots=True)
class LearnerBook:
    """A learner's own counters, per piece and in all."""

    pieces: list[PieceBook]
    steps: int = 0
    tokens: int = 0
    loss_sum: float = 0.0

    @classmethod
    def empty(cls, pieces: int) -> LearnerBook:
        return cls([PieceBook() for _ in range(pieces)])

    def step(self, tokens: int, loss: float) -> None:
        self.steps += 1
        self.tokens += tokens
        self.loss_sum += tokens * loss
        for book in self.pieces:
            book.step(tokens)

    def counters(self) -> Counters:
        """The cumulative counters that travel with reports and contributions."""
        return Counters(
            self.steps,
            self.tokens,
            self.loss_sum,
            tuple(book.overwritten for book in self.pieces),
            tuple(book.lost for book in self.pieces),
        )

    def check(self) -> None:
        """Assert that every token-piece has one fate."""
        for index, book in enumerate(self.pieces):
            assert book.total == self.tokens, f"piece {index}: {book} does not add up to {self.tokens}"


@dataclass(slots=True)
class LifeAccount:
    """The syncer's book of one life. `heard` is monotone: the newest cumulative counters."""

    heard: Counters
    merged: list[int] = field(default_factory=list)

    @classmethod
    def empty(cls, pieces: int) -> LifeAccount:
        zeros = (0,) * pieces
        return cls(Counters(overwritten=zeros, lost=zeros), [0] * pieces)

    def hear(self, counters: Counters, *, leaving: bool = False) -> str:
        """Take newer counters; else no change, and why not: they run backwards, or do not add up.

        leaving: a learner that leaves books as lost what it has in flight, and of that some may be merged here.
        """
        old = self.heard
        if len(counters.overwritten) != len(self.merged) or len(counters.lost) != len(self.merged):
            return "its cumulative counters are not those of this run"
        monotone = counters.steps >= old.steps and counters.tokens >= old.tokens
        monotone = monotone and all(map(int.__ge__, counters.overwritten, old.overwritten))
        monotone = monotone and all(map(int.__ge__, counters.lost, old.lost))
        if not monotone:
            return "its cumulative counters ran backwards"
        for piece, (merged, gone, lost) in enumerate(
            zip(self.merged, counters.overwritten, counters.lost, strict=True)
        ):
            if max(gone + lost, gone + merged, 0 if leaving else gone + lost + merged) > counters.tokens:
                return (
                    f"of {counters.tokens} tokens on fragment {piece} it says that {gone} were overwritten and {lost} "
                    f"lost, with {merged} merged"
                )
        self.heard = counters
        return ""

    def room(self, piece: int) -> int:
        """Tokens on a piece that have no fate yet: no contribution can bring more."""
        heard = self.heard
        return heard.tokens - self.merged[piece] - heard.overwritten[piece] - heard.lost[piece]

    def lost_at_end(self) -> tuple[int, ...]:
        """Per piece: what the end of this life loses, so that computed = merged + overwritten + lost.

        Overwritten is only known as far as it was heard; a learner that died may have overwritten more, which then
        counts as lost.
        """
        return tuple(
            self.heard.tokens - merged - overwritten
            for merged, overwritten in zip(self.merged, self.heard.overwritten, strict=True)
        )
