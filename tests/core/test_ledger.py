from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from atoll.core.ledger import LearnerBook, LifeAccount
from atoll.core.messages import Counters

PIECES = 3


class Books(RuleBasedStateMachine):
    """Any legal history: every token-piece has exactly one fate at every moment (R8)."""

    def __init__(self) -> None:
        super().__init__()
        self.book = LearnerBook.empty(PIECES)
        self.theta = [0] * PIECES
        self.sent = [0] * PIECES

    @rule(tokens=st.integers(1, 10**6))
    def step(self, tokens: int) -> None:
        self.book.step(tokens, 1.0)
        self.theta = [r + tokens for r in self.theta]

    @rule(piece=st.integers(0, PIECES - 1))
    def capture(self, piece: int) -> None:
        book = self.book.pieces[piece]
        if book.in_flight_steps or not book.local_steps:
            return
        _, tokens = book.capture()
        assert tokens == self.theta[piece], "what is sent is what theta holds"
        self.sent[piece] = tokens

    @rule(piece=st.integers(0, PIECES - 1), overwrite=st.booleans(), contains=st.booleans())
    def take(self, piece: int, overwrite: bool, contains: bool) -> None:
        book = self.book.pieces[piece]
        contains = contains and book.in_flight_steps > 0
        detached = book.detached
        book.take(contains_in_flight=contains, overwrite=overwrite)
        if overwrite:
            self.theta[piece] = 0
        elif contains and not detached:
            self.theta[piece] -= self.sent[piece]

    @precondition(lambda self: any(b.in_flight_steps for b in self.book.pieces))
    @rule(refused=st.booleans())
    def fate(self, refused: bool) -> None:
        piece = next(i for i, b in enumerate(self.book.pieces) if b.in_flight_steps)
        book = self.book.pieces[piece]
        if not refused:
            book.missed()
        elif book.refused():
            self.theta[piece] = 0

    @invariant()
    def everything_has_one_fate(self) -> None:
        self.book.check()

    @invariant()
    def theta_holds_what_is_pending(self) -> None:
        for piece, book in enumerate(self.book.pieces):
            held = book.local_tokens + (0 if book.detached else book.in_flight_tokens)
            assert self.theta[piece] == held


TestBooks = Books.TestCase


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_the_syncer_takes_only_counters_that_grow(rows: list[tuple[int, int]]) -> None:
    account = LifeAccount.empty(1)
    for tokens, overwritten in rows:
        before = account.heard
        ok = not account.hear(Counters(tokens, tokens, 0.0, (overwritten,), (0,)))
        grows = tokens >= before.tokens and overwritten >= before.overwritten[0]
        assert ok == (grows and overwritten <= tokens)
        assert account.heard == (Counters(tokens, tokens, 0.0, (overwritten,), (0,)) if ok else before)


def test_counters_of_another_shape_are_refused() -> None:
    assert LifeAccount.empty(2).hear(Counters(1, 1, 0.0, (0,), (0,)))


@given(*[st.integers(0, 300)] * 4)
def test_counters_that_do_not_add_up_are_refused(tokens: int, merged: int, overwritten: int, lost: int) -> None:
    account = LifeAccount.empty(1)
    account.merged[0] = merged
    taken = not account.hear(Counters(1, tokens, 0.0, (overwritten,), (lost,)))
    assert taken == (merged + overwritten + lost <= tokens)
    if taken:
        assert account.room(0) == tokens - merged - overwritten - lost
        assert min(account.lost_at_end()) >= 0


def test_a_learner_that_leaves_may_count_as_lost_what_was_merged_meanwhile() -> None:
    account = LifeAccount.empty(1)
    account.merged[0] = 100
    assert not account.hear(Counters(1, 100, 0.0, (0,), (100,)), leaving=True)
    assert account.hear(Counters(1, 100, 0.0, (100,), (100,)), leaving=True)
