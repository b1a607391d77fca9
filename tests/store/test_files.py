"""Files that are there as a whole or not at all, have one maker, and leave nothing behind."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from atoll.errors import RunError
from atoll.store import files, rundir
from atoll.store.files import insist, remove_asides, write_atomic, write_first
from atoll.store.rundir import open_rundir, owner_of, remove_run, take_directory


def _begin(where: str, run_id: str, at: float, out) -> None:  # type: ignore[no-untyped-def]
    while time.time() < at:
        pass
    try:
        open_rundir(Path(where), run_id)
        out.put(run_id)
    except RunError as error:
        out.put(str(error))


def test_open_rundir__of_processes_that_race_exactly_one_has_it(tmp_path):
    context = multiprocessing.get_context("fork")
    for round_ in range(5):
        where, out, at = tmp_path / f"run{round_}", context.SimpleQueue(), time.time() + 0.1
        racers = [context.Process(target=_begin, args=(str(where), f"run-{i}", at, out)) for i in range(6)]
        for racer in racers:
            racer.start()
        said = [out.get() for _ in racers]
        for racer in racers:
            racer.join()
        winners = [text for text in said if text.startswith("run-")]
        assert winners == [owner_of(where)]
        assert all("taken by another run" in text or "holds run" in text for text in said if text not in winners)
        assert not list(where.glob(".*.aside"))


def test_write_first__where_the_file_system_has_no_links(tmp_path, monkeypatch):
    def no_links(*paths):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(files.os, "link", no_links)
    assert write_first(tmp_path / "a", b"one")
    assert not write_first(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"one"


def test_take_directory__refuses_what_another_has(tmp_path):
    take_directory(tmp_path / "run", {"run_id": "one"})
    with pytest.raises(RunError, match=r"holds run .one."):
        take_directory(tmp_path / "run", {"run_id": "two"})
    assert owner_of(tmp_path / "run") == "one"


def test_remove_run__leaves_what_is_not_ours(tmp_path):
    made, kept, shared = tmp_path / "made", tmp_path / "kept", tmp_path / "shared"
    kept.mkdir()
    for path in (made, kept, shared):
        open_rundir(path, "run")
        (path / "logs").mkdir()
        (path / "logs" / "l1.log").touch()
    (shared / "notes.txt").touch()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    (shared / "steps").symlink_to(outside)
    remove_run(made, keep=False)
    remove_run(kept, keep=True)
    remove_run(shared, keep=False)
    assert not made.exists()
    assert list(kept.iterdir()) == []
    assert [path.name for path in shared.iterdir()] == ["notes.txt"]
    assert (outside / "precious").exists()


def test_asides__of_writers_that_were_killed_are_removed_and_fresh_ones_stay(tmp_path):
    old, fresh, foreign = tmp_path / ".0001.a.0123abcd.aside", tmp_path / ".x.89abcdef.aside", tmp_path / ".mine.aside"
    for path in (old, fresh, foreign):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 3600,) * 2)
    os.utime(foreign, (time.time() - 3600,) * 2)
    assert remove_asides(tmp_path) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.aside", ".x.89abcdef.aside"]
    assert remove_asides(tmp_path / "missing") == 0


def test_open_rundir__a_directory_with_nothing_but_an_aside_is_empty(tmp_path):
    old = tmp_path / ".run.toml.0123abcd.aside"
    old.write_bytes(b"half")
    os.utime(old, (time.time() - 3600,) * 2)
    open_rundir(tmp_path, "run")
    assert not old.exists()


def test_write_atomic__a_failure_leaves_nothing(tmp_path, monkeypatch):
    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_all", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "a", b"data")
    assert list(tmp_path.iterdir()) == []


def test_insist__waits_for_room_and_says_so_once(monkeypatch):
    monkeypatch.setattr(files, "RETRY_S", 0.0)
    left, told = [3], []

    def work() -> None:
        left[0] -= 1
        if left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

    insist(work, told.append)
    assert len(told) == 1


@pytest.mark.parametrize(("number", "wait_s"), [(errno.ENOSPC, 0.0), (errno.EACCES, 60.0), (errno.ENOENT, 60.0)])
def test_insist__does_not_wait_for_ever_nor_for_what_will_not_change(number, wait_s):
    def work() -> None:
        raise OSError(number, "no")

    with pytest.raises(OSError):
        insist(work, lambda error: None, wait_s=wait_s)


def test_is_gone__removed_or_replaced(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    inode = path.stat().st_ino
    assert not rundir.is_gone(path, inode)
    path.rename(tmp_path / "moved")
    assert rundir.is_gone(path, inode)
    path.mkdir()
    assert rundir.is_gone(path, inode)
