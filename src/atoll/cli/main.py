"""`atoll COMMAND ...`: finds the command, and turns what goes wrong into one line and an exit status.

Exit status: 0 done, 1 the run failed, 2 bad input (one line says what and how to mend it), 3 a learner diverged,
130 interrupted.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from atoll import __version__
from atoll.errors import AtollError, DivergedError, RunError
from atoll.streams import settle, silence

COMMANDS = {
    "train": ("atoll.cli.train", "start a run on this machine: a syncer and its learners"),
    "syncer": ("atoll.cli.syncer", "start a syncer alone; learners join it from other terminals or machines"),
    "learner": ("atoll.cli.learner", "join a syncer with one learner"),
    "status": ("atoll.cli.status", "where a run stands: learners, the slot in progress, warnings"),
    "report": ("atoll.cli.report", "a run as one page of HTML"),
    "compare": ("atoll.cli.compare", "several runs on one page"),
    "advise": ("atoll.cli.advise", "what to change in a run, with the figure behind it"),
    "evaluate": ("atoll.cli.evaluate", "loss of a run's model on held-out text"),
    "pull": ("atoll.cli.pull", "the merged model of a run that goes on, into a file, once or regularly"),
    "sample": ("atoll.cli.sample", "text from a run's model"),
    "sim": ("atoll.cli.sim", "the core in virtual worlds: search for bugs (sim fuzz), run a scenario (sim run)"),
}
LASTING = frozenset({"train", "syncer", "learner", "pull"})
"""They have more to do than to print: whatever becomes of their output, they go on to their end."""
EXIT_BAD_INPUT = 2
EXIT_DIVERGED = 3
EXIT_INTERRUPTED = 130


def usage() -> str:
    """The text of `atoll --help`."""
    rows = "\n".join(f"  {name:<10}{text}" for name, (_, text) in COMMANDS.items())
    return (
        "usage: atoll COMMAND [OPTIONS]\n\nTrain one model on islands of compute that are far apart, unequal and "
        f"unreliable.\n\ncommands:\n{rows}\n\n`atoll COMMAND --help` lists the options of a command.\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        settle(lasting=bool(words) and words[0] in LASTING)
    try:
        code = command(words)
        sys.stdout.flush()
    except DivergedError as error:
        _tell(error)
        return EXIT_DIVERGED
    except AtollError as error:
        _tell(error)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("atoll: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        silence(sys.stdout)
        return EXIT_INTERRUPTED
    except OSError as error:  # of a path that no command thought of: too long, not readable, a link in a circle
        if error.filename is None:
            raise
        _tell(RunError(f"{error.filename}: {error.strerror}; give another path, or see to that one"))
        return EXIT_BAD_INPUT
    return code


def _tell(error: AtollError) -> None:
    """In one line, also where a path or a value in it has several."""
    print("atoll:", " ".join(str(error).splitlines()), file=sys.stderr)


def command(words: Sequence[str]) -> int:
    """Its exit status."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0 if words else EXIT_BAD_INPUT
    if words[0] in ("--version", "-V"):
        print(f"atoll {__version__}")
        return 0
    name, *rest = words
    if name not in COMMANDS:
        print(f"atoll: command {name!r} is unknown; use one of {', '.join(COMMANDS)}", file=sys.stderr)
        return EXIT_BAD_INPUT
    code: int = importlib.import_module(COMMANDS[name][0]).main(rest)
    return code


if __name__ == "__main__":
    sys.exit(main())
