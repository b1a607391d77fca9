"""The snippets of docs/JOIN.md run as they stand there."""

from __future__ import annotations

import math
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
    exec(snippet("# one epoch"), space)
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
    exec(snippet("import math"), space)
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


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_accumulation__counts_all_its_batches_over_the_end_of_epochs(accumulate: int) -> None:
    """10 batches, 4 of them in a step: the rest of an epoch goes into the next step."""
    told, read = [], []
    space = names() | {"accumulate": accumulate}
    inputs, targets = torch.randn(8, 4), torch.randint(2, (8,))
    space["loader"] = [(inputs + index, targets) for index in range(10)]
    count, loss_of = 5, space["loss_of"]
    space["loss_of"] = lambda out, targets: read.append(out) or loss_of(out, targets)
    space["learner"] = SimpleNamespace(step=lambda **given: told.append(given["tokens"]) or len(told) < count)
    exec(snippet("islice"), space)
    assert told == [8 * accumulate] * count
    assert len(read) == accumulate * count


def test_warm_up__rises_then_falls() -> None:
    space: dict[str, Any] = {}
    space["math"] = math
    exec(snippet("def factor"), space)
    factor = space["factor"]
    assert [factor(0.0), factor(0.025), factor(0.05), factor(1.0)] == pytest.approx([0.1, 0.5, 1.0, 0.0])
    assert factor(0.2) > factor(0.6) > factor(0.9)


def test_saved_state__goes_on_after_another_join(start: Start, tmp_path: Path, monkeypatch) -> None:  # noqa: F811
    monkeypatch.chdir(tmp_path)
    served = start("syncer", settings={"steps": 1000, "interval": 4, "fragments": 2})
    space = names() | {"address": f"127.0.0.1:{served.expect('listening')['port']}", "atoll": atoll}
    space["optimizer"] = torch.optim.Adam(space["model"].parameters(), lr=0.1)
    with atoll.join(space["model"], space["optimizer"], address=space["address"], name="berlin") as learner:
        space["learner"] = learner
        exec(snippet("import math"), space)
        space["model"](space["inputs"]).sum().backward()
        space["optimizer"].step()
        learner.step(tokens=8)
        exec(snippet("torch.save(state"), space)
    again = names() | {"address": space["address"], "atoll": atoll, "math": math}
    again["optimizer"] = torch.optim.Adam(again["model"].parameters(), lr=0.1)
    exec(snippet("torch.load"), again)
    assert again["schedule"].base_lrs == [0.1]
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
