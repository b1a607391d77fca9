"""What must have come of a run: warnings shown, work merged, nobody forgotten (R4's bound, hazards 11, 42, 44)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.sim.world import World


class Progress:
    """Looks at the whole run when it is over."""

    def __init__(self, world: World) -> None:
        self._world = world

    def check_end(self) -> None:
        world = self._world
        shown = sum("alone filled the last" in notice for notice in world.syncer.notices)
        due = world.checkers.pace.warnings_due
        assert shown == due, f"one learner alone filled slot after slot {due} times, people were told {shown} times"
