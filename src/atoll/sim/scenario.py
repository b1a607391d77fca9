"""Scenario files (TOML) to plans and back. Bad input is a ConfigError: file, table, key, value and remedy in one line.

    plan = load("outage.toml"); plan = named("half-speed"); text = dumps(plan); loads(text, plan.name) == plan

docs/SIMULATION.md has every key. The files that come with Atoll are in `sim/scenarios/`.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from decimal import Decimal
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from atoll.core.config import LEARNERS_MAX, RunConfig
from atoll.errors import ConfigError, literal, nearest, shown
from atoll.sim.keys import (
    FAULT,
    LASTING,
    LEARNER,
    SITE,
    TOP,
    WHOLE_MAX,
    Key,
)
from atoll.sim.plan import FAULTS, SYNCER_FAULTS, WHENS, Fault, LearnerSpec, Plan, Site
from atoll.sim.promises import EXPECT, SHARES, check_expectations, figures
from atoll.sim.rogue import LIES, STRANGERS

__all__ = ["EXPECT", "Scenario", "check_expectations", "config_of", "dumps", "figures", "find", "load", "loads",
           "named", "names", "parse"]  # fmt: skip

FILE_BYTES_MAX = 1_000_000
FRAGMENTS_MAX = 10_000
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
SETTINGS = tuple(field.name for field in fields(RunConfig) if field.name != "run_id")
TABLES = ("about", *(key.name for key in TOP), "settings", "learner", "site", "fault", "expect")
NUMBERED = {"stranger": STRANGERS, "rogue": LIES}
"""Faults whose factor says which of these."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A plan and what it is about, in one sentence."""

    plan: Plan
    about: str = ""


# ---------------------------------------------------------------- where scenarios are


def load(path: str | os.PathLike[str]) -> Plan:
    """The plan of a file."""
    return _from_file(Path(path)).plan


def loads(text: str, name: str) -> Plan:
    """The plan of a text; `name` becomes the plan's and stands in messages."""
    return parse(text, name).plan


def names() -> list[str]:
    """Scenarios that come with Atoll."""
    return sorted(item.name.removesuffix(".toml") for item in _shipped().iterdir() if item.name.endswith(".toml"))


def named(name: str) -> Plan:
    """A scenario that comes with Atoll."""
    return _from_package(name).plan


def find(word: str) -> Scenario:
    """A file if `word` looks like one or is one, else a scenario that comes with Atoll."""
    if word.endswith(".toml") or "/" in word or Path(word).is_file():
        return _from_file(Path(word))
    return _from_package(word)


def _shipped() -> Traversable:
    return files("atoll.sim").joinpath("scenarios")


def _from_package(name: str) -> Scenario:
    known = names()
    if name not in known:
        raise ConfigError(f"scenario {name!r} is neither a file nor known; {nearest(name, known)}")
    return parse(_shipped().joinpath(f"{name}.toml").read_text(encoding="utf-8"), name)


def _from_file(path: Path) -> Scenario:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; `atoll sim list` has those that come along") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: is larger than {FILE_BYTES_MAX} bytes; a scenario is a small text")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is no UTF-8; save it as UTF-8 text") from None
    return parse(text, str(path))


# ---------------------------------------------------------------- reading


def parse(text: str, name: str) -> Scenario:
    """The whole file."""
    tables = _toml(text, name)
    for key in tables:
        if key in SETTINGS and key not in TABLES:
            raise ConfigError(f"{name}: key {shown(key)} belongs into a table; write it below [settings]")
    _known(tables, TABLES, name)
    sites = tuple(Site(**row) for row, _ in _rows(tables, "site", SITE, name))
    learners = tuple(_learners(tables, name))
    faults = tuple(_fault(row, where) for row, where in _rows(tables, "fault", FAULT, name))
    _check_names(name, "learner", learners)
    _check_names(name, "site", sites)
    _check_links(name, learners, sites, faults)
    top = {key: value for key, value in tables.items() if key in {k.name for k in TOP}}
    plan = Plan(
        **{"seed": 0, **_fields(top, TOP, name)},
        settings=_settings(tables.get("settings"), name),
        learners=learners,
        sites=sites,
        faults=faults,
        name=name,
        expect=_expect(tables.get("expect", {}), name),
    )
    _config(plan, f"{name}: [settings]")
    return Scenario(plan, _about(tables, name))


def config_of(plan: Plan) -> RunConfig:
    """Settings of the run; ConfigError if they cannot work."""
    return RunConfig.from_dict({"run_id": "scenario", "learners": len(plan.learners), **plan.settings})


def _toml(text: str, name: str) -> dict[str, Any]:
    if not text.strip():
        raise ConfigError(f"{name}: is empty; a scenario needs [settings] and at least one [[learner]]")
    try:
        return tomllib.loads(text, parse_float=Decimal)
    except (ValueError, ArithmeticError, RecursionError) as error:
        said = " ".join(str(error).split()) or "too deep"
        raise ConfigError(f"{name}: is no TOML: {said}; mend it there") from None


def _known(table: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}: key {shown(key)} is unknown; {nearest(key, known)}")


def _fields(table: dict[str, Any], keys: tuple[Key, ...], where: str) -> dict[str, Any]:
    """Fields of the dataclass that the table becomes."""
    _known(table, tuple(key.name for key in keys), where)
    for key in keys:
        if key.needed and key.name not in table:
            raise ConfigError(f"{where}: {key.name} is missing; it is {key.text}")
    return {key.field or key.name: key.read(table[key.name], where) for key in keys if key.name in table}


def _rows(tables: dict[str, Any], name: str, keys: tuple[Key, ...], file: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Each [[name]] as fields, and what messages call it."""
    rows = tables.get(name, [])
    if isinstance(rows, dict):
        raise ConfigError(f"{file}: [{name}] must be written [[{name}]]: there may be several")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{file}: {name}={shown(rows)} must be tables; write [[{name}]] above each")
    for number, row in enumerate(rows, 1):
        where = f"{file}: [[{name}]] {number}"
        yield _fields(row, keys, where), where


def _learners(tables: dict[str, Any], file: str) -> Iterator[LearnerSpec]:
    made = 0
    for row, where in _rows(tables, "learner", LEARNER, file):
        count, prefix = row.pop("count", None), row.pop("name", None)
        if made + (count or 1) > LEARNERS_MAX:
            raise ConfigError(f"{where}: count={count} makes more than {LEARNERS_MAX} learners; take fewer")
        for i in range(count or 1):
            name = f"l{made}" if prefix is None else prefix if count is None else f"{prefix}{i}"
            yield LearnerSpec(name=name, **row)
            made += 1
    if not made:
        raise ConfigError(f"{file}: [[learner]] is missing; a run needs at least one")


def _fault(row: dict[str, Any], where: str) -> Fault:
    fault = Fault(**row)
    if fault.kind not in FAULTS:
        raise ConfigError(f"{where}: kind={shown(fault.kind)} is unknown; {nearest(fault.kind, FAULTS)}")
    if fault.when and fault.when not in WHENS:
        remedy = nearest(fault.when, WHENS)
        raise ConfigError(f"{where}: when={shown(fault.when)} is nothing to wait for; {remedy}")
    of_syncer = fault.kind in SYNCER_FAULTS
    if of_syncer and fault.learner:
        raise ConfigError(
            f"{where}: learner={shown(fault.learner)} cannot be struck by kind={shown(fault.kind)}, a fault of the "
            "syncer; leave learner out"
        )
    if not of_syncer and not fault.learner:
        raise ConfigError(f"{where}: learner is missing; kind={shown(fault.kind)} must say whom it strikes")
    if fault.kind in LASTING and not fault.for_ns:
        raise ConfigError(f"{where}: for_ms=0 makes kind={shown(fault.kind)} do nothing; say how long it lasts")
    kinds = NUMBERED.get(fault.kind)
    if kinds and fault.factor not in range(1, len(kinds) + 1):
        listed = ", ".join(f"{number} ({name})" for number, name in enumerate(kinds, 1))
        raise ConfigError(f"{where}: factor={fault.factor:g} of kind={shown(fault.kind)} must be one of {listed}")
    return fault


def _check_names(file: str, table: str, things: tuple[LearnerSpec, ...] | tuple[Site, ...]) -> None:
    for name, count in Counter(thing.name for thing in things).items():
        if not NAME.fullmatch(name):
            raise ConfigError(f"{file}: [[{table}]] name={shown(name)} must be 1 to 64 of A-Z a-z 0-9 . _ -")
        if count > 1:
            raise ConfigError(f"{file}: [[{table}]] name={shown(name)} stands {count} times; give each its own")


def _check_links(
    file: str, learners: tuple[LearnerSpec, ...], sites: tuple[Site, ...], faults: tuple[Fault, ...]
) -> None:
    """Every learner and site that is named is there, or comes later."""
    places, people = [site.name for site in sites], [spec.name for spec in learners]
    joins = sum(fault.kind == "join" for fault in faults)
    people += [f"n{number + 1}" for number in range(joins)]  # what the world calls newcomers
    for spec in learners:
        if spec.site and spec.site not in places:
            remedy = nearest(spec.site, places) if places else f"add [[site]] with name = {literal(spec.site)}"
            raise ConfigError(f"{file}: [[learner]] {spec.name}: site={shown(spec.site)} is not defined; {remedy}")
    for number, fault in enumerate(faults, 1):
        if fault.learner and fault.learner not in people:
            remedy = nearest(fault.learner, people)
            raise ConfigError(f"{file}: [[fault]] {number}: learner={shown(fault.learner)} is unknown; {remedy}")


def _settings(table: Any, file: str) -> dict[str, Any]:
    where = f"{file}: [settings]"
    if table is None:
        raise ConfigError(f"{where} is missing; it needs steps, fragments and interval")
    _check_table(table, "settings", file)
    _known(table, SETTINGS, where)
    for key, value in table.items():
        if isinstance(value, bool) or not isinstance(value, str | int | Decimal):
            raise ConfigError(f"{where}: {key}={shown(value)} must be a number or text in quotes")
        if isinstance(value, int) and abs(value) > WHOLE_MAX:
            raise ConfigError(f"{where}: {key}={shown(value)} must be at most {WHOLE_MAX}")
        if isinstance(value, Decimal) and not value.is_finite():
            raise ConfigError(f"{where}: {key}={shown(value)} must be a finite number")
    return {key: float(value) if isinstance(value, Decimal) else value for key, value in table.items()}


def _config(plan: Plan, where: str) -> None:
    try:
        config = config_of(plan)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if config.fragments > FRAGMENTS_MAX:
        raise ConfigError(f"{where}: fragments={config.fragments} must be at most {FRAGMENTS_MAX} in a virtual run")


def _expect(table: Any, file: str) -> dict[str, float]:
    _check_table(table, "expect", file)
    keys = (Key(name, name, "number", text, high=1) if name in SHARES else Key(name, name, "number", text)
            for name, text in EXPECT.items())  # fmt: skip
    return _fields(table, tuple(keys), f"{file}: [expect]")


def _check_table(table: Any, name: str, file: str) -> None:
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: {name}={shown(table)} must be a table; write [{name}] above its keys")


def _about(tables: dict[str, Any], file: str) -> str:
    about = tables.get("about", "")
    if not isinstance(about, str) or "\n" in about:
        raise ConfigError(f"{file}: about={shown(about)} must be text in quotes, one line")
    return about


# ---------------------------------------------------------------- writing


def dumps(plan: Plan, about: str = "") -> str:
    """The file of a plan. What has its default is left out; the plan's name is the file's and stands in no key."""
    head = [*([f"about = {literal(about)}"] if about else []), *_lines(plan, TOP)]
    parts = [head, ["[settings]", *(f"{key} = {literal(value)}" for key, value in plan.settings.items())]]
    if plan.expect:
        parts.append(["[expect]", *(f"{key} = {literal(value)}" for key, value in plan.expect.items())])
    parts += [["[[site]]", *_lines(site, SITE)] for site in plan.sites]
    parts += [["[[learner]]", *_lines(spec, LEARNER)] for spec in plan.learners]
    parts += [["[[fault]]", *_lines(fault, FAULT)] for fault in plan.faults]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _lines(thing: Plan | Site | LearnerSpec | Fault, keys: tuple[Key, ...]) -> Iterator[str]:
    defaults = {field.name: field.default for field in fields(thing)}
    for key in keys:
        if key.field:
            value = getattr(thing, key.field)
            if defaults[key.field] is MISSING or value != defaults[key.field]:
                yield f"{key.name} = {key.write(value)}"
