"""`atoll syncer`: a syncer alone. It prints what to type in the other terminals."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.cli.console import Shown, console_for
from atoll.cli.parse import parse
from atoll.launch.plan import Method

EXIT_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class SyncerCommand(Shown, Method):
    """Start a syncer; learners join it with `atoll learner` or `atoll.join`. No accelerator is needed.

    ATOLL_TOKEN (or ATOLL_TOKEN_FILE) must be set, alike here and for learners, where others than this machine can
    connect. Ctrl-C ends the run early and cleanly; a second one kills.
    """

    run: Path
    """Directory of the run, new or empty."""
    listen: str = "127.0.0.1:7700"
    """HOST:PORT of the control service; port 0: any free one."""
    bulk_port: int = 0
    """Port of the bulk service; 0: any free one."""
    steps: int = 300
    """Length of the run, in steps of the learner that sets the pace: the K-th fastest, where K is the quorum."""
    min_ready: int = 1
    """Slots begin when so many learners are ready."""
    init: Path | None = None
    """A safetensors file to start from; else the first learner's weights."""
    keep_contributions: bool = False
    """Keep every contribution that is merged, for `make audit`."""


def main(argv: Sequence[str]) -> int:
    """0 when the run is over, 130 when a signal ended it early."""
    options = parse(SyncerCommand, "syncer", argv)
    # Its errors come to us as statuses; a shortage of descriptors would be a line a second beside our own.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from atoll.errors import ConfigError
    from atoll.launch.plan import check_port, check_run_dir, method_settings, new_run_id
    from atoll.wire.channel import parse_address

    if options.min_ready < 1:
        raise ConfigError(f"min_ready={options.min_ready} must be at least 1")
    host, port = parse_address(options.listen, "listen")
    settings = method_settings(
        options, steps=options.steps, learners=options.min_ready, run_id=new_run_id(), counted_as="min_ready"
    )
    if port and port == options.bulk_port:
        raise ConfigError(f"bulk_port={port} is the port of listen={options.listen!r} too; give another, or 0")
    check_run_dir(options.run)
    check_port("listen port", host, port)
    check_port("bulk_port", host, options.bulk_port)
    return serve_run(options, settings, host, port)


def serve_run(options: SyncerCommand, settings: dict[str, str | int | float], host: str, port: int) -> int:
    """Serve to the end, show lines, write summary.json."""
    from atoll.cli.closing import close_run, closing_lines
    from atoll.cli.saved import next_step
    from atoll.core.records import NoticeLine, Record
    from atoll.runtime.syncer import Listening, SyncerOptions, serve
    from atoll.wire.channel import format_address, load_token

    console = console_for(options)

    def on_listening(where: Listening) -> None:
        shown = socket.gethostname() if where.host in ("0.0.0.0", "::") else where.host
        same = ", with the same ATOLL_TOKEN" if load_token() else ""
        console.tell(f"syncer of run {where.run_id} listens at {format_address(where.host, where.port)}")
        reached = format_address(shown, where.port)
        console.tell(f"in another terminal{same}:  atoll learner --address {reached}")
        console.tell(f'or in a script of yours:  atoll.join(model, optimizer, address="{reached}")')
        if shown not in ("127.0.0.1", "::1", "localhost"):
            console.tell(f"ports {where.port} and {where.bulk_port} must be open for learners on other machines")

    def on_record(record: Record) -> None:
        if isinstance(record, NoticeLine):  # on_notice says it
            console.view.feed(record)
        else:
            console.record(record)

    with console.shown():
        code = serve(
            SyncerOptions(
                run_dir=options.run,
                settings=settings,
                host=host,
                port=port,
                bulk_port=options.bulk_port,
                init=options.init,
                keep_contributions=options.keep_contributions,
                on_listening=on_listening,
                on_record=on_record,
                on_notice=console.warn,
            )
        )
    stopped = console.view.stopped or code == EXIT_INTERRUPTED
    summary = close_run(options.run, console.view, None, 0, {"exit": "stopped by a signal" if stopped else "finished"})
    hint = next_step(options.run)
    lines = closing_lines(options.run, summary, console.view)
    console.closing([*lines, hint] if hint is not None else lines, summary)
    return EXIT_INTERRUPTED if stopped else code
