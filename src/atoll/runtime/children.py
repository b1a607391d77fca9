"""How a Python process of ours is started: what lies in the user's folders must not stand in for the standard library.

`python -m` puts the working folder first on the path of the child, and PYTHONPATH comes before the standard library
too: a `queue.py` or `token.py` of the user would be imported by asyncio. Here the standard library comes first, then
what the environment names, and the folder of this very atoll comes last.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import atoll

_BOOT = (
    "import sys; standard = sys.argv[1].split(sys.argv[2]); sys.path.sort(key=lambda p: p not in standard); "
    "sys.path += [p for p in sys.argv[3:4] if p not in sys.path]; del sys.argv[1:4]; "
    "import runpy; runpy.run_module(sys.argv[1], run_name='__main__', alter_sys=False)"
)


def python_command(module: str, *words: str) -> list[str]:
    """The command that runs `module` as a child; it finds `words` in sys.argv[2:], the module's name before them."""
    root = str(Path(atoll.__file__).resolve().parent.parent)
    return [sys.executable, "-P", "-c", _BOOT, os.pathsep.join(_standard_library()), os.pathsep, root, module, *words]


def _standard_library() -> Sequence[str]:
    """The entries of sys.path that hold it."""
    homes = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    packed = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    inside = {os.path.join(home, "lib-dynload") for home in homes}
    beside = {os.path.join(os.path.dirname(home), packed) for home in homes}
    return sorted(homes | inside | beside)


KEPT = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGCHLD, signal.SIGABRT, signal.SIGPIPE}
"""What cannot be caught, must do its work, or says that this very process is at fault; SIGPIPE Python ignores."""
FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS}


def others_signals() -> set[int]:
    """Signals that go to a whole group or terminal, and are the business of the process that a user started."""
    return {int(number) for number in signal.valid_signals() - KEPT - FAULTS}


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """A child that is started here gets none of them before it says that it ignores them (`ignore_signals`)."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, others_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """In a child: what is sent to the whole group ends its parent or not, and that decides."""
    for number in others_signals():
        # The C library keeps some real-time signals to itself.
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, others_signals())
