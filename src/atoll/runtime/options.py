"""Options of a syncer process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from atoll.core.config import LEARNERS_MAX
from atoll.core.records import Record

DEFAULT_PORT = 7700


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a syncer can be reached."""

    run_id: str
    host: str
    port: int
    bulk_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncerOptions:
    """What `serve` needs. The token is not here: it comes from ATOLL_TOKEN or ATOLL_TOKEN_FILE."""

    run_dir: Path
    """Directory of the run: new, or empty."""
    settings: Mapping[str, str | int | float]
    """Fields of RunConfig. `run_id` may be missing (random), `fragments` too (largest balanced number <= interval)."""
    host: str = "127.0.0.1"
    """Address to listen on; one that others can reach needs a token."""
    port: int = DEFAULT_PORT
    """Port of the control service; 0: any free one."""
    bulk_port: int = 0
    """Port of the bulk service; 0: any free one."""
    init: Path | None = None
    """A safetensors file with version 0 (R22); else the first learner hands it in."""
    torch_threads: int = 1
    """Threads of torch for merging. Results do not depend on it (R17)."""
    keep_contributions: bool = True
    """Write every contribution that is merged to the run directory, so that merges can be replayed."""
    streams_max: int = 2 * LEARNERS_MAX
    """Control streams at once; more are refused."""
    handle_signals: bool = True
    """SIGINT and SIGTERM end the run cleanly; a second one ends the process. Needs the main thread."""
    on_listening: Callable[[Listening], None] | None = None
    """Called once the ports are open."""
    on_record: Callable[[Record], None] | None = None
    """Called with each tape record, in the event loop: it must be quick."""
    on_notice: Callable[[str], None] | None = None
    """Called with each line for people; without it they go to stderr."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """More versions for the first tape line, beside those of Atoll, Python and torch."""
