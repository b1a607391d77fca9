"""What joining costs: 2 learners on 2 cores, P=8, joined against bare loops in alternating windows of one run.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --model small --pairs 12 --window-s 20 --steps 48

Both loops are the same training step on the same kind of data in the same two processes; the joined one calls
learner.step. While one kind runs, the other stands still. Ratio of a pair: joined tokens/s over bare tokens/s of the
whole machine. Then one undisturbed joined run gives yield, participation and blocked time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from common import ROOT, circumstances, median_interval, write

import atoll
from atoll.recipes.data import batches, load_corpus
from atoll.recipes.loop import PRESETS, make_optimizer, train_step
from atoll.recipes.model import build_model

LEARNERS = 2
GOALS = {"tiny": 0.97, "small": 0.98}
"""Tokens per second of the joined loop over those of the bare one."""
FRAGMENTS, INTERVAL = 8, 24


class Loop:
    """One training loop: `step` trains once. `learner` None: bare."""

    def __init__(self, model: str, index: int, learner_address: str | None) -> None:
        preset = PRESETS[model]
        self.tokens = preset.batch * preset.length
        self.model = build_model(model, 0)
        self.optimizer = make_optimizer(self.model, lr=preset.lr, weight_decay=0.1)
        self.data: Iterator[Any] = batches(
            load_corpus("stdlib"),
            learner_index=index,
            learners=LEARNERS,
            seed=0,
            name=f"l{index}",
            generation=1,
            batch=preset.batch,
            length=preset.length,
        )
        self.learner = None
        if learner_address is not None:
            self.learner = atoll.join(self.model, self.optimizer, address=learner_address, name=f"l{index}")

    def step(self) -> None:
        inputs, targets = next(self.data)
        loss = train_step(self.model, self.optimizer, inputs, targets, clip=1.0, who="benchmark")
        if self.learner is not None and not self.learner.step(tokens=self.tokens, loss=loss):
            raise SystemExit("the run ended before the benchmark did")

    def window(self, seconds: float) -> dict[str, float]:
        """Train for so long; tokens per second, and what step() and the agent took of it."""
        before, steps, started = self.costs(), 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            self.step()
            steps += 1
        elapsed = time.perf_counter() - started
        after = self.costs()
        spent = {name: after[name] - before[name] for name in after}
        return {"tokens_per_s": steps * self.tokens / elapsed, "steps": steps, "elapsed_s": elapsed, **spent}

    def costs(self) -> dict[str, float]:
        """Seconds inside step() and of the agent's CPU so far."""
        if self.learner is None:
            return {}
        agent = next(p for p in psutil.Process().children() if "atoll.runtime.agent_main" in " ".join(p.cmdline()))
        times = agent.cpu_times()
        return {"step_s": self.learner.timings["step"] / 1e9, "agent_s": times.user + times.system}


def worker(model: str, index: int, address: str, pipe: Any) -> None:
    """One process with both loops; does the windows that it is told to."""
    os.sched_setaffinity(0, {index % (os.cpu_count() or 1)})
    torch.set_num_threads(1)
    joined, bare = Loop(model, index, address), Loop(model, index, None)
    assert joined.learner is not None
    for loop in (joined, bare):
        loop.window(1.0)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        kind, seconds = order
        pipe.send((joined if kind == "joined" else bare).window(seconds))
    timings = joined.learner.timings
    joined.learner.close()
    pipe.send(timings)


def start_syncer(run: Path, steps: int) -> tuple[subprocess.Popen[bytes], str]:
    """A syncer process and its address."""
    command = [sys.executable, "-m", "atoll", "syncer", "--run", str(run), "--listen", "127.0.0.1:0"]
    command += ["--steps", str(steps), "--min-ready", str(LEARNERS), "--fragments", str(FRAGMENTS)]
    command += ["--interval", str(INTERVAL)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT)
    assert process.stdout is not None
    for line in process.stdout:
        words = line.decode().split()
        if "--address" in words:
            return process, words[words.index("--address") + 1]
    raise SystemExit("the syncer did not start")


def alternate(model: str, pairs: int, window_s: float) -> dict[str, Any]:
    """The pairs, and the costs of all joined windows."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        syncer, address = start_syncer(run, steps=10**7)
        context = mp.get_context("spawn")
        pipes, workers = [], []
        for index in range(LEARNERS):
            ours, theirs = context.Pipe()
            process = context.Process(target=worker, args=(model, index, address, theirs))
            process.start()
            pipes.append(ours)
            workers.append(process)
        for pipe in pipes:
            assert pipe.recv() == "ready"
        syncer_cpu, rows = 0.0, []
        for pair in range(pairs):
            row: dict[str, Any] = {}
            for kind in ("bare", "joined") if pair % 2 else ("joined", "bare"):
                before = sum(psutil.Process(syncer.pid).cpu_times()[:2])
                for pipe in pipes:
                    pipe.send((kind, window_s))
                row[kind] = [pipe.recv() for pipe in pipes]
                if kind == "joined":
                    syncer_cpu += sum(psutil.Process(syncer.pid).cpu_times()[:2]) - before
            row["ratio"] = rate(row["joined"]) / rate(row["bare"])
            rows.append(row)
            print(f"pair {pair + 1}/{pairs}: joined {rate(row['joined']):.0f} bare {rate(row['bare']):.0f} "
                  f"tokens/s, ratio {row['ratio']:.4f}", flush=True)  # fmt: skip
        for pipe in pipes:
            pipe.send(None)
        timings = [pipe.recv() for pipe in pipes]
        for process in workers:
            process.join()
        syncer.terminate()
        syncer.wait()
        slots = (run / "tape.jsonl").read_text().count('"kind":"closedline"')
    return figures(rows, timings, syncer_cpu, slots)


def rate(windows: list[dict[str, float]]) -> float:
    """Tokens per second of the whole machine."""
    return sum(w["tokens_per_s"] for w in windows)


def figures(rows: list[dict[str, Any]], timings: list[dict[str, int]], syncer_cpu: float, slots: int) -> dict[str, Any]:
    joined = [w for row in rows for w in row["joined"]]
    elapsed = sum(w["elapsed_s"] for w in joined)
    steps = sum(w["steps"] for w in joined)
    median, low, high = median_interval([row["ratio"] for row in rows])
    waits = {cause: sum(t.get(cause, 0) for t in timings) / 1e9 for cause in ("lock", "finish")}
    return {
        "pairs": len(rows),
        "joined_over_bare": {"median": median, "low95": low, "high95": high},
        "client_share": (sum(w["step_s"] for w in joined) + sum(w["agent_s"] for w in joined)) / elapsed,
        "inside_step_share": sum(w["step_s"] for w in joined) / elapsed,
        "agent_cpu_share": sum(w["agent_s"] for w in joined) / elapsed,
        "inside_step_ms": sum(w["step_s"] for w in joined) / steps * 1e3,
        "agent_cpu_ms_per_step": sum(w["agent_s"] for w in joined) / steps * 1e3,
        "train_step_ms": elapsed / steps * 1e3,
        "step_max_ms": max(t["step_max"] for t in timings) / 1e6,
        "blocked_s": waits,
        "syncer_cpu_ms_per_slot": syncer_cpu / max(slots, 1) * 1e3,
    }


def undisturbed(model: str, steps: int) -> dict[str, Any]:
    """A joined run from start to finish."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        command = [sys.executable, "-m", "atoll", "train", "--learners", str(LEARNERS), "--model", model, "--quiet"]
        command += ["--steps", str(steps), "--run", str(run), "--fragments", str(FRAGMENTS), "--eval-every", "0"]
        subprocess.run(command, check=True, cwd=ROOT)
        summary = json.loads((run / "summary.json").read_text())
    names = ("yield", "participation", "blocked_s", "step_max_s", "tokens_per_s", "eval_loss", "steps")
    return {name: summary[name] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=GOALS, default="tiny")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--window-s", type=float, default=12.0)
    parser.add_argument("--steps", type=int, default=600, help="of the undisturbed run")
    args = parser.parse_args()
    result = alternate(args.model, args.pairs, args.window_s)
    result["undisturbed"] = undisturbed(args.model, args.steps)
    goals = {
        f"joined_over_bare >= {GOALS[args.model]}": result["joined_over_bare"]["median"] >= GOALS[args.model],
        "client_share <= 0.02": result["client_share"] <= 0.02,
        "yield >= 0.97": result["undisturbed"]["yield"] >= 0.97,
        "participation >= 0.95": result["undisturbed"]["participation"]["mean"] >= 0.95,
    }
    write(f"overhead-{args.model}", {**circumstances(), "model": args.model, **result, "goals": goals})


if __name__ == "__main__":
    main()
