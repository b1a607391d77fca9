"""What is said to people never raises into a run: real descriptors, real pipes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from atoll.streams import Asked, Patient, Told

ATOLL = [sys.executable, "-m", "atoll"]


def python(text: str, *, shell: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    """Runs `text`, with its descriptors as the shell words say."""
    command = ["bash", "-c", f'exec "$0" -c "$1" {shell}', sys.executable, textwrap.dedent(text)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=os.environ | more)


def test_streams__descriptors_that_were_closed_are_not_given_to_files(tmp_path):
    path = tmp_path / "tape"
    done = python(
        f"""
        import os, sys
        from atoll.streams import settle
        settle(lasting=True)
        with open({str(path)!r}, "w") as tape:
            assert tape.fileno() > 2
            print("for people"); print("and more", file=sys.stderr); sys.stdout.isatty()
            tape.write("a line")
        """,
        shell="<&- >&- 2>&-",
    )
    assert done.returncode == 0
    assert path.read_text() == "a line"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("shell", [">/dev/full 2>/dev/full", "> >(true) 2>&1"])
def test_streams__that_take_nothing_do_not_end_a_run(shell, tmp_path):
    done = python(
        f"""
        import sys, time
        from pathlib import Path
        from atoll.streams import settle
        settle(lasting=True)
        for _ in range(3):
            time.sleep(0.05)
            print("for people" * 1000)
            print("a warning", file=sys.stderr)
        Path({str(tmp_path / "end")!r}).touch()
        """,
        shell=shell,
    )
    assert done.returncode == 0
    assert (tmp_path / "end").exists()


@pytest.mark.parametrize("lasting", [True, False])
def test_streams__another_encoding_is_no_error(lasting):
    done = python(
        f"""
        import sys
        from atoll.streams import settle
        settle(lasting={lasting})
        print("runs/\\u00e9t\\u00e9 \\u2192 \\udcff")
        print("\\u00fc", file=sys.stderr)
        """,
        PYTHONIOENCODING="ascii",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "runs/\\xe9t\\xe9 \\u2192 \\udcff\n", "\\xfc\n")


def test_patient__a_reader_that_does_not_read_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("atoll.streams.READER_WAIT_S", 0.05)
    reader, writer = os.pipe()
    stream = Patient(writer)
    started = time.monotonic()
    for _ in range(200):
        assert stream.write(b"x" * 1023 + b"\n") == 1024
    assert time.monotonic() - started < 5.0
    kept = os.read(reader, 1 << 20)
    assert len(kept) < 200 * 1024
    stream.write(b"it reads again\n")
    assert os.read(reader, 1 << 20).splitlines()[-1] == b"it reads again"
    os.close(reader)
    assert stream.write(b"gone\n") == 5
    os.close(writer)


def test_told__a_callback_that_fails_is_said_once_and_goes_no_further(caplog):
    told = Told()
    for _ in range(3):
        told(lambda text: 1 / 0, "line")
    assert [record.getMessage() for record in caplog.records] == [
        "what was to be shown could not be: ZeroDivisionError: division by zero"
    ]


def test_asked__a_closing_terminal_asks_only_once():
    asked = Asked()
    assert [asked.hear(n) for n in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP)] == [1, 1, 2, 2]


def test_commands__a_closed_pipe_ends_a_report_quietly():
    done = subprocess.run(
        ["bash", "-c", '"$@" --help | true; echo ${PIPESTATUS[0]}', "-", *ATOLL],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.strip() in {"0", "130"}
