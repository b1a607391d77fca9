"""Step logs on disks that are full for a while, or for good."""

from __future__ import annotations

import errno
import json
import logging
import os

import pytest

from atoll.errors import ConfigError, RunError
from atoll.store import steps
from atoll.store.steps import LifeLogs, StepLog, StepReader, check_folder


class Disk:
    """Takes `room` bytes, and then says that it is full."""

    def __init__(self, monkeypatch, room: int) -> None:
        self.room = room
        self._write = os.write
        monkeypatch.setattr("atoll.store.files.os.write", self.write)

    def write(self, fd: int, data: bytes) -> int:
        took = min(self.room, len(data))
        if not took:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= took
        return self._write(fd, bytes(data[:took]))


def numbers(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_step_log__rows_wait_for_room_and_no_line_is_torn(tmp_path, monkeypatch, caplog):
    path = tmp_path / "steps" / "a-1.jsonl"
    with caplog.at_level(logging.WARNING, "atoll"), StepLog(path) as log:
        log.write(1, 10, 0.5)
        disk = Disk(monkeypatch, room=20)
        for step in (2, 3, 4):
            log.write(step, 10, 0.5, all_reduce_ns=7)
            assert numbers(path) == [1]
        disk.room = 10**6
        log.write(5, 10, 0.5)
        assert numbers(path) == [1, 2, 3, 4, 5]
    assert [row.step for row in StepReader(path).follow()] == [1, 2, 3, 4, 5]
    assert len(caplog.records) == 1, "said once"
    assert "No space left" in caplog.text


def test_step_log__what_has_no_room_at_the_end_is_counted_and_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(steps, "CLOSE_WAIT_S", 0.0)
    monkeypatch.setattr(steps, "ROWS_MAX", 2)
    log = StepLog(tmp_path / "a-1.jsonl")
    Disk(monkeypatch, room=0)
    for step in (1, 2, 3):
        log.write(step, 10, 0.5)
    log.close()
    log.close()
    assert [r.getMessage() for r in caplog.records if "lost" in r.getMessage()] == [
        f"3 rows of step log {tmp_path / 'a-1.jsonl'} are lost: the disk took no more"
    ]


def test_step_log__a_disk_that_is_full_before_the_file_is_made(tmp_path, monkeypatch):
    real, full = os.open, [True]

    def opened(path, flags, *more):
        if full[0] and flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, flags, *more)

    monkeypatch.setattr(steps.os, "open", opened)
    log = StepLog(tmp_path / "a-1.jsonl")
    log.write(1, 10, 0.5)
    full[0] = False
    log.write(2, 10, 0.5)
    log.close()
    assert numbers(tmp_path / "a-1.jsonl") == [1, 2]


def test_step_log__a_place_that_can_never_be_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"^step log .*file/a-1.jsonl cannot be written: .*; choose another$"):
        StepLog(tmp_path / "file" / "a-1.jsonl")


def test_step_log__one_of_another_run_is_kept_aside_and_it_is_said(tmp_path, caplog):
    path = tmp_path / "a-1.jsonl"
    for step in (1, 2, 3):
        with StepLog(path) as log:
            log.write(step, 10, 0.5)
    kept = [numbers(tmp_path / name) for name in ("a-1.jsonl.1", "a-1.jsonl.2", "a-1.jsonl")]
    assert kept == [[1], [2], [3]]
    assert [r.getMessage() for r in caplog.records] == [
        f"step log {path} is there already, of another run; it is kept as a-1.jsonl.{n}" for n in (1, 2)
    ]


def test_life_logs__each_life_has_its_own_and_begins_with_step_1(tmp_path):
    logs = LifeLogs(tmp_path, "a")
    for generation, count in ((1, 3), (7, 2)):
        logs.begin(generation)
        for _ in range(count):
            logs.write(4, None)
    logs.close()
    logs.close()
    logs.write(4, 0.5)
    assert numbers(tmp_path / "a-1.jsonl") == [1, 2, 3]
    assert numbers(tmp_path / "a-7.jsonl") == [1, 2]


def test_life_logs__a_folder_that_goes_away_ends_no_training(tmp_path, caplog):
    folder = tmp_path / "steps"
    logs = LifeLogs(folder, "a")
    logs.begin(1)
    logs.write(4, 0.5)
    (folder / "a-1.jsonl").unlink()
    folder.rmdir()
    folder.touch()
    logs.begin(2)
    logs.write(4, 0.5)
    logs.close()
    assert "a-2.jsonl cannot be written" in caplog.text
    with pytest.raises(RunError, match="cannot be written"):
        LifeLogs(folder, "a").begin(1)


def test_life_logs__without_a_folder_nothing_is_written_and_no_loss_is_read():
    logs, loss = LifeLogs(None, "a"), object()
    logs.begin(1)
    logs.write(4, 0.5)
    assert logs.read(loss) is loss
    logs.close()


def test_folder__is_looked_at_and_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_folder(None) is None
    assert check_folder("run/steps") == tmp_path / "run" / "steps"
    assert not (tmp_path / "run").exists(), "nothing is made before the join"
    (tmp_path / "file").touch()
    bad_ones = ((5, "must be a path"), (tmp_path / "file", "cannot hold step logs"), ("file/x", "file is not a folder"))
    for bad, why in bad_ones:
        with pytest.raises(ConfigError, match=why) as caught:
            check_folder(bad)
        assert "\n" not in str(caught.value)
