"""`make demo`: four learners, one at half speed, one killed in mid-run and back; then the summary and a sample.

Runs `atoll train` as a user would and kills with a signal that cannot be caught. About two minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

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


def clear(run: Path) -> bool:
    """Make room: only an earlier run is deleted. False where something else is there."""
    if not os.path.lexists(run):
        return True
    if run.is_symlink() or not all((run / name).is_file() for name in ("run.toml", "tape.jsonl")):
        return False
    shutil.rmtree(run)
    return True


def main(run: Path) -> int:
    """0 when the run finished and there is a sample; 2 where `run` is in use for something else."""
    if not clear(run):
        print(f"demo: {str(run)!r} is there and holds no run of Atoll; give another directory", file=sys.stderr)
        return EXIT_BAD_INPUT
    atoll = [sys.executable, "-m", "atoll"]
    options = ["--learners", "4", "--steps", str(STEPS), "--slow", "l4=2", "--keep-contributions", "--run", str(run)]
    started = time.monotonic()
    print("--- demo: this takes about two minutes", flush=True)
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
    parser = argparse.ArgumentParser(description="Four learners, one slow, one killed and back. About two minutes.")
    parser.add_argument(
        "run", nargs="?", type=Path, default=Path("runs/demo"), help="directory of the run; an earlier run is replaced"
    )
    sys.exit(main(parser.parse_args().run))
