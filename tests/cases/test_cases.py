"""Each case is a script of its own, as a user would start it; 77 says that this machine cannot show it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parent.parent / "src"


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(path.name for path in HERE.glob("[0-9]*.py")))
def test_case(script: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, script], cwd=HERE, env=env, capture_output=True, text=True, timeout=200)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
