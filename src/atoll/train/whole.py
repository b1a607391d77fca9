"""`step` is whole or not done: Ctrl-C waits for its end, an exception inside marks the learner broken."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from atoll.errors import RunError


class Whole:
    """While it is entered SIGINT is noted, and delivered to its own handler at the end. One thread at a time."""

    def __init__(self) -> None:
        self.noted = False
        self._handler: Any = None
        self._lock = threading.Lock()

    def __enter__(self) -> Whole:
        if not self._lock.acquire(blocking=False):
            raise RunError("step() is being called from another thread; call it from one thread, one after another")
        self.noted, self._handler = False, None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        handler, self._handler = self._handler, None
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        self._lock.release()
        if self.noted and handler is not None:
            handler(signal.SIGINT, None)
