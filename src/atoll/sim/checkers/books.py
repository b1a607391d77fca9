"""The two books of R8 agree at every instant, messages on the wire included; bodies hold what the books say."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.sim.learner import SimLearner
    from atoll.sim.world import World

CHECK_ALL_EVERY = 64
"""Events after which the books of all are compared, not only of those that can have changed."""


class Books:
    """Compares the books of learners that can have changed since the last look."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._touched: dict[int, SimLearner] = {}
        self._looks = 0

    def touch(self, learner: SimLearner) -> None:
        self._touched[id(learner)] = learner

    def touch_all(self) -> None:
        for learner in self._world.lives:
            if learner.alive:
                self.touch(learner)

    def check(self) -> None:
        self._looks += 1
        if self._looks % CHECK_ALL_EVERY == 0:
            self.touch_all()
            self._queues()
        for learner in self._touched.values():
            if learner.alive:
                self._books(learner)
        self._touched.clear()

    def check_all(self) -> None:
        self.touch_all()
        self.check()

    def _books(self, learner: SimLearner) -> None:
        """computed = merged + overwritten + lost + pending, with the syncer's merged and the learner's pending."""
        member = self._world.syncer.core.roster.by_life(learner.life)
        if member is None:
            return
        core, account = learner.core, member.account
        tokens, over = core.book.tokens, core.over
        assert account.heard.tokens <= tokens, f"{learner.life}: the syncer heard more than was computed"
        for piece, book in enumerate(core.book.pieces):
            in_flight = book.in_flight_tokens
            assert book.local_tokens + in_flight + book.merged + book.overwritten + book.lost == tokens, (
                f"{learner.life} piece {piece}: {book} does not add up to {tokens}"
            )
            merged = account.merged[piece]
            unheard = merged - book.merged
            assert unheard in (0, in_flight), (
                f"{learner.life} piece {piece}: syncer merged {merged}, learner knows {book.merged}, "
                f"in flight {in_flight}"
            )
            assert account.heard.overwritten[piece] <= book.overwritten
            assert account.heard.lost[piece] <= book.lost
            held = book.local_tokens + (0 if book.detached else in_flight)
            learner.body.check(piece, held, over=over)

    def _queues(self) -> None:
        """Every queue is bounded."""
        config, core = self._world.config, self._world.syncer.core
        # A slot on its way holds a contribution, of which each learner has one per piece; few can be empty.
        empty = [slot.number for slot in core.slots.live.values() if not slot.participants]
        assert len(empty) <= 2 * config.fragments + 1, f"slots {empty} are on their way and hold nothing"
        for member in core.roster.with_open():
            assert len(member.open) <= config.fragments, "one contribution per piece"
        for agent in self._world.processes:
            assert len(agent.places) <= config.places, "staging places are bounded"
            waiting = len(agent.core._uploads) + len(agent.core._downloads)
            assert waiting <= 2 * config.fragments, f"{agent.name}: {waiting} transfers wait for their turn"
