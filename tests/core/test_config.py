from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.config import RunConfig
from atoll.errors import ConfigError


def config(**kw: object) -> RunConfig:
    values: dict[str, object] = {"run_id": "r", "steps": 240, "fragments": 8, "interval": 24, "learners": 4}
    return RunConfig(**{**values, **kw})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"interval": 25}, "interval=25 must be a multiple of fragments=8; try 32"),
        ({"quorum": 5}, "quorum=5 must be between 1 and learners=4"),
        ({"quorum": -1}, "quorum=-1"),
        ({"mode": "async"}, "mode='async' is unknown; choose one of decoupled"),
        ({"merge": "sum"}, "merge='sum'"),
        ({"take": "x"}, "take='x'"),
        ({"payload": "int4"}, "payload='int4'"),
        ({"steps": 0}, "steps=0"),
        ({"fragments": 0}, "fragments=0"),
        ({"overlap": -1}, "overlap=-1"),
        ({"learners": 0}, "learners=0"),
        ({"mode": "diloco"}, "fragments=1 and overlap=0"),
        ({"mode": "streaming", "overlap": 24}, "overlap=24 must be below interval=24"),
        ({"outer_lr": float("nan")}, "outer_lr=nan"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0"),
        ({"grace_factor": 1.0}, "grace_factor=1.0"),
        ({"stale_max": -1}, "stale_max=-1"),
        ({"lease_interval_ns": 1}, "heartbeat_interval_ns"),
        ({"interval": 8 * 10**18}, "interval=8000000000000000000 must be between 1 and 1000000000000"),
        ({"interval": 10**30, "fragments": 10**30}, "must be between 1 and 1048576"),
        ({"overlap": 10**20}, "overlap=100000000000000000000"),
        ({"stale_max": 10**20}, "stale_max=100000000000000000000"),
        ({"lease_interval_ns": 10**20}, "lease_interval_ns=100000000000000000000"),
        ({"start_wait_ns": 10**20}, "start_wait_ns=100000000000000000000"),
        ({"outer_lr": 1e20}, "outer_lr=1e+20 must be above 0 and at most 100"),
    ],
)
def test_settings_that_cannot_work_are_named_with_value_and_remedy(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(**fields)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_no_number_is_without_bound() -> None:
    """What a syncer takes it must also be able to send: what no message can hold is refused at the start."""
    numbers = [field.name for field in dataclasses.fields(RunConfig) if field.type in ("int", "float")]
    assert len(numbers) > 10
    for name in numbers:
        with pytest.raises(ConfigError, match=name):
            config(**{"fragments": 1, name: 2**64})


@given(st.integers(0, 100), st.integers(0, 7), st.integers(1, 8))
def test_next_slot_of_a_piece(after: int, piece: int, fragments: int) -> None:
    piece %= fragments
    run = config(fragments=fragments, interval=fragments * 3)
    slot = run.next_slot_of(piece, after)
    assert slot > after
    assert run.piece_of(slot) == piece
    assert slot - after <= fragments


@given(st.integers(1, 1000), st.integers(0, 4))
def test_quorum_is_never_more_than_the_ready_nor_less_than_1(ready: int, quorum: int) -> None:
    run = config(quorum=quorum)
    expected = max(1, min(quorum or (ready + 1) // 2, ready))
    assert run.quorum_of(ready) == expected
    assert config(mode="streaming").quorum_of(ready) == ready


def test_steps_are_rounded_up_to_whole_slots() -> None:
    run = config(steps=100)
    assert (run.slot_steps, run.slots, run.whole_steps) == (3, 34, 102)


def test_settings_survive_the_trip_to_a_learner() -> None:
    run = config(outer_lr=1)
    assert RunConfig.from_dict(run.to_dict()) == run
    with pytest.raises(ConfigError, match="'colour' is unknown"):
        RunConfig.from_dict({**run.to_dict(), "colour": 1})
    with pytest.raises(ConfigError, match="steps='x' must be of type int"):
        RunConfig.from_dict({**run.to_dict(), "steps": "x"})
    with pytest.raises(ConfigError, match="'interval' is missing"):
        RunConfig.from_dict({"run_id": "r", "steps": 1, "fragments": 1})
