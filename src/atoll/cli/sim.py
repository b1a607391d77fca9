"""`atoll sim fuzz | run | list`: the real core in virtual worlds, to find what no run on real machines would show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.cli import sim_fuzz, sim_run
from atoll.cli.parse import parse
from atoll.errors import ConfigError

COMMANDS = {
    "fuzz": "search random worlds, one for each seed, for broken safety and for runs that never end",
    "run": "run one scenario: a file, or one that comes with Atoll",
    "list": "the scenarios that come with Atoll",
}


@dataclass(frozen=True, kw_only=True)
class List:
    """Name the scenarios that come with Atoll, and what each is about."""


def usage() -> str:
    """The text of `atoll sim --help`."""
    rows = "\n".join(f"  {name:<6}{text}" for name, text in COMMANDS.items())
    return f"usage: atoll sim COMMAND [OPTIONS]\n\ncommands:\n{rows}\n\n`atoll sim COMMAND --help` lists its options.\n"


def main(argv: Sequence[str]) -> int:
    """The exit status of the command."""
    if argv and argv[0] in ("-h", "--help"):
        print(usage(), end="")
        return 0
    if not argv or argv[0] not in COMMANDS:
        said = repr(argv[0]) if argv else "nothing"
        raise ConfigError(f"sim has the commands {', '.join(COMMANDS)}, not {said}; try `atoll sim fuzz --seeds 100`")
    command, rest = argv[0], argv[1:]
    if command == "fuzz":
        return sim_fuzz.fuzz(parse(sim_fuzz.Fuzz, "sim fuzz", rest))
    if command == "run":
        return sim_run.run(parse(sim_run.Run, "sim run", rest))
    parse(List, "sim list", rest)
    return sim_run.list_scenarios()
