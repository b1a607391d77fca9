"""What every benchmark tells beside its figures: commit, versions, hardware."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import atoll

ROOT = Path(__file__).parent.parent
OUT = ROOT / "benchmarks" / "out"


def circumstances() -> dict[str, Any]:
    """Commit (with `+` when the tree is dirty), versions, processor, cores."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "commit": git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else ""),
        "atoll": atoll.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": names[0].split(":")[1].strip() if names else platform.processor(),
        "cores": os.cpu_count(),
    }


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high): the distribution-free 95% interval of the median, by order statistics."""
    ordered = sorted(values)
    count = len(ordered)
    half = 1.96 * count**0.5 / 2
    low, high = int(count / 2 - half), int(count / 2 + half)
    return statistics.median(ordered), ordered[max(0, low)], ordered[min(count - 1, high)]


def write(name: str, figures: dict[str, Any]) -> None:
    """JSON beside the print: benchmarks/out/<name>.json."""
    OUT.mkdir(exist_ok=True)
    (OUT / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))
