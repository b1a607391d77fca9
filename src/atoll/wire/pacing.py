"""How fast bulk goes: chunk sizes and pauses for one direction of one connection. No I/O, no clock.

A write returns when the transport has taken the chunk, that is, when the window of the link has room. Where that
takes long the link is the bottleneck: then chunks shrink until each takes about CHUNK_NS, and after each a pause of a
ninth of its time leaves 10% of the measured rate to everybody else (90% pacing). Where writes return at once, nothing
waits.
"""

from __future__ import annotations

from atoll.wire.channel import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, KIB

CHUNK_NS = 50_000_000
"""A chunk should not occupy the link for longer."""
FREE_NS = 5_000_000
"""A write that took less did not wait for the link."""
WHOLE_NS = 10 * CHUNK_NS
SHARE_PERCENT = 90


class Pacer:
    """State of one direction; lives as long as the connection, so that a new transfer begins at the known size."""

    def __init__(self) -> None:
        self.chunk_bytes = 64 * KIB

    def written(self, size_bytes: int, duration_ns: int) -> int:
        """A chunk was written in `duration_ns`; returns the pause before the next one, in ns."""
        if size_bytes >= self.chunk_bytes // 2:
            self._resize(duration_ns)
        if duration_ns < FREE_NS:
            return 0
        return duration_ns * (100 - SHARE_PERCENT) // SHARE_PERCENT

    def whole(self, duration_ns: int) -> int:
        """A transfer of one chunk, answer included, took `duration_ns`; returns the pause after it, in ns.

        Its time is the round trip as much as the link, so that only a long one says that chunks should be smaller.
        """
        if duration_ns > WHOLE_NS:
            self.chunk_bytes = max(CHUNK_BYTES_MIN, self.chunk_bytes // 2)
        return 0 if duration_ns < FREE_NS else duration_ns * (100 - SHARE_PERCENT) // SHARE_PERCENT

    def _resize(self, duration_ns: int) -> None:
        if duration_ns > CHUNK_NS:
            self.chunk_bytes = max(CHUNK_BYTES_MIN, self.chunk_bytes // 2)
        elif duration_ns < CHUNK_NS // 4:
            self.chunk_bytes = min(CHUNK_BYTES_MAX, self.chunk_bytes * 2)
