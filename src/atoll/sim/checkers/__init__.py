"""What must hold at every instant of every run. Kept apart from the system: checkers read, and change nothing.

* `tape.py`      versions, fates, one contribution once
* `shadow.py`    members, clocks and contributions worked out again from the wire and the tape
* `pace.py`      quorum, grace, closing and collecting as declared, neither early nor late
* `books.py`     the two books of R8, bodies, queues
* `lives.py`     how lives end and follow one another
* `transfers.py` what agents move, in which order
* `waits.py`     what learners do: captures, waits, first parameters
* `progress.py`  R4's bound, and what must hold when the run is over

The drivers call the hooks below; a broken rule is an AssertionError that says which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.core import events as ev
from atoll.core.messages import Announce, Life
from atoll.sim.checkers.books import Books
from atoll.sim.checkers.lives import Lives
from atoll.sim.checkers.pace import Pace
from atoll.sim.checkers.progress import Progress
from atoll.sim.checkers.shadow import Shadow
from atoll.sim.checkers.tape import Tape
from atoll.sim.checkers.transfers import Transfers
from atoll.sim.checkers.waits import Waits

if TYPE_CHECKING:
    from atoll.sim.learner import SimLearner
    from atoll.sim.syncer import Published
    from atoll.sim.world import World


class Checkers:
    """All checkers of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._read = 0
        self.tape = Tape(world)
        self.shadow = Shadow(world)
        self.pace = Pace(world, self.shadow)
        self.books = Books(world)
        self.lives = Lives(world)
        self.waits = Waits(world, self.tape)
        self.transfers = Transfers(world)
        self.progress = Progress(world)

    def _read_tape(self) -> None:
        """Let the checkers that read the tape catch up, line by line."""
        tape = self._world.syncer.tape
        while self._read < len(tape):
            record = tape[self._read]
            self._read += 1
            self.tape.read(record)
            self.lives.read(record)
            self.pace.read(record)
            self.shadow.read(record)

    # ------------------------------------------------------------ the syncer's side

    def before(self, event: ev.SyncerEvent) -> None:
        """The syncer is about to see this event."""
        self.shadow.before(event)
        if isinstance(event, ev.StopRequested):
            self.pace.stopped()

    def after_syncer(self, event: ev.SyncerEvent) -> None:
        """Its actions are carried out."""
        self._read_tape()
        if isinstance(event, ev.CommitDone):
            self.books.touch_all()
            self.shadow.all_told()
        self.shadow.after(event)
        self.pace.after()
        self.books.check()

    def seed_committed(self, handed_in: dict[int, Life], seeder: Life | None) -> None:
        """R22: version 0 is of one learner, all of it."""
        assert set(handed_in) == set(range(self._world.config.fragments)), "version 0 is committed and is not whole"
        assert set(handed_in.values()) == {seeder}, f"version 0 is of several learners: {handed_in}"

    def accepted(self, action: ev.Accept) -> None:
        self._read_tape()
        self.shadow.accepted(action)

    def arrived(self, life: Life, piece: int, seq: int, *, ok: bool, norm: float) -> None:
        """All bytes of a contribution are in; what the check will find."""
        self.tape.arrived(life, piece, seq, ok=ok, norm=norm)

    def sent(self, stream: int, name: str, message: object) -> Life | None:
        """The syncer says something on a stream: whose it is."""
        self._read_tape()
        return self.shadow.sent(stream, name, message)

    def published(self, piece: int, found: Published) -> None:
        self._read_tape()
        self.tape.published(piece, found)

    # ------------------------------------------------------------ the learners' side

    def touched(self, learner: SimLearner) -> None:
        """This learner is about to change."""
        self.books.touch(learner)

    def captured(self, learner: SimLearner, announce: Announce) -> None:
        self.waits.captured(learner, announce)
        self.transfers.captured(learner.agent, announce)

    def waits_for(self, learner: SimLearner, cause: str) -> None:
        self.waits.waits(learner, cause)

    def steps(self, learner: SimLearner) -> None:
        """This learner is about to book a step."""
        self.waits.steps(learner)

    def after_learner(self, learner: SimLearner) -> None:
        """This learner has passed a boundary."""
        self.books.check()
        self.waits.passed(learner)
        self.transfers.places(learner.agent)

    # ------------------------------------------------------------ the end

    def check_end(self) -> None:
        """After the finish: nothing pending, books equal, every live learner holds the final version."""
        self._read_tape()
        self.books.check_all()
        self.tape.check_end()
        self.progress.check_end()
