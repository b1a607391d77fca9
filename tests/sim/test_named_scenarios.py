"""Every scenario that comes with Atoll ends well and keeps its promises."""

from __future__ import annotations

import pytest

from atoll.sim.scenario import check_expectations, named, names
from atoll.sim.search import watched


@pytest.mark.parametrize("name", names())
def test_it_ends_well_and_keeps_its_promises(name: str) -> None:
    outcome, world = watched(named(name))
    assert (outcome.kind, outcome.text) == ("ok", "")
    assert world is not None
    assert check_expectations(world) == []
