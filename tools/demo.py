"""`make demo`: four learners, one at half speed, one killed in mid-run and back; then the summary and a sample.

Runs `atoll train` as a user would and kills with a signal that cannot be caught. An earlier run is kept aside.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from atoll.store.files import is_claimed

LASTS = "2 to 3 minutes on two cores"
STEPS = 384
INTERVAL, FRAGMENTS = 24, 8
KILL_AT_SLOT = STEPS * FRAGMENTS // INTERVAL // 3
VICTIM = "l2"
PROMPT = "def read_"
POLL_S = 0.2
EXIT_BAD_INPUT = 2


def closed_slot(tape: Path) -> int:
    """The newest slot that has closed, from the run's tape."""
    try:
        lines = tape.read_text().splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        if '"kind":"closedline"' in line and line.endswith("}"):
            return int(json.loads(line)["slot"])
    return 0


def kill_when_due(run: Path, train: subprocess.Popen[bytes]) -> None:
    """SIGKILL to one learner a third into the run."""
    while train.poll() is None:
        if closed_slot(run / "tape.jsonl") >= KILL_AT_SLOT:
            pid = json.loads((run / "processes.json").read_text())[VICTIM]
            print(f"--- demo: kill -9 {VICTIM} (process {pid})", flush=True)
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(POLL_S)


def keep_aside(run: Path) -> Path | None:
    """Make room: an earlier run gets the next free name beside it. Where it went; None: nothing was there.

    DemoError where something else is there, or a run that goes on.
    """
    if not os.path.lexists(run) or (run.is_dir() and not run.is_symlink() and not any(run.iterdir())):
        return None
    if run.is_symlink() or not all((run / name).is_file() for name in ("run.toml", "tape.jsonl")):
        raise DemoError(f"{str(run)!r} is there and holds no run of Atoll; give another directory")
    if is_claimed(run / "tape.jsonl"):
        raise DemoError(f"the run in {str(run)!r} goes on; end it, or give another directory")
    number = 1
    while os.path.lexists(aside := run.with_name(f"{run.name}-{number}")):
        number += 1
    try:
        run.rename(aside)
    except OSError as error:
        raise DemoError(f"{str(run)!r} cannot be renamed ({error.strerror}); give another directory") from None
    return aside


class DemoError(Exception):
    """One line for people."""


def main(run: Path) -> int:
    """0 when the run finished and there is a sample; 2 where `run` is in use for something else."""
    try:
        aside = keep_aside(run)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    if aside is not None:
        print(f"--- demo: the earlier run of {run} is kept in {aside}", flush=True)
    atoll = [sys.executable, "-m", "atoll"]
    options = ["--learners", "4", "--steps", str(STEPS), "--slow", "l4=2", "--keep-contributions", "--run", str(run)]
    started = time.monotonic()
    print(f"--- demo: this takes {LASTS}", flush=True)
    print(f"--- demo: atoll train {' '.join(options)}", flush=True)
    train = subprocess.Popen([*atoll, "train", *options])
    try:
        kill_when_due(run, train)
        code = train.wait()
    except KeyboardInterrupt:
        code = train.wait()
    if code:
        return code
    print(f"\n--- demo: atoll sample {run} --prompt {PROMPT!r}", flush=True)
    code = subprocess.call([*atoll, "sample", str(run), "--prompt", PROMPT, "--length", "300"])
    print(f"--- demo: {time.monotonic() - started:.0f} s in all; `make audit RUN={run}` checks every merge", flush=True)
    return code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=f"Four learners, one slow, one killed and back, in {LASTS}.")
    kept = "directory of the run; an earlier run there is kept beside it"
    parser.add_argument("run", nargs="?", type=Path, default=Path("runs/demo"), help=kept)
    sys.exit(main(parser.parse_args().run))
