"""A plan from a seed: set-up and faults, aimed so that rare states of slots are struck as well as common ones."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from atoll.sim.plan import FAULTS, MS, SYNCER_FAULTS, Fault, LearnerSpec, Plan, S, Site
from atoll.sim.rogue import LIES, STRANGERS

SLOTS_MIN, SLOTS_MAX = 110, 140
PIECE_VALUES = 10_000
HEAL_AT = 0.6
"""Share of the run's expected time after which nothing breaks any more by the clock."""
LIMIT_FACTOR = 12
AIMED = 0.85
"""Share of faults that wait for a state of a slot."""
EARLY = 0.16
"""Share of faults that strike while learners join."""
THIN = 0.1
"""Share of plans that are only about one thin or long link."""
CALM = 0.2
"""Share of plans with hardly any fault, in which learners are held to R4's bound."""


def draw(seed: int) -> Plan:
    """Everything, from the seed."""
    chance = random.Random(seed)
    if chance.random() < THIN:
        return _thin(chance, seed)
    settings = _settings(chance)
    slot_steps = settings["interval"] // settings["fragments"]
    base_ns = chance.choice((20, 50, 100, 250)) * MS
    sites = tuple(_site(chance, slot_steps, base_ns)) if chance.random() < 0.2 else ()
    count = chance.choice((1, 2, 2, 3, 3, 4, 5))
    learners = tuple(_learner(chance, f"l{i}", slot_steps, base_ns, sites) for i in range(count))
    settings["learners"] = count
    settings["quorum"] = chance.choice((0, 0, 1, count))
    expected_ns = _expected_ns(settings, learners)
    calm = chance.random() < CALM
    faults = _faults(chance, learners, expected_ns, settings, chance.randint(0, 2) if calm else None)
    learners_max = count + chance.choice((0, 1)) if not calm and chance.random() < 0.25 else 0
    if learners_max:
        faults += [_at(chance, "join", learners, expected_ns) for _ in range(2)]
    faults.sort(key=lambda fault: fault.at_ns)
    return Plan(
        seed=seed,
        settings=settings,
        learners=learners,
        sites=sites,
        faults=tuple(faults),
        piece_values=PIECE_VALUES,
        lossy=chance.random() < 0.5,
        linger_ns=chance.choice((0, 0, 300, 3000)) * MS,
        bad_share=0.0 if calm else chance.choice((0.0, 0.02, 0.2)),
        norms_rise=0.0 if calm else chance.choice((0.0, 0.0, 30.0)),
        merge_ns=chance.choice((1, 2, 40, 200)) * MS,
        commit_ns=chance.choice((1, 1, 30)) * MS,
        learners_max=learners_max,
        heal_at_ns=int(HEAL_AT * expected_ns),
        limit_ns=LIMIT_FACTOR * expected_ns + 600 * S,
    )


def _thin(chance: random.Random, seed: int) -> Plan:
    """Equal learners without a fault; one is far away, or behind a link that carries a part of its load."""
    fragments, slot_steps, step_ns = chance.choice((4, 8)), chance.choice((1, 2, 3)), chance.choice((50, 100)) * MS
    share = chance.uniform(0.2, 0.95)
    rate = _need(slot_steps, step_ns) * share
    jitter = chance.choice((0.0, 0.02, 0.2))
    usual = [LearnerSpec(name=f"l{i}", step_ns=step_ns, jitter=jitter) for i in range(chance.randint(1, 3))]
    what = chance.choice(("up", "up", "down", "down", "far"))
    thin = replace(
        usual[0],
        name=what,
        latency_ns=chance.randint(40, 150) * MS if what == "far" else chance.choice((1, 20)) * MS,
        up_bytes_per_s=rate if what == "up" else 0.0,
        down_bytes_per_s=rate if what == "down" else 0.0,
    )
    settings = {
        "fragments": fragments,
        "interval": fragments * slot_steps,
        "overlap": chance.choice((1, 2, 4)),
        "steps": chance.randint(2 * SLOTS_MIN, 3 * SLOTS_MIN) * slot_steps,
        "take": chance.choice(("rebase", "overwrite")),
        "learners": len(usual) + 1,
    }
    expected_ns = settings["steps"] * step_ns + 2 * S
    return Plan(
        seed=seed,
        settings=settings,
        learners=(*usual, thin),
        piece_values=PIECE_VALUES,
        heal_at_ns=expected_ns // 8,
        limit_ns=LIMIT_FACTOR * expected_ns + 600 * S,
    )


def _settings(chance: random.Random) -> dict[str, Any]:
    mode = chance.choice(("decoupled",) * 5 + ("streaming", "diloco"))
    fragments = 1 if mode == "diloco" else chance.choice((1, 2, 3, 4, 8))
    slot_steps = chance.choice((1, 1, 2, 3, 6))
    overlap = 0 if mode == "diloco" else chance.choice((0, 1, 2, 2, 4, 4))
    if mode == "streaming":
        overlap = min(overlap, fragments * slot_steps - 1)
    lease_ns = chance.choice((1, 2, 5)) * S
    return {
        "mode": mode,
        "fragments": fragments,
        "interval": fragments * slot_steps,
        "overlap": overlap,
        "steps": chance.randint(SLOTS_MIN, SLOTS_MAX) * slot_steps - chance.choice((0, slot_steps - 1)),
        "take": chance.choice(("rebase", "overwrite")),
        "stale_max": chance.choice((0, 1, 1, 2)),
        "grace_factor": chance.choice((0.0, 0.8, 0.8, 0.8)),
        "heartbeat_interval_ns": lease_ns // chance.choice((4, 6, 10)),
        "lease_interval_ns": lease_ns,
        "start_wait_ns": chance.choice((0, 1, 5)) * S,
    }


def _need(slot_steps: int, step_ns: int) -> float:
    """Bytes a second that one direction must carry: a piece per slot."""
    return 2 * PIECE_VALUES / (slot_steps * step_ns / S)


def _site(chance: random.Random, slot_steps: int, base_ns: int) -> list[Site]:
    need = _need(slot_steps, base_ns)
    return [
        Site(name="s", up_bytes_per_s=need * chance.uniform(0.3, 4), down_bytes_per_s=need * chance.uniform(0.3, 4))
    ]


def _learner(
    chance: random.Random, name: str, slot_steps: int, base_ns: int, sites: tuple[Site, ...]
) -> LearnerSpec:
    step_ns = int(base_ns * chance.choice((1, 1, 1, 1.5, 2, 4, 8)))
    need = _need(slot_steps, step_ns)
    return LearnerSpec(
        name=name,
        step_ns=step_ns,
        jitter=chance.choice((0.0, 0.02, 0.2, 0.6)),
        tail=chance.choice((0.0, 0.0, 0.0, 0.05)),
        tokens=chance.randint(1, 2000),
        latency_ns=chance.choice((0, 1, 20, 80)) * MS,
        up_bytes_per_s=chance.choice((0.0, 0.0, need * chance.uniform(0.15, 3))),
        down_bytes_per_s=chance.choice((0.0, 0.0, need * chance.uniform(0.15, 3))),
        site=sites[0].name if sites and chance.random() < 0.7 else "",
        joins_at_ns=chance.choice((0, 0, 0, 3 * S)),
    )


def _expected_ns(settings: dict[str, Any], learners: tuple[LearnerSpec, ...]) -> int:
    """At the pace of the K-th fastest."""
    steps_ns = sorted(spec.step_ns for spec in learners)
    half = -(-len(learners) // 2)
    needed = len(learners) if settings["mode"] != "decoupled" else settings["quorum"] or half
    return int(settings["steps"] * steps_ns[needed - 1] + 2 * S)


def _faults(
    chance: random.Random,
    learners: tuple[LearnerSpec, ...],
    expected_ns: int,
    settings: dict[str, Any],
    count: int | None,
) -> list[Fault]:
    faults = []
    for _ in range(chance.choice((6, 10, 14, 18, 22)) if count is None else count):
        fault = _fault(chance, learners, expected_ns, settings)
        faults.append(fault)
        if fault.when == "retrying":
            faults.append(Fault(kind="disk full", at_ns=fault.at_ns, for_ns=chance.randint(500, 4000) * MS))
        if fault.kind == "join" and chance.random() < 0.5:
            faults.append(_on_newcomer(chance, fault))
    return faults


def _fault(
    chance: random.Random, learners: tuple[LearnerSpec, ...], expected_ns: int, settings: dict[str, Any]
) -> Fault:
    kind, lease_ns = chance.choice([*FAULTS, "rogue", "rogue"]), settings["lease_interval_ns"]
    at_ns, when = int(chance.uniform(0, HEAL_AT) * expected_ns), ""
    if kind == "stop":
        at_ns = int(chance.uniform(0.5, 0.9) * expected_ns)
    if chance.random() < EARLY:
        at_ns = chance.randint(0, 400) * MS
    elif chance.random() < AIMED:
        when = chance.choice(_states(settings))
    if when == "finished":
        kind = chance.choice(("sleep", "partition", "partition up", "partition down", "cut control", "terminate"))
    for_ns = chance.choice((50 * MS, 300 * MS, lease_ns * 4 // 10, lease_ns * 13 // 10, 3 * lease_ns))
    if kind == "syncer sleeps" and chance.random() < 0.1:
        for_ns = 20 * lease_ns
    if when == "finished":
        for_ns = chance.choice((300 * MS, 8 * lease_ns))
    elif kind in ("crash", "terminate"):
        for_ns = chance.choice((0, 50 * MS, 50 * MS, for_ns))
    return Fault(
        kind=kind,
        at_ns=at_ns,
        for_ns=for_ns,
        learner="" if kind in SYNCER_FAULTS else chance.choice(learners).name,
        factor=_factor(chance, kind),
        when=when,
    )


def _states(settings: dict[str, Any]) -> list[str]:
    """What a fault may wait for in such a run. The rarer it is, the more often it is aimed at; `open` is common."""
    graceful = settings["mode"] == "decoupled" and settings["grace_factor"] and settings["overlap"]
    weights = {"final": 4, "collecting": 2, "merging": 3, "committing": 3, "retrying": 3, "finished": 2}
    if graceful:
        weights["grace"] = 14
    return [state for state, weight in weights.items() for _ in range(weight)]


def _at(chance: random.Random, kind: str, learners: tuple[LearnerSpec, ...], expected_ns: int) -> Fault:
    return Fault(kind=kind, at_ns=int(chance.uniform(0, HEAL_AT) * expected_ns), learner=chance.choice(learners).name)


def _on_newcomer(chance: random.Random, join: Fault) -> Fault:
    """Something happens to a newcomer while it joins."""
    kind = chance.choice(("crash", "terminate", "cut control", "partition", "sleep", "partition up"))
    return Fault(
        kind=kind,
        at_ns=join.at_ns + chance.randint(0, 200) * MS,
        for_ns=chance.choice((300, 1500, 6000)) * MS,
        learner="n1",
        when="" if not join.when else join.when,
    )


def _factor(chance: random.Random, kind: str) -> float:
    match kind:
        case "stranger":
            return float(chance.randint(1, len(STRANGERS)))
        case "rogue":
            return float(chance.randint(1, len(LIES)))
        case "straggle" | "thin link" | "disk slow":
            return chance.choice((2.0, 5.0, 20.0))
    return 1.0
