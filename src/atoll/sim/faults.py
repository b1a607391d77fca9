"""A world whose faults come from a plan: it strikes, heals, keeps somebody alive, and demands an end."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from math import sqrt

from atoll.core import events as ev
from atoll.core.messages import Announce
from atoll.sim.agent import SimAgent
from atoll.sim.coverage import Coverage
from atoll.sim.links import Bulk, Line, Rate
from atoll.sim.plan import SYNCER_FAULTS, Fault, Plan, S
from atoll.sim.rogue import LIES, STRANGERS, Rogue, Stranger
from atoll.sim.world import World

PIECES_PER_S = 20
"""What a thin link is a share of, where the learner's own link has no limit."""
KEEP_ALIVE_NS = 5 * S
BUSY_SLOTS = ("grace", "final")


class NoProgress(Exception):
    """Liveness: a healed run does not end."""


class FaultWorld(World):
    """Runs a plan."""

    def __init__(self, plan: Plan, coverage: Coverage | None = None) -> None:
        self.plan = plan
        self.coverage = coverage if coverage is not None else Coverage()
        self.struck: list[Fault] = []
        """Faults that found something to break."""
        self.disturbed: dict[str, int] = {}
        """Learner (empty: the syncer) -> when a fault last touched it, its end included."""
        self.strangers: list[Stranger] = []
        self._chance = random.Random(f"faults/{plan.seed}")
        self._joined = 0
        self._armed: list[Fault] = []
        self._undo: dict[int, Callable[[], None]] = {}
        self._undone = 0
        settings = dict(plan.settings)
        super().__init__(
            seed=plan.seed,
            learners=plan.learners,
            expected=settings.pop("learners", None),
            sites=plan.sites,
            piece_values=plan.piece_values,
            merge_ns=plan.merge_ns,
            commit_ns=plan.commit_ns,
            learners_max=plan.learners_max,
            linger_ns=plan.linger_ns,
            lossy=plan.lossy,
            **settings,
        )
        for fault in plan.faults:
            self.at(fault.at_ns, lambda fault=fault: self._arm(fault))  # type: ignore[misc]
        if plan.heal_at_ns:
            self.at(plan.heal_at_ns, self._heal)

    def run_plan(self) -> None:
        """To its end. AssertionError: safety. NoProgress: liveness. Anything else: a crash."""
        while not self.syncer.over:
            if self.clock.now_ns > self.plan.limit_ns or not self.clock.run_next():
                raise NoProgress(self.why_pending())
        self.checkers.check_end()
        self.coverage.ended(self)

    # ------------------------------------------------------------ what chance may spoil

    def fault_of(self, announce: Announce) -> tuple[bool, bool, float]:
        usual = self._chance.uniform(0.5, 2.0) * sqrt(announce.c_steps)
        if self.plan.norms_rise and 2 * self.syncer.core.slots.reached > self.config.slots:
            usual *= self.plan.norms_rise
        if self._chance.random() >= self.plan.bad_share:
            return True, True, usual
        return self._chance.choice(
            ((False, False, 0.0), (False, True, usual), (True, False, 0.0), (True, True, 1e6 * usual))
        )

    def merge_is_finite(self) -> bool:
        return self._chance.random() >= self.plan.bad_share / 4

    def download_is_whole(self) -> bool:
        return self._chance.random() >= self.plan.bad_share / 4

    def calm_from(self, name: str) -> int | None:
        """After its last fault and after the healing; never where contributions are spoilt by chance."""
        if self.plan.bad_share or self.plan.learners_max or self.plan.norms_rise:
            return None
        return max(self.plan.heal_at_ns, self.disturbed.get(name, 0) + self.config.lease_interval_ns)

    def was_disturbed(self, name: str) -> bool:
        return bool(self.plan.bad_share) or name in self.disturbed or "" in self.disturbed

    # ------------------------------------------------------------ faults

    def after_syncer(self, event: ev.SyncerEvent) -> None:
        super().after_syncer(event)
        if self._armed:
            states = self.slot_states()
            for fault in [f for f in self._armed if f.when in states]:
                self._armed.remove(fault)
                self.clock.call_after(0, lambda fault=fault: self._strike(fault))  # type: ignore[misc]

    def slot_states(self) -> set[str]:
        """States that slots are in now, or that the run is finished."""
        if self.syncer.core.finish.phase == "finished":
            return {"finished"}
        states = {slot.state for slot in self.syncer.core.slots.live.values()}
        return states if states & set(BUSY_SLOTS) else states | {"open"}

    def _arm(self, fault: Fault) -> None:
        if fault.when and fault.when not in self.slot_states():
            self._armed.append(fault)
        else:
            self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        if self.syncer.over:
            return
        until_ns = self.clock.now_ns + fault.for_ns
        struck = self._strike_syncer(fault) if fault.kind in SYNCER_FAULTS else self._strike_learner(fault)
        if not struck:
            return
        who = "" if fault.kind in SYNCER_FAULTS else fault.learner
        self.disturbed[who] = max(self.disturbed.get(who, 0), until_ns)
        self.struck.append(fault)
        self.coverage.struck(fault.kind, self.slot_states())

    def _for(self, fault: Fault, undo: Callable[[], None]) -> None:
        """Undo it after its time, or when the run heals."""
        self._undone += 1
        key = self._undone
        self._undo[key] = undo
        self.clock.call_after(fault.for_ns, lambda: self._undo.pop(key, lambda: None)())

    def _strike_syncer(self, fault: Fault) -> bool:
        syncer = self.syncer
        match fault.kind:
            case "disk full":
                syncer.disk.full = True
                self._for(fault, lambda: setattr(syncer.disk, "full", False))
            case "disk slow":
                syncer.disk.slow *= fault.factor
                self._for(fault, lambda: setattr(syncer.disk, "slow", syncer.disk.slow / fault.factor))
            case "syncer sleeps":
                syncer.sleep()
                self._for(fault, syncer.wake)
            case "stop":
                syncer.feed(ev.StopRequested())
            case "stranger":
                self.strangers.append(Stranger(self, STRANGERS[int(fault.factor) - 1], self._known_name()))
            case "rogue":
                rogue = Rogue(self, LIES[int(fault.factor) - 1])
                longest_ns = max(fault.for_ns, 2 * self.config.lease_interval_ns)
                self._for(replace(fault, for_ns=longest_ns), rogue.hang_up)
        return True

    def _known_name(self) -> str:
        """Of a learner that has been granted a life; empty: nobody has."""
        return next((agent.name for agent in self.processes if agent.life is not None), "")

    def _strike_learner(self, fault: Fault) -> bool:
        """False where there is nobody to strike."""
        agent = self.agents.get(fault.learner)
        if fault.kind == "join":
            self._join_new(fault.learner)
            return True
        if agent is None or not agent.alive:
            return False
        match fault.kind:
            case "crash":
                self.crash(fault.learner, back_after_ns=fault.for_ns or None)
            case "agent dies":
                if agent.asleep:
                    return False
                agent.die_alone()
            case "terminate":
                self._terminate(agent, fault.for_ns)
            case "same name":
                self.join_beside(agent.spec)
            case "hang":
                self.hang(fault.learner, fault.for_ns)
            case "straggle":
                self._straggle(agent, fault)
            case "thin link":
                self._thin(agent, fault)
            case _:
                self._strike_connections(agent, fault)
        return True

    def _strike_connections(self, agent: SimAgent, fault: Fault) -> None:
        match fault.kind:
            case "cut control":
                agent.cut_control()
                self._for(fault, agent.mend_control)
            case "cut bulk":
                agent.bulk.cut()
                self._for(fault, agent.bulk.mend)
            case "stall bulk":
                agent.bulk.hold()
                self._for(fault, agent.bulk.release)
            case "partition up":
                self._hold(fault, agent, agent.up)
            case "partition down":
                agent.down.hold()
                self._for(fault, agent.down.release)
            case "partition":
                self._hold(fault, agent, agent.up, agent.down, agent.bulk)
            case "sleep":
                agent.sleep()
                self._for(fault, agent.wake)
            case _:
                raise ValueError(f"fault {fault.kind!r} is unknown")

    def _hold(self, fault: Fault, agent: SimAgent, *parts: Line | Bulk) -> None:
        for part in parts:
            part.hold()

        def undo() -> None:
            agent.note_line()
            for part in parts:
                part.release()

        self._for(fault, undo)

    def _terminate(self, agent: SimAgent, back_after_ns: int) -> None:
        if agent.learner is None:
            agent.die()
        else:
            agent.learner.interrupt()
        if back_after_ns:
            self.clock.call_after(back_after_ns, lambda: self.join(agent.spec))

    def _straggle(self, agent: SimAgent, fault: Fault) -> None:
        learner = agent.learner
        if learner is not None:
            learner.slow *= fault.factor
            self._for(fault, lambda: setattr(learner, "slow", learner.slow / fault.factor))

    def _thin(self, agent: SimAgent, fault: Fault) -> None:
        rates = (agent.up_rate, agent.down_rate)
        before = [rate.bytes_per_s for rate in rates]
        for rate in rates:
            rate.bytes_per_s = (rate.bytes_per_s or PIECES_PER_S * self.piece_bytes[0]) / fault.factor

        def undo() -> None:
            for rate, bytes_per_s in zip(rates, before, strict=True):
                _restore(rate, bytes_per_s)

        self._for(fault, undo)

    def _join_new(self, like: str) -> None:
        self._joined += 1
        spec = next(spec for spec in self.plan.learners if spec.name == like)
        self.join(replace(spec, name=f"n{self._joined}"))

    # ------------------------------------------------------------ healing

    def _heal(self) -> None:
        """What breaks at a time is over; faults that wait for a state of a slot may still come, each once."""
        for undo in list(self._undo.values()):
            undo()
        self._undo.clear()
        self._keep_alive()

    def _keep_alive(self) -> None:
        """As a launcher does: somebody is there to finish the run."""
        if self.syncer.over:
            return
        if not any(agent.alive for agent in self.processes):
            self._join_new(self.plan.learners[0].name)
        self.clock.call_after(KEEP_ALIVE_NS, self._keep_alive)


def _restore(rate: Rate, bytes_per_s: float) -> None:
    rate.bytes_per_s = bytes_per_s
