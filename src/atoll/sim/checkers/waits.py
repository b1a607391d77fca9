"""What learners do: they capture what they may, wait where R9 says, and train from committed parameters only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.core.messages import Announce, Life

if TYPE_CHECKING:
    from atoll.sim.checkers.tape import Tape
    from atoll.sim.learner import SimLearner
    from atoll.sim.world import World


class Waits:
    """Checks each capture, step and wait of each learner."""

    def __init__(self, world: World, tape: Tape) -> None:
        self._world = world
        self._tape = tape
        self._captured: dict[Life, dict[int, Announce]] = {}
        """Per life and piece, the newest capture."""
        self._seq: dict[Life, int] = {}

    def captured(self, learner: SimLearner, announce: Announce) -> None:
        """R2, R6, R7: the anchor is what it holds, one per piece is unsettled, slots serve their piece."""
        life, piece, config = learner.life, announce.piece, self._world.config
        assert announce.seq == self._seq.get(life, 0) + 1, f"{life}: seq {announce.seq} out of turn"
        self._seq[life] = announce.seq
        assert tuple(announce.anchor) == learner.held[piece], (
            f"{life} piece {piece}: the delta is against {learner.held[piece]}, not {tuple(announce.anchor)} (hazard 2)"
        )
        assert announce.slot % config.fragments == piece, f"slot {announce.slot} does not serve piece {piece}"
        assert announce.own_step == learner.core.book.steps
        assert 1 <= announce.c_steps <= announce.own_step
        tokens = announce.c_steps * learner.agent.spec.tokens
        assert announce.c_tokens == tokens, f"{life}: {announce.c_steps} steps weigh {announce.c_tokens}"
        mine = self._captured.setdefault(life, {})
        before = mine.get(piece)
        assert before is None or self._settled(learner, before), f"{life} piece {piece}: two are unsettled (R6)"
        mine[piece] = announce

    def _settled(self, learner: SimLearner, announce: Announce) -> bool:
        """It has a fate, or an update that contains it was taken."""
        return (learner.life, announce.seq) in self._tape.fated or self._taken(learner, announce)

    def _taken(self, learner: SimLearner, announce: Announce) -> bool:
        found = self._tape.merged_in.get((learner.life, announce.seq))
        return found is not None and learner.held[announce.piece][1] >= found[1]

    def steps(self, learner: SimLearner) -> None:
        """A step is about to be booked: first parameters are there, the run is not over, and no lock is overrun."""
        assert not learner.core.over, "a step after the end"
        published = self._world.syncer.published
        for piece, held in enumerate(learner.held):
            assert held >= (1, 0), f"{learner.life} trains without parameters of piece {piece} (hazard 8)"
            assert held <= tuple(published[piece].version), "parameters that were never committed (hazard 10)"

    def begins(self, learner: SimLearner) -> None:
        """R22: one that knows of the end begins no step; in the lock modes up to `overlap` more."""
        ending = learner.core._finish_slot is not None and not self._world.config.locked
        assert not ending, f"{learner.life} begins a step and knows that the run is ending"

    def passed(self, learner: SimLearner) -> None:
        """R9: in decoupled an update is taken at the first boundary after it arrived."""
        if not self._world.config.locked and learner.alive:
            assert not learner.core.staged(), f"{learner.life} holds updates back: {learner.core.staged()}"

    def waits(self, learner: SimLearner, cause: str) -> None:
        """R9: a training thread waits in four places."""
        core, config = learner.core, self._world.config
        if cause == "parameters":
            assert core.book.steps == 0, f"{learner.life} waits for parameters in the middle of its life"
        elif cause == "lock":
            assert config.locked, f"{learner.life} waits for others in decoupled mode"
            knows = learner.agent.stream is None and not learner.agent.unread
            assert not knows, f"{learner.life} waits for others and has no stream"
            mine = self._captured.get(learner.life, {}).values()
            due = [a for a in mine if a.own_step + config.overlap <= core.book.steps]
            assert any(not self._taken(learner, a) for a in due), f"{learner.life} waits and nothing is due"
        else:
            assert cause == "finish", f"{learner.life} waits for {cause}"
            slots = self._world.syncer.core.slots
            assert slots.closed >= slots.last, f"{learner.life} waits in the finish while slots go on"
