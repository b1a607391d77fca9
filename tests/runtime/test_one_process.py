"""One process that joins, leaves and breaks: what it says, and that nothing of it stays behind."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import atoll
from atoll.errors import ConfigError, JoinError, RunError
from atoll.train import learner as learner_module
from tests.relay import Relay
from tests.runtime.conftest import Start

SETTINGS = {"steps": 10_000, "interval": 4, "fragments": 2, "heartbeat_interval_ns": 100_000_000}


def serving(start: Start) -> str:
    """The address of a new syncer."""
    return f"127.0.0.1:{start('syncer', settings=SETTINGS).expect('listening')['port']}"


def small_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_join_and_close__again_and_again__leaves_nothing_behind(start: Start) -> None:
    address = serving(start)

    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().count("memfd:atoll")
        return len(os.listdir("/proc/self/fd")), maps

    counts = []
    for _ in range(5):
        learner = atoll.join(*small_model(), address=address, name="a", timeout_s=30.0)
        assert learner.step(3, 1.0)
        learner.close()
        del learner
        gc.collect()
        counts.append(held())
    assert counts[-1] == counts[1]
    assert counts[-1][1] == 0


@pytest.mark.parametrize("wrap", [lambda model: model, nn.Sequential, nn.DataParallel])
def test_join__one_model_twice_at_once__is_refused__in_a_wrapper_too(start: Start, wrap: type[nn.Module]) -> None:
    address = serving(start)
    model, optimizer = small_model()
    with atoll.join(model, optimizer, address=address, name="a", timeout_s=30.0), pytest.raises(
        ConfigError, match="trains as learner 'a' already"
    ):
        atoll.join(wrap(model), optimizer, address=address, name="b", timeout_s=30.0)
    atoll.join(model, optimizer, address=address, name="b", timeout_s=30.0).close()


def test_join__two_models_that_share_only_what_is_frozen__are_two_learners(start: Start) -> None:
    address = serving(start)
    backbone = nn.Linear(4, 4).requires_grad_(False)
    models = [nn.Sequential(backbone, nn.Linear(4, 4)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model[1].parameters(), lr=0.1) for model in models]
    with (
        atoll.join(models[0], optimizers[0], address=address, name="a", timeout_s=30.0),
        atoll.join(models[1], optimizers[1], address=address, name="b", timeout_s=30.0),
    ):
        pass


def test_leaving_early__says_how_much_is_lost(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    address = serving(start)
    learner = atoll.join(*small_model(), address=address, name="a", timeout_s=30.0)
    learner.step(100, 1.0)
    learner.close()
    [line] = [record.getMessage() for record in caplog.records if "leaves at" in record.getMessage()]
    assert "100% of its work (100 of 100 tokens) is not merged, and lost but for what the syncer has" in line
    assert "until step() is False" in line


def test_exception_in_the_middle_of_a_step__the_learner_says_that_it_broke(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = serving(start)
    learner = atoll.join(*small_model(), address=address, name="a", timeout_s=30.0)

    def fail(piece: int) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(learner._pieces, "capture", fail)
    def train() -> None:
        for _ in range(100):
            learner.step(3, 1.0)
            time.sleep(0.01)

    with pytest.raises(MemoryError):
        train()
    with pytest.raises(RunError, match=r"broke in an earlier step .MemoryError: no room"):
        learner.step(3, 1.0)


@pytest.mark.parametrize(
    ("device", "dtype"), [("meta", torch.float32), ("cpu", torch.float64), ("cpu", torch.bfloat16)]
)
def test_defaults_of_the_script__for_new_tensors_are_not_ours(
    start: Start, device: str, dtype: torch.dtype
) -> None:
    address = serving(start)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        with atoll.join(model, optimizer, address=address, name="a", timeout_s=30.0) as learner:
            deadline = time.monotonic() + 60.0
            while learner.progress * SETTINGS["steps"] < 20 and time.monotonic() < deadline:
                for parameter in model.parameters():
                    parameter.data.add_(0.01)
                assert learner.step(3, 1.0)
                time.sleep(0.01)
            assert learner.progress * SETTINGS["steps"] >= 20, "slots were merged and taken"
    finally:
        torch.set_default_device("cpu")
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_one_port_forwarded__join_names_the_other_soon(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind `ssh -L` or `docker -p`: the control port answers, at the bulk port nobody does."""
    monkeypatch.setattr(learner_module, "BULK_PATIENCE_S", 0.5)
    port = start("syncer", settings=SETTINGS).expect("listening")["port"]
    through = Relay(port, "127.0.0.2")
    with pytest.raises(JoinError, match=r"its bulk service at 127\.0\.0\.2:\d+ does not .*give bulk_address"):
        atoll.join(*small_model(), address=f"127.0.0.2:{through.port}", name="a", timeout_s=60.0)
    through.close()
