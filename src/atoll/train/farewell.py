"""What a script is told at its learner's end: how much of its work is not merged, and what to do another time."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from atoll.core.ledger import LearnerBook
from atoll.core.remarks import SAID_SHARE

_log = logging.getLogger("atoll")


def pending_tokens(sizes: Sequence[int], book: LearnerBook) -> float:
    """Computed and without a fate: a mean over the pieces, by their sizes in values."""
    return _mean(sizes, [piece.pending for piece in book.pieces])


def warn_of_leaving(name: str, sizes: Sequence[int], book: LearnerBook, progress: float, reason: str) -> None:
    """Of a learner that leaves before the run is over. reason: empty, where its loop has simply ended."""
    if not book.tokens or reason.startswith("diverged"):  # that is an error, which says enough
        return
    pending = pending_tokens(sizes, book)
    _log.warning(
        "learner %s leaves at %.0f%% of the run: %.0f%% of its work (%.0f of %d tokens) is not merged, and lost but "
        "for what the syncer has of it already%s",
        name,
        100 * progress,
        100 * pending / book.tokens,
        pending,
        book.tokens,
        "" if reason else "; to take part to the end, go over the data again until step() is False",
    )


def warn_at_the_end(name: str, sizes: Sequence[int], book: LearnerBook) -> None:
    """Of a learner that stayed to the end, where more of its work is not merged than the end of any run leaves."""
    lost = _mean(sizes, [piece.lost for piece in book.pieces])
    if lost > SAID_SHARE * book.tokens:
        _log.warning(
            "the run is over, and %.1f%% of the work of learner %s (%.0f of %d tokens) is not merged: it was refused, "
            "or not in when the run ended",
            100 * lost / book.tokens,
            name,
            lost,
            book.tokens,
        )


def _mean(sizes: Sequence[int], tokens: Sequence[int]) -> float:
    return sum(size * count for size, count in zip(sizes, tokens, strict=True)) / sum(sizes)
