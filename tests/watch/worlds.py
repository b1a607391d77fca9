"""Tapes of virtual worlds, with the first line that a real syncer's driver writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atoll.core.records import Record, RunLine
from atoll.sim.plan import LearnerSpec
from atoll.sim.world import World
from atoll.store.tape import encode_line


def equal(count: int, **spec: Any) -> list[LearnerSpec]:
    return [LearnerSpec(name=f"l{i}", **spec) for i in range(count)]


def world(learners: list[LearnerSpec], **settings: Any) -> World:
    made = World(seed=3, learners=learners, **{"fragments": 4, "interval": 8, "steps": 160, **settings})
    made.run()
    return made


def tape_of(made: World) -> list[Record]:
    sizes = tuple(piece.size for piece in made.layout.pieces)
    first = RunLine(1, 0, "now", made.config.to_dict(), made.layout.fingerprint, sizes, {"atoll": "0"}, ())
    return [first, *made.syncer.tape]


def write_tape(run_dir: Path, lines: list[Record]) -> Path:
    """A run's directory with nothing but its tape."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "tape.jsonl").write_bytes(b"".join(encode_line(i, line) for i, line in enumerate(lines)))
    return run_dir
