"""A process that a launcher starts (runtime.children) with PARENT_PID SPEC, SPEC as JSON.

It dies with its parent, keeps to its cores, and says how it ended by its exit status.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from atoll.errors import AtollError, DivergedError, RunOverError
from atoll.launch.cores import pin
from atoll.streams import settle

ENDED_OK = 0
ENDED_WRONG = 2
ENDED_DIVERGED = 3
ENDED_RANK_LOST = 4
ENDED_INTERRUPTED = 130
PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """SIGKILL when the process that started this one is gone: what is durable is on disk already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def run_syncer(spec: dict[str, Any]) -> int:
    """Serve one run; tells its ports in `listening`, a JSON file."""
    from atoll.runtime.syncer import Listening, SyncerOptions, serve
    from atoll.store.files import write_atomic

    def tell(where: Listening) -> None:
        found = {"host": where.host, "port": where.port, "bulk_port": where.bulk_port, "run_id": where.run_id}
        write_atomic(Path(spec["listening"]), json.dumps(found).encode() + b"\n", sync=False)

    return serve(
        SyncerOptions(
            run_dir=Path(spec["run_dir"]),
            settings=spec["settings"],
            host=spec["host"],
            port=spec["port"],
            init=Path(spec["init"]) if spec["init"] else None,
            keep_contributions=spec["keep_contributions"],
            on_listening=tell,
        )
    )


def run_learner(spec: dict[str, Any]) -> int:
    """Train one life of a learner. A run that is over already is no error."""
    from atoll.recipes.loop import TrainConfig, train

    pin(tuple(spec["cores"]))
    train_spec = dict(spec["train"])
    train_spec["run_dir"], train_spec["data"] = Path(train_spec["run_dir"]), tuple(train_spec["data"])
    try:
        result = train(TrainConfig(**train_spec), **spec["join"])
    except RunOverError as error:
        print(f"atoll: {error}", file=sys.stderr)
        return ENDED_OK
    print(f"{result.steps} steps, {result.tokens} tokens, last loss {result.loss:.4f}", flush=True)
    return ENDED_OK


def evaluator(spec: dict[str, Any]) -> int:
    """Watch the merged model of one run."""
    from atoll.launch.evaluator import run_evaluator

    return run_evaluator(spec)


def run_rank(spec: dict[str, Any]) -> int:
    """One rank of mode=data-parallel. A signal asks it to stop; the others hear of it in the next all-reduce."""
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda heard, frame: asked.append(heard))
    from atoll.recipes.loop import TrainConfig
    from atoll.recipes.parallel import RankLostError, train_parallel

    train_spec = dict(spec["train"])
    train_spec["run_dir"], train_spec["data"] = Path(train_spec["run_dir"]), tuple(train_spec["data"])
    try:
        result = train_parallel(
            TrainConfig(**train_spec),
            steps=spec["steps"],
            rendezvous=Path(spec["rendezvous"]),
            run_id=spec["run_id"],
            init=Path(spec["init"]) if spec["init"] else None,
            stopping=lambda: bool(asked),
        )
    except RankLostError as error:
        print(f"atoll: {error}", file=sys.stderr)
        return ENDED_RANK_LOST
    print(f"{result.steps} steps, {result.tokens} tokens, last loss {result.loss:.4f}", flush=True)
    return ENDED_OK if result.steps == spec["steps"] else ENDED_INTERRUPTED


ROLES = {"syncer": run_syncer, "learner": run_learner, "rank": run_rank, "evaluator": evaluator}


def main(argv: list[str]) -> int:
    """The exit status: 0 as it should, 2 an error for people, 3 diverged, 4 another rank was lost, 130 interrupted."""
    settle(lasting=True)
    die_with_parent(int(argv[2]))
    spec = json.loads(argv[3])
    pin(tuple(spec.get("cores", ())))
    try:
        return ROLES[spec["role"]](spec)
    except DivergedError as error:
        print(f"atoll: {error}", file=sys.stderr)
        return ENDED_DIVERGED
    except AtollError as error:
        print(f"atoll: {error}", file=sys.stderr)
        return ENDED_WRONG
    except KeyboardInterrupt:
        return ENDED_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv))
