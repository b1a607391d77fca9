"""R29 end to end: a model with BatchNorm, over real processes, to a file that is as good as its learners."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import atoll
from atoll.errors import JoinError
from tests.runtime.conftest import ROOT, Process, Start

SETTINGS = {"run_id": "r", "steps": 96, "interval": 4, "fragments": 2, "learners": 2}


def net() -> nn.Module:
    """Two classes of points far from the origin: without its statistics it tells nothing apart."""
    first = nn.BatchNorm1d(4, affine=False), nn.Linear(4, 8), nn.BatchNorm1d(8)
    return nn.Sequential(*first, nn.ReLU(), nn.Linear(8, 2))


def points(chance: torch.Generator, count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(2, (count,), generator=chance)
    return 300.0 + 5 * torch.randn(count, 4, generator=chance) + 20.0 * labels[:, None], labels


def accuracy(model: nn.Module) -> float:
    inputs, labels = points(torch.Generator().manual_seed(99), 500)
    model.eval()
    with torch.no_grad():
        found = (model(inputs).argmax(1) == labels).float().mean().item()
    model.train()
    return found


def train(address: str, name: str, model: nn.Module, whole: nn.Module, found: dict[str, nn.Module]) -> None:
    chance = torch.Generator().manual_seed(len(name))
    model[0].num_batches_tracked += 5 if name == "a" else 50
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    learner = atoll.join(whole, optimizer, address=address, name=name, timeout_s=40.0)
    go = True
    while go:
        inputs, labels = points(chance)
        loss = nn.functional.cross_entropy(whole(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        go = learner.step(tokens=len(labels), loss=loss.item())
    found[name] = model


def run_two(start: Start, tmp_path: Path) -> tuple[Path, dict[str, nn.Module]]:
    served: Process = start("syncer", settings=SETTINGS)
    address = f"127.0.0.1:{served.expect('listening')['port']}"
    found: dict[str, nn.Module] = {}
    plain, inner = net(), net()
    models = {"a": (plain, plain), "bb": (inner, torch.compile(inner, backend="eager"))}
    threads = [threading.Thread(target=train, args=(address, name, *pair, found)) for name, pair in models.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert served.wait() == 0
    return tmp_path / "run", found


def test_batch_norm__the_file_is_as_good_as_the_learners__and_newcomers_of_any_wrapping_join(
    start: Start, tmp_path: Path
) -> None:
    run, learners = run_two(start, tmp_path)
    assert set(learners) == {"a", "bb"}
    file = run / "model" / "model.safetensors"
    fresh, other = net(), torch.compile(net(), backend="eager")
    fresh.load_state_dict({**torch.load(_as_pt(file, tmp_path), weights_only=True)})  # strict: nothing is missing
    atoll.load(other, file)
    assert accuracy(fresh) > 0.95
    assert accuracy(fresh) == accuracy(other._orig_mod)
    for model in learners.values():
        assert accuracy(model) > 0.95
        assert torch.equal(model[2].running_mean, fresh[2].running_mean), "buffers of all end as the file has them"
    assert (fresh[0].running_var > 0).all()
    # Integers in the file are those of version 0, which one of the two handed in, before they counted on.
    assert fresh[0].num_batches_tracked in (5, 50)
    counts = {name: int(model[0].num_batches_tracked) for name, model in learners.items()}
    assert all(count > 50 for count in counts.values()) or fresh[0].num_batches_tracked == 5
    _audit(run)


def _as_pt(file: Path, tmp_path: Path) -> Path:
    from safetensors.torch import load_file

    torch.save(load_file(file), tmp_path / "model.pt")
    return tmp_path / "model.pt"


def _audit(run: Path) -> None:
    """Merges alone: this run has no step logs."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import audit; run = audit.Run(sys.argv[2]); "
        "print(audit.redo_merges(run)[1])"
    )
    command = [sys.executable, "-c", code, str(ROOT / "tools"), str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) > 20


def test_what_must_agree_beside_the_tensors(start: Start) -> None:
    served = start("syncer", settings=SETTINGS)
    address = f"127.0.0.1:{served.expect('listening')['port']}"

    def join(name: str, **options: str) -> atoll.train.learner.JoinedLearner:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return atoll.join(model, optimizer, address=address, name=name, timeout_s=30.0, **options)

    with join("first", fingerprint_extra="relu"):
        with pytest.raises(JoinError, match="fingerprint_extra is 'relu' in the run and 'tanh' at the learner"):
            join("second", fingerprint_extra="tanh")
        with pytest.raises(JoinError, match="same buffers="):
            join("third", fingerprint_extra="relu", buffers="local")
