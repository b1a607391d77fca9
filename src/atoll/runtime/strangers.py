"""Lines about those who have no right to be here: said once per source and minute, kept off the tape."""

from __future__ import annotations

import time
from collections.abc import Callable

AGAIN_S = 60.0
SOURCES_MAX = 256


def source_of(peer: str) -> str:
    """The address of a gRPC peer without its port, which is another one each time."""
    return peer.rpartition(":")[0] or peer


class Strangers:
    """What was said of whom, and when; bounded, whatever the network does."""

    def __init__(self, show: Callable[[str], None], clock_s: Callable[[], float] = time.monotonic) -> None:
        self._show = show
        self._clock_s = clock_s
        self._said_s: dict[str, float] = {}
        self._untold: dict[str, int] = {}

    def say(self, peer: str, text: str, name: str = "") -> None:
        """Show it, unless this source was spoken of less than a minute ago; then count it.

        name: of one who has the token and is refused all the same; each name of a source is spoken of.
        """
        source, now_s = " ".join(filter(None, (name, source_of(peer)))), self._clock_s()
        said_s = self._said_s.get(source)
        if said_s is not None and now_s < said_s + AGAIN_S:
            self._untold[source] = self._untold.get(source, 0) + 1
            return
        if source not in self._said_s and len(self._said_s) >= SOURCES_MAX:
            self._forget(now_s)
            if len(self._said_s) >= SOURCES_MAX:
                return
        self._said_s[source] = now_s
        more = self._untold.pop(source, 0)
        self._show(text + (f" ({more} more like it from {source} since the last line)" if more else ""))

    def _forget(self, now_s: float) -> None:
        old = [source for source, at_s in self._said_s.items() if now_s >= at_s + AGAIN_S]
        for source in old:
            del self._said_s[source]
            self._untold.pop(source, None)
