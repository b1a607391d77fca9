"""What a run directory promises: atomic, owned by one run, never trusted when half written."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
import tomllib

import pytest
import torch
from safetensors.torch import load_file

from atoll.core import records
from atoll.core.layout import TensorSpec, make_layout
from atoll.core.messages import Announce, Counters, Life, Version
from atoll.errors import RunError
from atoll.store import commits, contributions, files, model, rundir, tape

# ---------------------------------------------------------------- directory


def test_rundir__of_another_run__is_refused(tmp_path) -> None:
    rundir.open_rundir(tmp_path / "r", "one")
    assert rundir.open_rundir(tmp_path / "r", "one").run_id == "one"
    with pytest.raises(RunError, match="holds run 'one', not 'two'"):
        rundir.open_rundir(tmp_path / "r", "two")


def test_rundir__that_holds_other_files__is_refused(tmp_path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match="holds no run"):
        rundir.open_rundir(tmp_path, "one")
    with pytest.raises(RunError, match="cannot be used"):
        rundir.open_rundir(tmp_path / "thesis.tex" / "r", "one")


def test_settings__there_and_back(tmp_path) -> None:
    run = rundir.open_rundir(tmp_path, "one")
    settings = {"run_id": "one", "text": 'a "b" \\ é \x7f\n', "n": 3, "x": 1e-05, "y": 0.1, "inf": math.inf, "b": True}
    run.write_settings(settings)
    assert rundir.read_settings(tmp_path) == settings
    assert tomllib.loads((tmp_path / "run.toml").read_text())["n"] == 3
    with pytest.raises(RunError, match="do not belong"):
        run.write_settings({"run_id": "two"})


def test_epochs__are_taken_once(tmp_path) -> None:
    run = rundir.open_rundir(tmp_path, "one")
    first, second = run.take_epoch(), run.take_epoch()
    assert (first.number, second.number) == (1, 2)
    assert first.holder != second.holder
    assert (tmp_path / "epochs" / "0000000001").read_text().strip() == first.holder


def test_write_atomic__that_fails__leaves_the_old_file(tmp_path, monkeypatch) -> None:
    path = tmp_path / "f"
    files.write_atomic(path, b"old")

    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_all", full)
    with pytest.raises(OSError, match="No space"):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


# ---------------------------------------------------------------- tape

GRANT = records.GrantLine(now_ns=5, name="l1", generation=1 << 32)
MERGE = records.Merge1("l1", 1, 2, (0, 1), 3, 4, 5, 0.1 + 0.2, "aa", 1e-30)
SLOT = records.SlotLine(1, 2, 3, (0, 1), (0, 2), (MERGE,), "a", "b", "c", 0.5, 7, 8)


def test_tape__there_and_back(tmp_path) -> None:
    writer = tape.Tape(tmp_path / "t")
    writer.append(GRANT, sync=True)
    writer.append(SLOT)
    writer.close()
    entries = list(tape.read_tape(tmp_path / "t"))
    assert [(e.i, e.kind, e.record) for e in entries] == [(0, "grantline", GRANT), (1, "slotline", SLOT)]
    assert [e.record for e in tape.read_tape(tmp_path / "t", entries[0].stop_bytes, 1)] == [SLOT]


def test_tape__torn_at_any_byte__keeps_all_whole_lines_and_goes_on(tmp_path) -> None:
    whole = tape.encode_line(0, GRANT) + tape.encode_line(1, GRANT)
    for cut in range(len(whole) + 1):
        path = tmp_path / f"t{cut}"
        path.write_bytes(whole[:cut])
        count = whole[:cut].count(b"\n")
        assert len(list(tape.read_tape(path))) == count
        writer = tape.Tape(path)
        writer.append(SLOT)
        writer.close()
        assert [e.i for e in tape.read_tape(path)] == list(range(count + 1))


def test_tape__with_damage_or_gaps__is_refused(tmp_path) -> None:
    path = tmp_path / "t"
    path.write_bytes(b"{bad}\n" + tape.encode_line(1, GRANT))
    with pytest.raises(RunError, match="damaged"):
        list(tape.read_tape(path))
    path.write_bytes(tape.encode_line(0, GRANT) + tape.encode_line(2, GRANT))
    with pytest.raises(RunError, match="missing"):
        list(tape.read_tape(path))


def test_tape__of_a_newer_version__skips_unknown_kinds_and_fields(tmp_path) -> None:
    path = tmp_path / "t"
    path.write_bytes(
        b'{"i":0,"kind":"novelty","x":1}\n{"i":1,"kind":"grantline","now_ns":5,"name":"l1","generation":4294967296,"z":1}\n'
    )
    assert [(e.kind, e.record) for e in tape.read_tape(path)] == [("novelty", None), ("grantline", GRANT)]


def test_tape__has_one_writer__and_one_sees_when_it_is_gone_however_it_went(tmp_path, monkeypatch) -> None:
    path = tmp_path / "t"
    monkeypatch.setattr(files, "CLAIM_S", 0.05)
    writer = tape.Tape(path)
    os.utime(path, (1, 1))
    assert tape.is_written(path)
    with pytest.raises(RunError, match="is being written by another syncer; end that one, or choose another directory"):
        tape.Tape(path)
    writer.close()
    os.utime(path, (1, 1))
    assert not tape.is_written(path)
    os.utime(path)
    assert tape.is_written(path), "what was written to just now has a writer, perhaps on another machine"
    code = "import pathlib, sys; from atoll.store import tape; t = tape.Tape(pathlib.Path(sys.argv[1])); input(1)"
    with subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.read(1) == b"1"
        os.utime(path, (1, 1))
        assert tape.is_written(path)
        other.kill()
    assert not tape.is_written(path)
    assert tape.is_written(tmp_path / "none"), "it may still come"


def test_tape__when_the_disk_is_full__loses_no_line_and_leaves_no_gap(tmp_path, monkeypatch) -> None:
    writer = tape.Tape(tmp_path / "t")
    writer.append(GRANT)
    real = tape.write_all

    def full(fd, data):
        os.write(fd, bytes(data)[:7])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tape, "write_all", full)
    with pytest.raises(OSError, match="No space"):
        writer.append(SLOT)
    monkeypatch.setattr(tape, "write_all", real)
    writer.append(SLOT)
    writer.close()
    assert [e.record for e in tape.read_tape(tmp_path / "t")] == [GRANT, SLOT]


# ---------------------------------------------------------------- commits


def _head(n: int, theta: torch.Tensor, momentum: torch.Tensor) -> commits.CommitHead:
    return commits.CommitHead(
        piece=0,
        version=Version(0, n),
        slot=n,
        epoch=1,
        theta_hash=commits.tensor_hash(theta),
        momentum_hash=commits.tensor_hash(momentum),
        newest_merged=((Life("l1", 1 << 32), n),),
        record={"slot": n},
    )


def _commit(store: commits.Commits, n: int) -> None:
    theta, momentum = torch.full((5,), float(n)), torch.zeros(5)
    store.write(_head(n, theta, momentum), theta, momentum)


def test_commits__alternate_and_the_newest_is_loaded(tmp_path) -> None:
    store = commits.Commits(tmp_path)
    assert store.load(0) == commits.NotCommitted(0, ())
    for n in range(4):
        _commit(store, n)
        loaded = commits.Commits(tmp_path).load(0)
        assert isinstance(loaded, commits.Committed)
        assert loaded.head.version == Version(0, n)
        assert loaded.head.newest_merged == ((Life("l1", 1 << 32), n),)
        assert torch.equal(loaded.theta, torch.full((5,), float(n)))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0000.a", "0000.b"]


def test_commits__opened_again__replace_the_older(tmp_path) -> None:
    for n in range(3):
        _commit(commits.Commits(tmp_path), n)
    versions = [commits.read_head(tmp_path / f"0000{s}").version.n for s in (".a", ".b")]
    assert versions == [2, 1]


def test_commits__half_written_or_bent_at_any_byte__fall_back_to_the_other(tmp_path) -> None:
    store = commits.Commits(tmp_path)
    _commit(store, 1)
    _commit(store, 2)
    whole = (tmp_path / "0000.b").read_bytes()
    for cut in range(0, len(whole), 7):
        (tmp_path / "0000.b").write_bytes(whole[:cut])
        assert store.load(0).head.version.n == 1
    for at in range(len(whole) - 40, len(whole)):
        (tmp_path / "0000.b").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert store.load(0).head.version.n == 1
    (tmp_path / "0000.a").write_bytes(b"")
    lost = store.load(0)
    assert isinstance(lost, commits.NotCommitted)
    assert len(lost.reasons) == 2


# ---------------------------------------------------------------- contributions, model


def test_contribution__there_and_back(tmp_path) -> None:
    announce = Announce(3, 0, 7, Version(0, 1), 9, 2, 20, Counters(), 8)
    sent = torch.tensor([1.0, -2.0, 0.5, 3.0]).to(torch.bfloat16)
    payload = sent.view(torch.uint8).numpy().tobytes()
    path = contributions.keep_contribution(tmp_path, Life("l1", 5), announce, payload, "bf16", "ab", len(payload))
    assert path == tmp_path / "slot-00000007" / "l1-5-3.safetensors"
    header, loaded = contributions.load_contribution(path)
    assert torch.equal(loaded, sent)
    assert header["announce"]["slot"] == 7
    assert header["hash"] == "ab"


def test_contribution__with_buffers__keeps_both_parts(tmp_path) -> None:
    announce = Announce(3, 0, 7, Version(0, 1), 9, 2, 20, Counters(), 6)
    sent, held = torch.tensor([1.5]).to(torch.bfloat16), torch.tensor([1.0 + 2**-20])
    payload = b"".join(t.view(torch.uint8).numpy().tobytes() for t in (sent, held))
    path = contributions.keep_contribution(tmp_path, Life("l1", 5), announce, payload, "bf16", "ab", 2)
    found = load_file(path)
    assert torch.equal(found["sent"], sent)
    assert torch.equal(found["buffers"], held)


def test_seed__there_and_back(tmp_path) -> None:
    theta = torch.arange(4.0)
    contributions.keep_seed(tmp_path, 3, theta)
    assert torch.equal(contributions.load_seed(tmp_path, 3), theta)
    with pytest.raises(RunError, match="cannot be read"):
        contributions.load_seed(tmp_path, 4)


def test_model__exported__starts_another_run(tmp_path) -> None:
    specs = (TensorSpec("a", (2, 3), "float32"), TensorSpec("b", (4,), "float32", aliases=("c",)))
    layout = make_layout(specs, 2)
    thetas = [torch.arange(piece.size, dtype=torch.float32) for piece in layout.pieces]
    path = model.export_model(tmp_path / "model", "r", layout, thetas, [Version(0, 1)] * 2)
    assert load_file(path)["a"].shape == (2, 3)
    assert all(map(torch.equal, model.load_pieces(path, layout), thetas))
    other = make_layout((TensorSpec("a", (3, 3), "float32"),), 1)
    with pytest.raises(RunError, match="has 'a' as"):
        model.load_pieces(path, other)
    with pytest.raises(RunError, match="lacks tensor"):
        model.load_pieces(path, make_layout((TensorSpec("z", (3, 3), "float32"),), 1))
    with pytest.raises(RunError, match="cannot be read"):
        model.check_model_file(tmp_path / "none")
