"""What a script is told at its learner's end."""

from __future__ import annotations

import logging

import pytest

from atoll.core.ledger import LearnerBook
from atoll.train.farewell import warn_at_the_end, warn_of_leaving

SIZES = (30, 10)


def book_of(tokens: int, *, lost: int = 0) -> LearnerBook:
    book = LearnerBook.empty(2)
    book.step(tokens, 1.0)
    for piece in book.pieces:
        piece.local_tokens -= lost
        piece.lost += lost
    return book


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(("reason", "advised"), [("", True), ("interrupted: KeyboardInterrupt", False)])
def test_leaving__says_how_much__and_what_to_do_where_the_loop_just_ended(reason, advised, caplog) -> None:
    warn_of_leaving("a", SIZES, book_of(200, lost=50), 0.25, reason)
    (line,) = said(caplog)
    assert "leaves at 25% of the run: 75% of its work (150 of 200 tokens) is not merged" in line
    assert ("go over the data again" in line) == advised


def test_leaving__without_work_or_with_an_error__is_silent(caplog) -> None:
    warn_of_leaving("a", SIZES, LearnerBook.empty(2), 0.0, "")
    warn_of_leaving("a", SIZES, book_of(200), 0.5, "diverged: the loss of step 3 is not finite")
    assert not said(caplog)


@pytest.mark.parametrize(("lost", "told"), [(0, 0), (2, 0), (3, 1)])
def test_the_end__is_told_where_more_than_a_hundredth_is_not_merged(lost, told, caplog) -> None:
    warn_at_the_end("a", SIZES, book_of(200, lost=lost))
    assert len(said(caplog)) == told
