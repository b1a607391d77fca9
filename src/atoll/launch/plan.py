"""What a person asks for, turned into the settings of a run. Standard library only: checked before torch is loaded."""

from __future__ import annotations

import math
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.core.config import MODES, STEPS_MAX, RunConfig, between, choice
from atoll.errors import ConfigError, RunError
from atoll.store.files import is_vacant

INTERVAL = 24
OVERLAP = 2
FRAGMENTS = {"tiny": 8}
"""P by model where the layout's rule is not asked; it must divide the interval, else the rule decides."""
START_WAIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Method:
    """How work is merged. None: the default of the mode or the model."""

    mode: str = "decoupled"
    """decoupled (waits for nobody), streaming or diloco (both wait for all learners)."""
    quorum: int | None = None
    """K: learners that a merge needs, 1 to the number of learners; default: half of the ready ones, rounded up."""
    fragments: int | None = None
    """P: parts of the model, merged in turn; default: the largest number that divides the interval and splits the model
    evenly; 1 for diloco."""
    interval: int | None = None
    """H: steps between two merges of the same part, a multiple of P; default 24."""
    overlap: int | None = None
    """tau: steps a transfer may take; default 2, 0 for diloco."""
    merge: str | None = None
    """rda (radial-directional averaging: directions and lengths apart) or average; default rda. Where learners
    train with Muon, average was better (docs/QUALITY.md)."""
    take: str | None = None
    """rebase keeps work done while an update was on its way; overwrite drops it (the paper); default rebase."""
    outer_lr: float | None = None
    """Rate of the outer Nesterov step; default 0.7."""
    outer_momentum: float | None = None
    """Momentum of the outer Nesterov step; default 0.5."""
    seed: int = 0
    """Of the first weights and the data order."""


def new_run_id() -> str:
    """A random name for a run."""
    return f"run-{secrets.token_hex(4)}"


def method_settings(
    method: Method, *, steps: int, learners: int, run_id: str, counted_as: str = "learners"
) -> dict[str, Any]:
    """Fields of RunConfig, `fragments` only where it is decided. ConfigError where no model could make them work.

    counted_as: the option that says how many learners there are.
    """
    choice("mode", method.mode, MODES)
    between("steps", steps, 1, STEPS_MAX)
    if method.quorum is not None and not 1 <= method.quorum <= learners:
        remedy = f"; raise {counted_as} with it" if method.quorum > learners else ""
        raise ConfigError(f"quorum={method.quorum} must be between 1 and {counted_as}={learners}{remedy}")
    if method.quorum is not None and method.mode != "decoupled":
        raise ConfigError(f"quorum={method.quorum} does nothing in mode={method.mode}, which waits for all; omit it")
    diloco = method.mode == "diloco"
    overlap = method.overlap if method.overlap is not None else 0 if diloco else OVERLAP
    settings: dict[str, Any] = {
        "run_id": run_id,
        "steps": steps,
        "interval": INTERVAL if method.interval is None else method.interval,
        "overlap": overlap,
        "mode": method.mode,
        "learners": learners,
        "quorum": method.quorum or 0,
        "seed": method.seed,
    }
    given = {name: getattr(method, name) for name in ("merge", "take", "outer_lr", "outer_momentum")}
    settings |= {name: value for name, value in given.items() if value is not None}
    if method.fragments is not None or diloco:
        settings["fragments"] = 1 if method.fragments is None else method.fragments
    RunConfig.from_dict({"fragments": 1, **settings})
    return settings


def preset_fragments(model: str, interval: int) -> int | None:
    """P of the model's preset; None: the layout's rule decides."""
    fragments = FRAGMENTS.get(model)
    return fragments if fragments is not None and interval % fragments == 0 else None


def steps_of(steps: int | None, tokens: int | None, *, default: int, step_tokens: int, learners: int) -> int:
    """`--steps`, or `--tokens` of all learners together: ceil(tokens / (learners * batch * length)) steps of each."""
    if steps is not None and tokens is not None:
        raise ConfigError(f"steps={steps} and tokens={tokens} say the same thing twice; give one of them")
    if tokens is None:
        return default if steps is None else steps
    if tokens < 1:
        raise ConfigError(f"tokens={tokens} must be at least 1")
    return math.ceil(tokens / (learners * step_tokens))


def learner_names(learners: int) -> list[str]:
    """l1 .. lM."""
    return [f"l{number}" for number in range(1, learners + 1)]


def slow_factors(settings: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    """`--slow NAME=FACTOR ...` by name; ConfigError for an unknown name, a factor below 1, or a name given twice."""
    factors: dict[str, float] = {}
    for setting in settings:
        name, _, value = setting.rpartition("=")
        try:
            factor = float(value)
        except ValueError:
            factor = math.nan
        if not name or not 1 <= factor < math.inf:
            raise ConfigError(f"slow {setting!r} must be NAME=FACTOR with a factor of at least 1, like l1=4")
        if name not in names:
            raise ConfigError(f"slow {setting!r} names no learner of this run; they are {', '.join(names)}")
        if name in factors:
            raise ConfigError(f"slow {setting!r} comes after {name}={factors[name]:g}; give one factor per learner")
        factors[name] = factor
    return factors


def check_port(name: str, host: str, port: int) -> None:
    """RunError where the port cannot be opened now. The syncer says so too; this comes before anything is written."""
    if not port:
        return
    if not 0 < port < 65_536:
        raise ConfigError(f"{name}={port} must be a port from 1 to 65535, or 0 for any free one")
    try:
        family, kind, proto, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        raise RunError(
            f"{name}={port} of {host} cannot be opened ({error.strerror or error}); is it in use? choose another, "
            "or 0 for any free one"
        ) from error


def check_run_dir(path: Path) -> None:
    """RunError where `path` is not a new or an empty directory, or has a name that safetensors cannot open."""
    try:
        os.fsencode(path).decode()
    except UnicodeError:
        raise RunError(f"run directory {str(path)!r} has a name that is not UTF-8; choose another with --run") from None
    try:
        if path.exists() and (not path.is_dir() or not is_vacant(path)):
            what = "holds another run" if (path / "run.toml").exists() else "is not an empty directory"
            raise RunError(f"run directory {str(path)!r} {what}; choose another with --run, or remove it")
        parent = next(p for p in path.absolute().parents if p.exists())
        if not parent.is_dir():
            raise RunError(f"run directory {str(path)!r} cannot be made: {str(parent)!r} is a file; choose another")
    except OSError as error:
        raise RunError(f"run directory {str(path)!r} cannot be used ({error.strerror}); choose another") from error
