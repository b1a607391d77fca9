"""Reading the merged model beside a run that goes on: of one slot, or not at all."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from atoll.core.layout import TensorSpec, make_layout
from atoll.errors import NothingMergedError, RunError
from atoll.store import merged, rundir
from atoll.store.commits import commit_paths
from atoll.tensors.codec import decode, encode
from tests.store.fake_run import PIECES, SPECS, FakeRun


@pytest.fixture
def run(tmp_path) -> FakeRun:
    return FakeRun(tmp_path / "run")


def slots(model: merged.MergedModel) -> list[int]:
    return [version.n for version in model.versions]


def test_read__after_each_slot__has_every_piece_at_its_newest(run) -> None:
    run.begin(0)
    reader = merged.MergedReader(run.path)
    assert reader.read().slot == 0
    for slot in range(1, 9):
        run.commit(slot)
        model = reader.read()
        assert (model.slot, model.run_id) == (slot, "r")
        assert slots(model) == [max((t for t in range(1, slot + 1) if t % PIECES == p), default=0) for p in range(3)]
        assert reader.versions() == model.versions
        assert reader.newest_slot() == slot


def test_read__has_the_models_names_shapes_and_dtypes_and_the_published_bits(run) -> None:
    run.begin(5)
    model = merged.MergedReader(run.path).read()
    assert {name: (tuple(t.shape), t.dtype) for name, t in model.tensors.items()} == {
        "a": ((2, 3), torch.float32),
        "b": ((5,), torch.bfloat16),
        "c": ((4,), torch.float32),
    }
    assert model.aliases == {"c": ("d",)}
    for piece, version in zip(run.layout.pieces, model.versions, strict=True):
        published = decode(encode(run.theta(piece.index, version.n), "bf16"), "bf16", piece.size)
        assert torch.equal(torch.cat([model.tensors[t.name].float().flatten() for t in piece.tensors]), published)
    exact = FakeRun(run.path.parent / "exact", payload="fp32")
    exact.begin(5)
    assert merged.MergedReader(exact.path).read().hash != model.hash


def test_read__leaves_the_directory_as_it_was(run) -> None:
    run.begin(4)
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    merged.MergedReader(run.path).read()
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def commit_while_reading(monkeypatch, run: FakeRun, plan: dict[int, list[int]]) -> None:
    """plan: commits that come just before the n-th file is read (from 0)."""
    reads, whole = [0], merged.read_theta

    def slow(path: Path):
        for slot in plan.get(reads[0], ()):
            run.commit(slot)
        reads[0] += 1
        return whole(path)

    monkeypatch.setattr(merged, "read_theta", slow)


def test_read__newer_slots_meanwhile__gives_the_older_one_whole(run, monkeypatch) -> None:
    run.begin(6)
    commit_while_reading(monkeypatch, run, {1: [7, 8], 2: [9]})
    model = merged.MergedReader(run.path).read()
    assert (model.slot, slots(model)) == (6, [6, 4, 5])


def test_read__a_lower_slot_that_comes_late_meanwhile__is_read_again(run, monkeypatch) -> None:
    run.begin(6)
    run.commit(8)  # slot 7 is still being collected
    commit_while_reading(monkeypatch, run, {2: [7]})
    model = merged.MergedReader(run.path).read()
    assert (model.slot, slots(model)) == (8, [6, 7, 8])


def test_read__overtaken_by_two_rounds__is_read_again_and_not_for_ever(run, monkeypatch) -> None:
    run.begin(6)
    commit_while_reading(monkeypatch, run, {2: [7, 8, 9, 10, 11, 12]})
    assert merged.MergedReader(run.path).read().slot == 12
    commit_while_reading(monkeypatch, run, {n: [13 + 6 * n + k for k in range(6)] for n in range(100)})
    with pytest.raises(RunError, match=r"were replaced 8 times while they were read; try again"):
        merged.MergedReader(run.path).read()


def test_read__beside_a_writer_at_full_speed__is_always_of_one_slot(run) -> None:
    run.begin(0)
    stop = threading.Event()

    def write() -> None:
        slot = 0
        while not stop.is_set():
            slot += 1
            run.commit(slot)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        reader, seen = merged.MergedReader(run.path), 0
        for _ in range(60):
            try:
                model = reader.read()
            except RunError:
                continue  # overtaken: fsync is fast here
            seen += 1
            newest = [max([t for t in range(1, model.slot + 1) if t % PIECES == p], default=0) for p in range(PIECES)]
            assert slots(model) == newest
            assert [float(model.tensors[name].flatten()[0]) for name in ("a", "c")] == [
                float(torch.tensor(newest[_piece_of(run, name)] + 1 / 3).bfloat16()) for name in ("a", "c")
            ]
        assert seen
    finally:
        stop.set()
        writer.join()


def _piece_of(run: FakeRun, name: str) -> int:
    return next(p.index for p in run.layout.pieces if any(t.name == name for t in p.tensors))


def test_read__a_damaged_commit__falls_back_to_the_other(run) -> None:
    run.begin(6)
    newest = max(commit_paths(run.path / "commits", 0), key=lambda path: merged.read_head(path).version)
    whole = newest.read_bytes()
    reader = merged.MergedReader(run.path)
    at = whole.rindex(tensor_bytes(run.theta(0, 6)))
    for damaged in (whole[: len(whole) // 2], b"", whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
        newest.write_bytes(damaged)
        model = reader.read()
        assert (model.slot, slots(model)) == (5, [3, 4, 5])
        (damage,) = model.damage
        assert "a commit of fragment 0 is damaged or gone" in damage
        assert newest.name in damage
    newest.unlink()
    (damage,) = reader.read().damage
    assert f"{newest.name} is missing" in damage
    newest.write_bytes(whole)
    assert reader.read().damage == ()
    for path in commit_paths(run.path / "commits", 0):
        path.write_bytes(b"torn")
    with pytest.raises(RunError, match=r"fragment 0 of .* has no intact commit: 0000\.a"):
        reader.read()


def tensor_bytes(flat: torch.Tensor) -> bytes:
    return flat.numpy().tobytes()


def test_read__of_what_is_no_run_or_has_nothing_yet__says_so(run, tmp_path) -> None:
    with pytest.raises(RunError, match=r"holds no run: run\.toml is missing; give the directory"):
        merged.MergedReader(tmp_path)
    with pytest.raises(NothingMergedError, match=r"nothing is merged yet .*: version 0 is not there"):
        merged.MergedReader(run.path).read()
    (run.path / "layout.json").unlink()
    with pytest.raises(RunError, match=r"has no layout\.json: an older version"):
        merged.MergedReader(run.path).read()
    rundir.open_rundir(tmp_path / "new", "r")
    with pytest.raises(NothingMergedError, match="no learner has joined"):
        merged.MergedReader(tmp_path / "new").read()


def test_read__of_another_layout__says_so(run) -> None:
    run.begin(2)
    other = make_layout((TensorSpec("a", (9,), "float32"), TensorSpec("b", (9,), "float32"), SPECS[2]), PIECES)
    rundir.RunDir(run.path, "r").write_layout(other)
    with pytest.raises(RunError, match="holds files of two layouts"):
        merged.MergedReader(run.path).read()
    file = run.path / "layout.json"
    file.write_text(file.read_text().replace('"a"', '"z"'))
    with pytest.raises(RunError, match="do not have the fingerprint"):
        merged.MergedReader(run.path).read()
    file.write_text("{")
    with pytest.raises(RunError, match=r"layout\.json cannot be read"):
        merged.MergedReader(run.path).read()


@pytest.mark.parametrize("damage", ["", "run_id = 'r'", "run_id = 'r'\npayload = 'fp7'", "payload = 'bf16'"])
def test_read__of_damaged_settings__says_so(run, damage) -> None:
    run.begin(2)
    run.path.joinpath("run.toml").write_text(damage)
    with pytest.raises(RunError, match=r"run\.toml is damaged.* in model/"):
        merged.MergedReader(run.path).read()


def test_over__once_the_model_or_the_summary_is_there(run) -> None:
    reader = merged.MergedReader(run.path)
    assert not reader.over
    (run.path / "model").mkdir()
    (run.path / "model" / "manifest.json").write_text("{}")
    assert reader.over


def test_written__is_a_model_file_that_says_what_it_is(run, tmp_path) -> None:
    run.begin(4)
    model = merged.MergedReader(run.path).read()
    to = tmp_path / "to"
    to.mkdir()
    assert merged.newest_written(to) is None
    path = merged.write_merged(to, model)
    assert path == to / "model-00000004.safetensors"
    assert os.listdir(to) == [path.name]
    loaded = load_file(path)
    assert loaded.keys() == model.tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.tensors.items())
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["slot"] == "4"
    assert metadata["hash"] == model.hash
    assert metadata["run_id"] == "r"
    assert json.loads(metadata["versions"]) == [[1, 3], [1, 4], [1, 2]]
    (to / "model-00000009.safetensors").write_bytes(b"not ours")
    assert merged.newest_written(to) == (path, metadata)
