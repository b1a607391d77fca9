"""`atoll sim run FILE|NAME`: one scenario, what came of it, and whether it kept its promises."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tyro

from atoll.errors import ConfigError
from atoll.sim.faults import FaultWorld
from atoll.sim.plan import S
from atoll.sim.scenario import Scenario, check_expectations, figures, find, names
from atoll.sim.search import Outcome, watched
from atoll.store.tape import encode_line

EXIT_CODES = {"ok": 0, "crash": 1, "safety": 4, "liveness": 5}
BROKEN_PROMISE = EXIT_CODES["safety"]
PROGRESS_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """Run one scenario in virtual time and hold its promises against it.

    Exit status: 0 all well, 1 a crash, 2 bad input, 4 a safety rule or a promise was broken, or two runs differ, 5 no
    progress.
    """

    scenario: tyro.conf.Positional[str]
    """A scenario file, or a name from `atoll sim list`."""
    trace: Path | None = None
    """Write the run's tape there: one JSON line for each record."""
    repeat: int = 1
    """Run it so often; all traces must be equal."""


def list_scenarios() -> int:
    """One line each."""
    for name in names():
        print(f"{name:<20} {find(name).about}")
    return 0


def run(options: Run) -> int:
    """The exit status."""
    if options.repeat < 1:
        raise ConfigError(f"repeat={options.repeat} must be at least 1")
    scenario = find(options.scenario)
    if options.trace is not None and options.trace.resolve() == Path(options.scenario).resolve():
        raise ConfigError(f"trace={str(options.trace)!r} is the scenario itself; name another file")
    if scenario.about:
        print(f"{scenario.plan.name}: {scenario.about}")
    with _progress_told() as on_start:
        outcome, world = watched(scenario.plan, on_start)
    trace = _trace(world)
    if options.trace is not None:
        _write(options.trace, trace)
    code = max(EXIT_CODES[outcome.kind], _report(scenario, outcome, world))
    if options.repeat > 1 and not _all_equal(scenario, trace, options.repeat):
        code = max(code, BROKEN_PROMISE)
    return code


@contextmanager
def _progress_told() -> Iterator[Callable[[FaultWorld], None]]:
    """What is called with the world makes a thread say on stderr, now and then, how far it is."""
    over = threading.Event()

    def tell(world: FaultWorld) -> None:
        while not over.wait(PROGRESS_S):
            reached = f"slot {world.syncer.core.slots.reached:,} of {world.config.slots:,}"
            print(f"{reached}, {world.clock.now_ns / S:,.1f} s of virtual time", file=sys.stderr, flush=True)

    def on_start(world: FaultWorld) -> None:
        threading.Thread(target=tell, args=(world,), daemon=True).start()

    try:
        yield on_start
    finally:
        over.set()


def _report(scenario: Scenario, outcome: Outcome, world: FaultWorld | None) -> int:
    """Print outcome, figures and what was missed; the exit status of the promises."""
    if outcome.text:
        print("\n".join(scenario.plan.describe()))
    spent = f" in {world.clock.now_ns / S:.1f} s of virtual time" if world is not None else ""
    said = f": {outcome.text}" if outcome.text else ""
    print(f"{outcome.kind}{said}\n{outcome.slots} slots{spent}")
    if world is None or outcome.kind != "ok":
        return 0
    for line in _figures(scenario, world):
        print(line)
    for number, fault in enumerate(scenario.plan.faults, 1):
        if fault not in world.struck:
            print(f"did not strike: [[fault]] {number}, {fault.kind}: its time never came, or it found nothing")
    missed = check_expectations(world)
    for text in missed:
        print(f"missed: {text}")
    return BROKEN_PROMISE if missed else 0


def _figures(scenario: Scenario, world: FaultWorld) -> Iterator[str]:
    """A table: what was promised, what was reached."""
    promised = scenario.plan.expect
    yield f"{'':<20}{'promised':>12}{'reached':>14}"
    for key, reached in figures(world).items():
        wanted = f"{promised[key]:g}" if key in promised else "-"
        yield f"{key:<20}{wanted:>12}{reached:>14.6g}"


def _trace(world: FaultWorld | None) -> bytes:
    """The tape as a run on real machines writes it."""
    tape = world.syncer.tape if world is not None else []
    return b"".join(encode_line(i, record) for i, record in enumerate(tape))


def _write(path: Path, trace: bytes) -> None:
    try:
        path.write_bytes(trace)
    except OSError as error:
        raise ConfigError(f"trace={str(path)!r} cannot be written: {error.strerror}") from None
    print(f"trace: {path}, {len(trace.splitlines())} lines")


def _all_equal(scenario: Scenario, trace: bytes, repeat: int) -> bool:
    """Run it again and compare line by line."""
    for number in range(2, repeat + 1):
        again = _trace(watched(scenario.plan)[1])
        if again != trace:
            pairs = zip(trace.splitlines(), again.splitlines(), strict=False)
            line = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
            where = f"at line {line}" if line is not None else "in length"
            print(
                f"run {number} of {repeat} differs from the first {where}: the core or the world is not deterministic"
            )
            return False
    print(f"{repeat} equal traces")
    return True
