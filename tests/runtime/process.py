"""A syncer or a learner as a process of its own: `python -m tests.runtime.process syncer|learner OPTIONS_JSON`.

Each line on stdout is one JSON object; the tests wait for lines, never for a time.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def say(kind: str, **values: Any) -> None:
    print(json.dumps({"kind": kind, **values}), flush=True)


def syncer(run_dir: str, settings: dict[str, Any], port: int = 0) -> int:
    from atoll.runtime.syncer import SyncerOptions, serve

    options = SyncerOptions(
        run_dir=Path(run_dir),
        settings=settings,
        port=port,
        on_listening=lambda where: say("listening", port=where.port, bulk_port=where.bulk_port),
        on_notice=lambda text: say("notice", text=text),
    )
    return serve(options)


def hold_the_interpreter(seconds: float) -> None:
    """A call into C that keeps the interpreter lock, as a compiler or a collector may (hazard 43)."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def put_out(join: Any) -> None:
    """Tell the syncer counters that run backwards: it ends this life of the learner (R20)."""
    from atoll.core.events import FromLearner
    from atoll.core.messages import Counters, Report

    zeros = (0,) * len(join._pieces.sizes)
    join._client.send(FromLearner(Report(Counters(overwritten=zeros, lost=zeros))))


def learner(
    address: str,
    name: str,
    step_s: float = 0.01,
    hold_at: int = 0,
    hold_s: float = 0.0,
    workers_at: int = 0,
    name_wait_s: float = 0.0,
    syncer_wait_s: float = 3600.0,
    hung_s: float = 0.0,
    put_out_at: int = 0,
) -> int:
    import torch

    import atoll
    from atoll.errors import AtollError
    from atoll.runtime.client import _Hung
    from atoll.tensors.hashing import payload_hash

    torch.set_num_threads(1)
    torch.manual_seed(len(name))
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    join = atoll.join(
        model,
        optimizer,
        address=address,
        name=name,
        timeout_s=40.0,
        name_wait_s=name_wait_s,
        syncer_wait_s=syncer_wait_s,
    )
    if hung_s:
        join._client._hung = _Hung(hung_s)
    agent = join._client.process.pid
    say("joined", generation=join.generation, agent=agent, grpc="grpc" in sys.modules, pid=os.getpid())
    go = True
    while go:
        x = torch.randn(4, 16)
        loss = ((model(x) - 1.0) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(step_s)
        if join.steps + 1 == hold_at:
            hold_the_interpreter(hold_s)
        if join.steps + 1 == put_out_at:
            put_out_at = 0
            put_out(join)
        if join.steps + 1 == workers_at:
            loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2, num_workers=2)
            say("loaded", items=sorted(int(i) for batch in loader for i in batch))
        try:
            go = join.step(4, loss)
        except AtollError as error:
            say("failed", error=type(error).__name__, text=str(error), steps=join.steps, progress=join.progress)
            return 1
        agent, generation = join._client.process.pid, join.generation
        say("step", n=join.steps, agent=agent, generation=generation, progress=join.progress)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    cost = join.agent_cost
    say("done", steps=join.steps, hash=payload_hash(flat.numpy().tobytes()), cpu_ns=cost and cost.cpu_ns)
    return 0


if __name__ == "__main__":
    sys.exit({"syncer": syncer, "learner": learner}[sys.argv[1]](**json.loads(sys.argv[2])))
