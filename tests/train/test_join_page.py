"""The snippets of docs/JOIN.md run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import atoll
from atoll.errors import SyncerLostError
from tests.runtime.conftest import ROOT, Start, start  # noqa: F401  (a fixture)

SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "JOIN.md").read_text(), flags=re.DOTALL)


def snippet(words: str) -> str:
    """The one that has these words."""
    (found,) = [text for text in SNIPPETS if words in text]
    return found


def names() -> dict[str, Any]:
    """What a user's script has before."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = torch.randn(8, 4), torch.randint(2, (8,))
    loader = [(inputs, targets)] * 3
    return {
        "model": model, "optimizer": optimizer, "loader": loader, "torch": torch,
        "loss_of": nn.functional.cross_entropy,
        "inputs": inputs, "loss": torch.tensor(1.0), "fresh_model": nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)),
    }  # fmt: skip


def test_a_loader_that_is_shorter_than_the_run__trains_to_its_end__and_the_file_loads(
    start: Start, tmp_path: Path  # noqa: F811
) -> None:
    served = start("syncer", settings={"steps": 16, "interval": 4, "fragments": 2})
    space = names() | {"address": f"127.0.0.1:{served.expect('listening')['port']}"}
    exec(snippet("epoch"), space)
    assert space["learner"].steps >= 16
    assert served.wait() == 0
    space["file"] = tmp_path / "run" / "model" / "model.safetensors"
    exec(snippet("atoll.load"), space)
    trained, fresh = space["model"].state_dict(), space["fresh_model"].state_dict()
    for name in ("0.running_mean", "0.running_var", "1.weight"):
        torch.testing.assert_close(fresh[name], trained[name], atol=0.01, rtol=0.01)


@pytest.mark.parametrize(("before", "after", "skipped"), [(2.0, 1.0, True), (2.0, 2.0, False), (1.0, 2.0, False)])
def test_scaler__a_step_that_it_skipped_is_told(before: float, after: float, skipped: bool) -> None:
    told, scales = [], iter([before, after])
    space = names()
    space["scaler"] = SimpleNamespace(get_scale=lambda: next(scales), step=lambda _: None, update=lambda: None)
    space["learner"] = SimpleNamespace(step=lambda **given: told.append(given) or True)
    exec(snippet("scaler"), space)
    assert told[0]["skipped"] is skipped
    assert told[0]["tokens"] == 8


def test_schedule__follows_the_run() -> None:
    space = names()
    space["learner"] = SimpleNamespace(progress=0.0)
    exec(snippet("LambdaLR"), space)
    rates = []
    for progress in (0.0, 0.5, 1.0):
        space["learner"].progress = progress
        space["optimizer"].step()
        space["schedule"].step()
        rates.append(space["optimizer"].param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.05, 0.0])


def test_steps_dir__holds_a_line_for_each_step(start: Start, tmp_path: Path, monkeypatch) -> None:  # noqa: F811
    monkeypatch.chdir(tmp_path)
    served = start("syncer", settings={"steps": 1000, "interval": 4, "fragments": 2})
    space = names() | {"address": f"127.0.0.1:{served.expect('listening')['port']}", "atoll": atoll}
    exec(snippet("steps_dir"), space)
    with space["learner"] as learner:
        for _ in range(3):
            learner.step(8, 1.0)
    (log,) = (tmp_path / "runs/first/steps").iterdir()
    assert len(log.read_text().splitlines()) == 3


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_accumulation__counts_all_its_batches(accumulate: int) -> None:
    told = []
    space = names() | {"accumulate": accumulate}
    space["loader"] *= 2
    space["learner"] = SimpleNamespace(step=lambda **given: told.append(given["tokens"]) or True)
    exec(snippet("accumulate"), space)
    assert told == [8 * accumulate] * (6 // accumulate)


def test_saved_state__goes_on_after_another_join(start: Start, tmp_path: Path, monkeypatch) -> None:  # noqa: F811
    monkeypatch.chdir(tmp_path)
    served = start("syncer", settings={"steps": 1000, "interval": 4, "fragments": 2})
    space = names() | {"address": f"127.0.0.1:{served.expect('listening')['port']}", "atoll": atoll}
    space["optimizer"] = torch.optim.Adam(space["model"].parameters(), lr=0.1)
    with atoll.join(space["model"], space["optimizer"], address=space["address"], name="berlin") as learner:
        space["learner"] = learner
        exec(snippet("LambdaLR"), space)
        space["model"](space["inputs"]).sum().backward()
        space["optimizer"].step()
        learner.step(tokens=8)
        exec(snippet("torch.save(state"), space)
    again = names() | {"address": space["address"], "atoll": atoll}
    again["optimizer"] = torch.optim.Adam(again["model"].parameters(), lr=0.1)
    again["learner"] = learner
    exec(snippet("LambdaLR"), again)
    exec(snippet("torch.load"), again)
    again["learner"].close()
    moments = [optimizer.state_dict()["state"][0]["exp_avg"] for optimizer in (space["optimizer"], again["optimizer"])]
    assert moments[0].abs().sum() > 0
    assert torch.equal(*moments)


def test_syncer_lost__the_model_is_saved(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    space = names()

    def step(**given: Any) -> bool:
        raise SyncerLostError("away")

    space["learner"] = SimpleNamespace(step=step)
    with pytest.raises(SyncerLostError):
        exec(snippet("SyncerLostError"), space)
    assert set(torch.load("alone.pt")) == set(space["model"].state_dict())


def test_all_snippets_are_here() -> None:
    words = re.findall(r'exec\(snippet\("([^"]+)"\)', Path(__file__).read_text())
    assert set(map(snippet, words)) == set(SNIPPETS)
