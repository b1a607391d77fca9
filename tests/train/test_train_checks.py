"""What a script hands over, checked: every kind of wrong argument is one line."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from atoll.errors import AtollError, ConfigError, JoinError
from atoll.runtime.children import python_command
from atoll.train.checks import (
    check_model,
    check_name,
    check_optimizers,
    check_process,
    check_reach,
    loss_of,
    optimizers_of,
    tokens_of,
)

MODEL = nn.Linear(2, 2)
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)


class Wrapped:
    """As Fabric, DeepSpeed and apex make them: no torch optimizer, but with all that one has."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


def one_line(error: pytest.ExceptionInfo[AtollError]) -> None:
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("tokens", [
    7, np.int64(7), np.uint8(7), torch.tensor(7), torch.tensor([7], dtype=torch.int32), (torch.ones(9) > 0)[:7].sum(),
], ids=repr)  # fmt: skip
def test_tokens__of_any_kind_of_whole_number(tokens) -> None:
    assert tokens_of(tokens) == 7
    assert type(tokens_of(tokens)) is int


@pytest.mark.parametrize("tokens", [
    True, 1.5, "7", None, -1, 2**63, 10**30, torch.tensor(1.5), torch.tensor([1, 2]),
    torch.tensor(True), torch.tensor(7, device="meta"), [7],
], ids=repr)  # fmt: skip
def test_tokens__that_are_none(tokens) -> None:
    with pytest.raises(ConfigError, match="must be a whole number") as error:
        tokens_of(tokens)
    one_line(error)


def test_loss__a_number_or_one_value() -> None:
    for loss in (1, 1.5, np.float32(1.5), True):
        assert isinstance(loss_of(loss), float)
    tensor = torch.tensor([1.0])
    assert loss_of(tensor) is tensor
    assert loss_of(None) is None
    for wrong in (torch.ones(3), "high", "0.5", b"0.5", [1.0, 2.0], MODEL, 10**400, -(10**5000),
                  torch.ones(1, device="meta"), torch.ones(1, dtype=torch.complex64)):  # fmt: skip
        with pytest.raises(ConfigError, match="loss") as error:
            loss_of(wrong)
        one_line(error)


def made_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(2, 2)


def test_model__in_inference_mode__is_refused() -> None:
    with torch.inference_mode(), pytest.raises(ConfigError, match="call it outside") as error:
        check_model(MODEL)
    one_line(error)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_model__that_is_none_or_not_ready() -> None:
    integers = nn.Linear(2, 2)
    integers.half_done = nn.Parameter(torch.ones(2, dtype=torch.complex64))  # type: ignore[assignment]
    empty = nn.Module()
    empty.weight = nn.Parameter(torch.ones(0, 3))  # type: ignore[assignment]
    for model, words in (
        (SGD, "takes .model, optimizer."),
        (nn.Linear, "call it"),
        (None, "not a torch.nn.Module"),
        (nn.LazyLinear(3), "forward pass"),
        (nn.Linear(2, 2, device="meta"), "to_empty"),
        (integers, "complex64"),
        (empty, "no values"),
        (torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), "TorchScript"),
        (made_in_inference_mode(), "'weight' was made inside torch.inference_mode"),
    ):
        with pytest.raises(ConfigError, match=words) as error:
            check_model(model)
        one_line(error)
    check_model(MODEL)


def of_weights(*weights: torch.Tensor) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(weight) for weight in weights])


def test_model__two_values_in_one_place_of_memory__are_refused() -> None:
    flat = torch.ones(12)
    for model, words in (
        (of_weights(torch.ones(1).expand(4)), "'0' has several values in one place"),
        (of_weights(flat.view(3, 4), flat.view(3, 4).t()), "'0' and '1' share memory"),
        (of_weights(flat[:8], flat[4:]), "'0' and '1' share memory"),
        (of_weights(flat, flat[1:2], flat[5:7]), "'0' and '1' share memory"),
        (of_weights(flat[::2], flat[:3]), "'0' and '1' share memory"),
        (of_weights(flat[:3], flat[::2]), "'0' and '1' share memory"),
        (of_weights(flat.view(3, 4)[:, :2], flat.view(3, 4)[:, 1:]), "'0' and '1' share memory"),
    ):
        with pytest.raises(ConfigError, match=words) as error:
            check_model(model)
        one_line(error)


def test_model__views_that_are_tied_or_lie_apart__are_taken() -> None:
    flat = torch.ones(12)
    check_model(of_weights(flat[:4], flat[4:8], flat[8:]))
    check_model(of_weights(flat, flat))
    check_model(of_weights(flat.view(3, 4)[:, :2], flat.view(3, 4)[:, 2:]))
    check_model(of_weights(flat[::2], flat[1::2]))
    check_model(of_weights(torch.ones(3, 4).t(), torch.tensor(1.0)))
    frozen = nn.Parameter(flat, requires_grad=False)
    check_model(nn.ParameterList([frozen, nn.Parameter(flat[4:8])]))


def test_optimizer__wrapped_and_listed_ones_are_taken() -> None:
    wrapped = Wrapped(SGD)
    assert optimizers_of(SGD) == [SGD]
    assert optimizers_of(wrapped) == [wrapped]
    assert optimizers_of([SGD, wrapped]) == [SGD, wrapped]
    assert optimizers_of(iter([SGD])) == [SGD]
    check_optimizers(MODEL, optimizers_of(wrapped))
    for wrong in (None, {"all": SGD}, torch.optim.SGD, MODEL, [], [None], "sgd", 3):
        with pytest.raises(ConfigError, match="has no param_groups") as error:
            optimizers_of(wrong)
        one_line(error)


def test_names_and_addresses__of_any_type() -> None:
    for name in ("", "a b", "ä", None, 3):
        with pytest.raises(ConfigError, match="name="):
            check_name(name)  # type: ignore[arg-type]
    for wait in (-1, float("nan"), "60"):
        with pytest.raises(ConfigError, match="timeout_s"):
            check_reach("127.0.0.1:1", None, timeout_s=wait)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be HOST:PORT"):
        check_reach("127.0.0.1:²", None)


def test_ranks__are_refused_unless_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    check_process(alone=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(JoinError, match=r"2 ranks.*alone=True") as error:
        check_process(alone=False)
    one_line(error)
    check_process(alone=True)


def test_spawned_worker__that_imports_the_script__is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(JoinError, match="__main__"):
        check_process(alone=True)


def test_children__see_the_standard_library_first(tmp_path) -> None:
    for name in ("queue", "token", "resource", "signal", "asyncio"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    (tmp_path / "ours.py").write_text("import asyncio, queue, token, atoll.runtime.agent, sys; print(sys.argv[2:])\n")
    command = python_command("ours", "1", "two words")
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.stdout == "['1', 'two words']\n", done.stderr


def test_agent__ignores_what_is_sent_to_the_whole_group() -> None:
    code = (
        "import os, signal; from atoll.runtime.children import ignore_signals, others_signals; ignore_signals(); "
        "[os.kill(os.getpid(), n) for n in others_signals() if n < 32]; print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "alive\n", done
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
