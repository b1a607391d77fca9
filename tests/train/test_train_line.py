"""What a script is told of the line to its syncer."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from atoll.core.events import Heard, StreamLost
from atoll.core.messages import Welcome
from atoll.train.line import Line

GONE = StreamLost("connection refused")
OTHER_RUN = StreamLost("it is of another run", "run")
NO_AGENT = StreamLost("the agent process was killed by signal SIGKILL", of_agent=True)
BACK = Heard(Welcome(1, 1, True, (), 0, 0, "running", ()), 0)
AWAY, REFUSED, IS_BACK, REACHED = "does not answer", "refuses this learner", "is back", "is reached again"


def told(caplog: pytest.LogCaptureFixture, items: list[Any], *, joined: bool = True) -> list[str]:
    line = Line("HOST:7700")
    line.joined = joined
    for item in items:
        line.hear(item, 0.5)
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(("items", "words"), [
    ([GONE, GONE, GONE, BACK], [AWAY, IS_BACK]),
    ([GONE, OTHER_RUN, OTHER_RUN, GONE, BACK], [AWAY, REFUSED, AWAY, IS_BACK]),
    ([NO_AGENT, BACK], [REACHED]),
    ([NO_AGENT, GONE, GONE, BACK], [AWAY, IS_BACK]),
    ([GONE, NO_AGENT, GONE, BACK], [AWAY, AWAY, IS_BACK]),
])  # fmt: skip
def test_a_line__is_told_as_it_is(items, words, caplog) -> None:
    lines = told(caplog, items)
    assert len(lines) == len(words)
    assert all(word in line for word, line in zip(words, lines, strict=True))


def test_before_join_has_returned__its_answer_says_it_all(caplog) -> None:
    assert not told(caplog, [GONE, OTHER_RUN, BACK], joined=False)
