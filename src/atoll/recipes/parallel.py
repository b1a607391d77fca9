"""The SPMD baseline: the recipe's loop with the mean gradient of all ranks in each step, by torch.distributed (gloo).

Data order, schedule, clipping, seed and model are those of the learner of the same name in a decoupled run.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll.core.layout import make_layout
from atoll.core.messages import Version
from atoll.errors import AtollError, RunError
from atoll.recipes.data import check_corpus, load_corpus
from atoll.recipes.loop import (
    TrainConfig,
    TrainResult,
    optimizer_of,
    own_batches,
    set_rate,
    train_step,
)
from atoll.recipes.model import build_model
from atoll.recipes.schedule import rate_factor
from atoll.store.files import END_WAIT_S, insist
from atoll.store.model import export_model, load_pieces
from atoll.store.steps import StepLog, step_log_path
from atoll.tensors.flat import gather, scatter_
from atoll.tensors.names import parameters_by_name, specs_of

ANSWER_WAIT_S = 600
"""A rank that is silent for longer in the middle of a step is given up by the others."""


_logger = logging.getLogger("atoll")


class RankLostError(AtollError):
    """Another rank went away in the middle of a step."""


class MeanGradient:
    """All gradients in one flat tensor with the loss and the wish to stop, so that a step costs one all-reduce."""

    def __init__(self, model: nn.Module, stopping: Callable[[], bool]) -> None:
        self._parameters = list(parameters_by_name(model).values())
        self._flat = torch.zeros(sum(p.numel() for p in self._parameters) + 2)
        self._stopping = stopping
        self.stopped = False
        """Some rank wished to stop, and all know."""
        self.waited_ns = 0
        """In the newest all-reduce, with the wait for slower ranks."""

    def __call__(self, loss: float) -> float:
        """Gradients become their means over ranks; the mean loss."""
        self._flat[-2], self._flat[-1] = loss, float(self._stopping())
        for parameter, part in self._parts():
            part.copy_(parameter.grad) if parameter.grad is not None else part.zero_()
        started_ns = time.monotonic_ns()
        try:
            dist.all_reduce(self._flat)
        except RuntimeError as error:
            raise RankLostError(f"another rank went away: {' '.join(str(error).split())[:200]}") from error
        self.waited_ns = time.monotonic_ns() - started_ns
        self.stopped = self._flat[-1].item() > 0
        self._flat /= dist.get_world_size()
        for parameter, part in self._parts():
            parameter.grad = part
        return self._flat[-2].item()

    def _parts(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        start = 0
        for parameter in self._parameters:
            yield parameter, self._flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()


@contextmanager
def process_group(rendezvous: Path, rank: int, ranks: int) -> Iterator[None]:
    """The ranks meet in a file; the connections are made over the interface in GLOO_SOCKET_IFNAME."""
    store = dist.FileStore(os.fspath(rendezvous), ranks)
    try:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=ANSWER_WAIT_S)
        )
    except RuntimeError as error:
        raise RankLostError(f"the ranks did not meet: {' '.join(str(error).split())[:200]}") from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def _tell_full(error: OSError) -> None:
    _logger.warning("the model cannot be written (%s); waiting up to %d s for room", error.strerror, END_WAIT_S)


def train_parallel(
    config: TrainConfig, *, steps: int, rendezvous: Path, run_id: str, init: Path | None, stopping: Callable[[], bool]
) -> TrainResult:
    """One rank, to the end of the run or until any rank is `stopping`; the first rank then writes model/."""
    torch.set_num_threads(config.threads)
    preset = config.preset()
    corpus = load_corpus(*config.data)
    check_corpus(corpus, learners=config.learners, length=preset.length)
    model = build_model(config.model, config.seed).to(config.device)
    layout = make_layout(specs_of(model), 1)
    if init is not None:
        scatter_(parameters_by_name(model), layout.pieces[0], load_pieces(init, layout)[0])
    optimizer = optimizer_of(config, model)
    tokens, step, loss = preset.batch * preset.length, 0, math.nan
    path = step_log_path(config.run_dir / "steps", config.name, 1)
    with process_group(rendezvous, config.learner_index, config.learners), StepLog(path) as log:
        mean = MeanGradient(model, stopping)
        for inputs, targets in own_batches(corpus, config, 1):
            started = time.perf_counter()
            set_rate(optimizer, preset.lr * rate_factor(step / steps, warmup=config.warmup))
            step += 1
            who = f"the mean of {config.learners} learners at step {step}"
            loss = train_step(model, optimizer, inputs, targets, clip=config.clip, who=who, reduce=mean)
            spent = time.perf_counter() - started - mean.waited_ns / 1e9
            time.sleep((config.slow - 1) * max(0.0, spent))
            log.write(step, tokens, loss, all_reduce_ns=mean.waited_ns)
            if step == steps or mean.stopped:
                break
        if config.learner_index == 0:
            theta = gather(parameters_by_name(model), layout.pieces[0])
            where = config.run_dir / "model"
            try:
                insist(lambda: export_model(where, run_id, layout, [theta], [Version(0, step)]), _tell_full)
            except OSError as error:
                raise RunError(f"the model cannot be written to {where}: {error.strerror or error}") from error
    return TrainResult(steps=step, tokens=step * tokens, loss=loss, model=model)
