"""Scenario files: what is read is what was written, and bad input is one line that says how to mend it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.records import ClosedLine, LifeEndLine, Merge1, QuorumLine, SlotLine, StartLine
from atoll.errors import ConfigError
from atoll.sim import scenario
from atoll.sim.draw import draw
from atoll.sim.keys import LASTING
from atoll.sim.plan import FAULTS, MS, SYNCER_FAULTS, WHENS, Fault, LearnerSpec, Plan, Site
from atoll.sim.promises import EXPECT, SHARES, check_expectations, densest, figures
from atoll.sim.scenario import NUMBERED

GOOD = """\
about = "one learner"
[settings]
steps = 24
fragments = 4
interval = 8
[[learner]]
"""

# ---------------------------------------------------------------- round trip

times = st.integers(1, 10**15)
rates = st.just(0.0) | st.floats(1, 1e12)
words = st.from_regex(r"\A[A-Za-z0-9._-]{1,12}\Z")


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    sites = tuple(
        Site(name=name, up_bytes_per_s=draw(rates), down_bytes_per_s=draw(rates))
        for name in draw(st.lists(words, max_size=2, unique=True))
    )
    names = draw(st.lists(words, min_size=1, max_size=4, unique=True))
    learners = tuple(
        LearnerSpec(
            name=name,
            step_ns=draw(times),
            jitter=draw(st.floats(0, 0.999)),
            tail=draw(st.floats(0, 1)),
            tokens=draw(st.integers(1, 10**6)),
            latency_ns=draw(times),
            up_bytes_per_s=draw(rates),
            down_bytes_per_s=draw(rates),
            site=draw(st.sampled_from(["", *(site.name for site in sites)])),
            joins_at_ns=draw(times),
        )
        for name in names
    )
    fragments, per_slot = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    settings = {
        "steps": draw(st.integers(1, 10**6)),
        "fragments": fragments,
        "interval": fragments * per_slot,
        "grace_factor": draw(st.floats(0, 0.99)),
        "take": draw(st.sampled_from(["rebase", "overwrite"])),
        "quorum": draw(st.integers(0, len(names))),
    }
    return Plan(
        seed=draw(st.integers(0, 2**62)),
        settings=settings,
        learners=learners,
        sites=sites,
        faults=tuple(draw(st.lists(faults(names), max_size=4))),
        piece_values=draw(st.integers(1, 10**6)),
        lossy=draw(st.booleans()),
        linger_ns=draw(times),
        bad_share=draw(st.floats(0, 1)),
        merge_ns=draw(times),
        commit_ns=draw(times),
        learners_max=draw(st.integers(0, 100)),
        heal_at_ns=draw(times),
        limit_ns=draw(st.integers(MS, 10**15)),
        name=draw(words),
        expect=draw(st.dictionaries(st.sampled_from(list(EXPECT)), st.floats(0, 1))),
    )


@st.composite
def faults(draw: st.DrawFn, names: list[str]) -> Fault:
    kind = draw(st.sampled_from(list(FAULTS)))
    return Fault(
        kind=kind,
        at_ns=draw(times),
        for_ns=draw(times),
        learner="" if kind in SYNCER_FAULTS else draw(st.sampled_from(names)),
        factor=float(draw(st.integers(1, len(NUMBERED[kind])))) if kind in NUMBERED else draw(st.floats(1, 100)),
        when=draw(st.sampled_from(["", *WHENS])),
    )


@given(plans(), st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=20))
def test_what_is_read_is_what_was_written(plan: Plan, about: str) -> None:
    read = scenario.parse(scenario.dumps(plan, about), plan.name)
    assert read.plan == plan
    assert read.about == about


def test_times_are_exact_to_the_nanosecond() -> None:
    plan = scenario.loads(GOOD + "step_ms = 100.000001\njoins_at_ms = 3\n", "x")
    assert plan.learners[0].step_ns == 100 * MS + 1
    assert plan.learners[0].joins_at_ns == 3 * MS
    assert "step_ms = 100.000001\n" in scenario.dumps(plan)


def test_count_makes_learners_that_are_alike() -> None:
    text = GOOD + 'count = 2\n[[learner]]\nname = "fast"\ncount = 2\nstep_ms = 10\n[[learner]]\n'
    assert [spec.name for spec in scenario.loads(text, "x").learners] == ["l0", "l1", "fast0", "fast1", "l4"]


# ---------------------------------------------------------------- bad input

FAULT = GOOD + "[[fault]]\n"
BAD = [
    ("", "x: is empty; a scenario needs [settings]"),
    ("  \n\n", "x: is empty"),
    ("seed = \n", "x: is no TOML: "),
    ("a = 1\na = 2\n", "x: is no TOML: "),
    ("a = " + "[" * 5000 + "]" * 5000, "x: is no TOML"),
    ("seed = " + "1" * 5000, "x: is no TOML"),
    ("sed = 1\n" + GOOD, "x: key \"sed\" is unknown; did you mean 'seed'?"),
    ("zzz = 1\n" + GOOD, 'x: key "zzz" is unknown; use one of about, seed'),
    ('"a\\nb" = 1\n' + GOOD, 'x: key "a\\nb" is unknown'),
    ("seed = true\n" + GOOD, "x: seed=true must be a whole number"),
    ("seed = 1.5\n" + GOOD, "x: seed=1.5 must be a whole number"),
    ("seed = -1\n" + GOOD, "x: seed=-1 must be"),
    ("seed = 99999999999999999999\n" + GOOD, "x: seed=a number of more than 63 bits must be at least 0 and at most"),
    ("bad_share = 1.5\n" + GOOD, "x: bad_share=1.5 must be at least 0 and at most 1"),
    ("bad_share = nan\n" + GOOD, "x: bad_share=NaN must be a finite number"),
    ("bad_share = true\n" + GOOD, "x: bad_share=true must be a finite number"),
    ("lossy = 1\n" + GOOD, "x: lossy=1 must be true or false"),
    ("merge_ms = inf\n" + GOOD, "x: merge_ms=Infinity must be milliseconds"),
    ("merge_ms = 1e999999\n" + GOOD, "x: merge_ms=1E+999999 must be milliseconds"),
    ("merge_ms = 1e200\n" + GOOD, "x: merge_ms=1E+200 must be at least 0 and at most 1000000000000"),
    ('merge_ms = "2"\n' + GOOD, 'x: merge_ms="2" must be milliseconds'),
    ("merge_ms = -0.1\n" + GOOD, "x: merge_ms=-0.1 must be at least 0"),
    ("limit_ms = 0\n" + GOOD, "x: limit_ms=0 must be at least 1"),
    ("piece_values = 0\n" + GOOD, "x: piece_values=0 must be"),
    ("merge_ms = 2020-01-01\n" + GOOD, "x: merge_ms=2020-01-01 must be milliseconds"),
    (GOOD.replace('"one learner"', "7"), "x: about=7 must be text"),
    (GOOD.replace('"one learner"', '"a\\nb"'), " must be text in quotes, one line"),
    ("[settings]\nsteps = 1\n", "x: [[learner]] is missing"),
    ("[[learner]]\n", "x: [settings] is missing; it needs steps"),
    ("settings = 3\n[[learner]]\n", "x: settings=3 must be a table; write [settings]"),
    ("[[settings]]\n[[learner]]\n", "x: settings=a list must be a table"),
    ("[learner]\n[settings]\n", "x: [learner] must be written [[learner]]"),
    ("learner = [1]\n[settings]\n", "x: learner=a list must be tables"),
    (GOOD.replace("steps = 24\n", ""), "x: [settings]: setting 'steps' is missing"),
    (GOOD.replace("interval = 8", "interval = 9"), "x: [settings]: interval=9 must be a multiple "),
    (GOOD.replace("steps = 24", 'steps = "many"'), "x: [settings]: setting steps='many' must be of type int"),
    (GOOD.replace("steps = 24", "steps = true"), "x: [settings]: steps=true must be a number"),
    (GOOD.replace("steps = 24", "steps = nan"), "x: [settings]: steps=NaN must be a finite number"),
    (GOOD.replace("steps = 24", "steps = [1]"), "x: [settings]: steps=a list must be a number"),
    (GOOD.replace("steps = 24", "step = 24"), "x: [settings]: key \"step\" is unknown; did you mean 'steps'?"),
    (GOOD.replace("steps = 24", 'steps = 24\nrun_id = "a"'), 'x: [settings]: key "run_id" is unknown'),
    (GOOD.replace("steps = 24", "steps = 24\nquorum = 2"), "x: [settings]: quorum=2 must be between 1 and learners=1"),
    (GOOD.replace("steps = 24", "steps = 24\noverlap = 99999999999999999999"), "overlap=a number of more than 63 bits"),
    (GOOD.replace("fragments = 4\ninterval = 8", "fragments = 20000\ninterval = 20000"), "must be at most 10000 in a"),
    (GOOD + "step_m = 1\n", "x: [[learner]] 1: key \"step_m\" is unknown; did you mean 'step_ms'?"),
    (GOOD + "step_ms = 0\n", "x: [[learner]] 1: step_ms=0 must be"),
    (GOOD + "jitter = 1.0\n", "x: [[learner]] 1: jitter=1.0 must be at least 0 and below 1"),
    (GOOD + "jitter = -0.1\n", "x: [[learner]] 1: jitter=-0.1 must be at least 0 and below 1"),
    (GOOD + "tail = 2\n", "x: [[learner]] 1: tail=2 must be at least 0 and at most 1"),
    (GOOD + "tokens = 0\n", "x: [[learner]] 1: tokens=0 must be"),
    (GOOD + "up_bytes_per_s = -1\n", "x: [[learner]] 1: up_bytes_per_s=-1 must be 0 or more"),
    (GOOD + "up_bytes_per_s = 1e-300\n", "x: [[learner]] 1: up_bytes_per_s=1E-300 must be 0 (no limit) or at least 1"),
    ("steps = 240\n" + GOOD, 'x: key "steps" belongs into a table; write it below [settings]'),
    (GOOD + "count = -1\n", "x: [[learner]] 1: count=-1 must be at least 1"),
    (GOOD + "count = 5000\n", "x: [[learner]] 1: count=5000 must be "),
    (GOOD + "count = 4096\n[[learner]]\n", "makes more than 4096 learners; take fewer"),
    (GOOD + 'name = ""\n', 'x: [[learner]] name="" must be 1 to 64'),
    (GOOD + 'name = "a b"\n', 'x: [[learner]] name="a b" must be 1 to 64'),
    (GOOD + "name = 3\n", "x: [[learner]] 1: name=3 must be text in quotes"),
    (GOOD + 'name = "a"\n[[learner]]\nname = "a"\n', 'x: [[learner]] name="a" stands 2 times'),
    (GOOD + 'site = "home"\n', 'x: [[learner]] l0: site="home" is not defined; add [[site]]'),
    (GOOD + 'site = "hom"\n[[site]]\nname = "home"\n', "site=\"hom\" is not defined; did you mean 'home'?"),
    (GOOD + "[[site]]\n", "x: [[site]] 1: name is missing"),
    (GOOD + '[[site]]\nname = "a"\n[[site]]\nname = "a"\n', 'x: [[site]] name="a" stands 2 times'),
    (FAULT + "at_ms = 1\n", "x: [[fault]] 1: kind is missing"),
    (FAULT + 'kind = "stop"\n', "x: [[fault]] 1: at_ms is missing"),
    (FAULT + 'kind = "crahs"\nat_ms = 1\n', "x: [[fault]] 1: kind=\"crahs\" is unknown; did you mean 'crash'?"),
    (FAULT + 'kind = "stop"\nat_ms = -1\n', "x: [[fault]] 1: at_ms=-1 must be at least 0"),
    (FAULT + 'kind = "crash"\nat_ms = 1\n', 'x: [[fault]] 1: learner is missing; kind="crash" must say whom'),
    (FAULT + 'kind = "crash"\nat_ms = 1\nlearner = "l1"\n', 'learner="l1" is unknown; use one of l0'),
    (FAULT + 'kind = "stop"\nat_ms = 1\nlearner = "l0"\n', 'learner="l0" cannot be struck by kind="stop"'),
    (FAULT + 'kind = "sleep"\nat_ms = 1\nlearner = "l0"\n', 'for_ms=0 makes kind="sleep" do nothing'),
    (
        FAULT + 'kind = "straggle"\nat_ms = 1\nfor_ms = 1\nlearner = "l0"\nfactor = 0.5\n',
        "factor=0.5 must be 1 or more",
    ),
    (
        FAULT + 'kind = "stranger"\nat_ms = 1\nfactor = 5\n',
        'factor=5 of kind="stranger" must be one of 1 (run), 2 (protocol)',
    ),
    (
        FAULT + 'kind = "stop"\nat_ms = 1\nwhen = "grce"\n',
        "when=\"grce\" is nothing to wait for; did you mean 'grace'?",
    ),
    (GOOD + "[expect]\nyield = 1\n", "x: [expect]: key \"yield\" is unknown; did you mean 'yield_min'?"),
    (GOOD + "[expect]\nyield_min = 1.5\n", "x: [expect]: yield_min=1.5 must be at least 0 and at most 1"),
    (GOOD + '[expect]\nslots_min = "3"\n', 'x: [expect]: slots_min="3" must be a finite number'),
    ("expect = 1\n" + GOOD, "x: expect=1 must be a table"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=range(len(BAD)))
def test_bad_input_is_one_line_with_the_remedy(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scenario.loads(text, "x")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("x: ")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file; `atoll sim list`"),
        (b"\xff\xfe", "byte 0 is no UTF-8"),
        (b"#" * 1_000_001, "is larger than 1000000 bytes"),
        (b"", "is empty"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "x.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        scenario.load(path)
    assert str(path) in str(caught.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        scenario.load(tmp_path)


def test_an_unknown_scenario_has_a_nearest_one() -> None:
    with pytest.raises(ConfigError, match="'half-sped' is neither a file nor known; did you mean 'half-speed'"):
        scenario.named("half-sped")


# ---------------------------------------------------------------- what comes along


@pytest.mark.parametrize("name", scenario.names())
def test_every_shipped_scenario_loads_says_what_it_is_about_and_promises(name: str) -> None:
    found = scenario.find(name)
    assert found.plan == scenario.named(name)
    assert found.plan.name == name
    assert re.fullmatch(r"[A-Z].{20,}\.", found.about)
    assert found.plan.expect
    assert scenario.loads(scenario.dumps(found.plan), name) == found.plan


@pytest.mark.parametrize("seed", range(300))
def test_every_drawn_plan_is_a_valid_scenario(seed: int) -> None:
    plan = draw(seed)
    assert scenario.loads(scenario.dumps(plan), plan.name) == plan


def test_a_fault_may_name_a_newcomer() -> None:
    text = FAULT + 'kind = "join"\nat_ms = 1\nlearner = "l0"\n[[fault]]\nkind = "crash"\nat_ms = 2\nlearner = "n1"\n'
    assert scenario.loads(text, "x").faults[1].learner == "n1"


def test_lasting_faults_are_those_whose_text_says_for_how_long() -> None:
    assert {kind for kind, text in FAULTS.items() if "for_ms" in text} - {"crash", "terminate"} <= LASTING


# ---------------------------------------------------------------- promises


class Tape:
    """What promises look at of a world: two learners, P = 2, s = 2 steps of 100 ms."""

    def __init__(self, records: list[Any], **expect: float) -> None:
        self._records = records
        self.config = SimpleNamespace(fragments=2, slot_steps=2)
        specs = (LearnerSpec(name="a"), LearnerSpec(name="b", step_ns=300 * MS))
        self.plan = Plan(seed=0, settings={}, learners=specs, expect=expect)

    def records(self, kind: type) -> list[Any]:
        return [record for record in self._records if isinstance(record, kind)]


def slot_lines(number: int, at_ms: int, names: str, ready: int = 2) -> list[Any]:
    merged = tuple(Merge1(n, 1, number, (1, 0), 1, 1, 1, 1.0, "", 1.0) for n in names)
    piece = number % 2
    return [
        QuorumLine(at_ms * MS, number, 1, ready, 0, 0, 1, 0, 0),
        ClosedLine(at_ms * MS, number, piece, "", 0, ready, ready, ()),
        SlotLine(at_ms * MS, number, piece, (1, 0), (1, 1), merged, "", "", "", 1.0, 0, 0),
    ]


def life_end(
    name: str, merged: tuple[int, int], lost: tuple[int, int] = (0, 0), reason: str = "finished"
) -> LifeEndLine:
    return LifeEndLine(0, name, 1, reason, 10, 100, 0.0, merged, (0, 0), lost, (), 0, 0, 0)


def small_tape(**expect: float) -> Any:
    records: list[Any] = [StartLine(0, ("a", "b"), "")]
    for number, at_ms, names in ((1, 200, "ab"), (2, 400, "ab"), (3, 450, "a"), (4, 800, "a"), (5, 1000, "ab")):
        records += slot_lines(number, at_ms, names)
    last = SlotLine(0, 6, 0, (1, 0), (1, 1), (), "", "", "", 1.0, 0, 0)  # of the finish: no quorum
    return Tape([*records, last, life_end("a", (100, 100)), life_end("b", (90, 50), (10, 50))], **expect)


def test_figures_of_a_small_tape() -> None:
    assert figures(small_tape()) == {
        "yield_min": pytest.approx(340 / 400),
        "participation_min": pytest.approx((1 + 1 + 0.5 + 0.5 + 1) / 5),
        "gap_rounds_max": 4 / 2,
        "lost_tokens_max": 60,
        "slots_min": 5,
        "slots_per_step_max": 2,
    }


def test_kept_promises_are_silent_and_missed_ones_say_both_figures() -> None:
    assert check_expectations(small_tape(yield_min=0.85, gap_rounds_max=2, slots_min=5)) == []
    [said] = check_expectations(small_tape(yield_min=0.9, lost_tokens_max=60))
    assert said.startswith("yield_min=0.9 was promised, the run reached 0.85 (")
    assert len(check_expectations(small_tape(**dict.fromkeys(SHARES, 1.0)))) == 2


def test_a_run_that_merged_nothing_keeps_no_promise() -> None:
    """Hazard 44."""
    empty: Any = Tape([], yield_min=0.1, participation_min=0.1, slots_min=1)
    assert len(check_expectations(empty)) == 3


@pytest.mark.parametrize(
    ("times", "window", "most"), [([], 5, 0), ([1], 5, 1), ([0, 5, 10], 5, 1), ([0, 4, 5, 9], 5, 2)]
)
def test_densest_window(times: list[int], window: int, most: int) -> None:
    assert densest(times, window) == most
