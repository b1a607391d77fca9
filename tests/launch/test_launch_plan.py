"""What is decided before anything starts: settings, names, cores, patience."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.config import RunConfig
from atoll.errors import ConfigError
from atoll.launch.check import resolve_fragments
from atoll.launch.cores import shares, thread_environment
from atoll.launch.options import LocalOptions, as_told
from atoll.launch.plan import Method, method_settings, slow_factors, steps_of
from atoll.launch.prepare import prepare
from atoll.launch.processes import Patience, describe_exit


def settings(learners=4, steps=300, **method):
    return method_settings(Method(**method), steps=steps, learners=learners, run_id="r")


@pytest.mark.parametrize(
    ("words", "merge"),
    [({"inner": "muon"}, "average"), ({"inner": "adamw"}, "rda"), ({"inner": "muon", "merge": "rda"}, "rda")],
)
def test_defaults__of_the_merge_go_with_the_inner_optimizer(words, merge, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the atoll is a ring of islands\n" * 3000)
    options = LocalOptions(run=tmp_path / "run", data=(str(text),), **words)
    assert prepare(options, {}).config.merge == merge
    assert as_told(options).get("merge") == words.get("merge")


def test_listen__without_a_token_nobody_else_can_join_and_it_is_said_before(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the atoll is a ring of islands\n" * 3000)
    told = "no ATOLL_TOKEN is set: none but this run's own learners can reach its syncer; set it before the run"
    free, token = "127.0.0.1:0", {"ATOLL_TOKEN": "x"}
    for listen, environ, warned in ((free, {}, True), (free, token, False), (None, {}, False)):
        plan = prepare(LocalOptions(run=tmp_path / "run", data=(str(text),), listen=listen), environ)
        assert (told in plan.notes) == warned


def test_data__what_is_left_out_is_said_before_the_run(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "good.txt").write_text("the atoll is a ring of islands\n" * 3000)
    (texts / "latin.txt").write_text("déjà vu", encoding="latin-1")
    plan = prepare(LocalOptions(run=tmp_path / "run", data=(str(texts),)), {})
    assert any("left out: 1 not UTF-8 text (latin.txt)" in note for note in plan.notes)


def test_defaults__are_those_of_the_issue():
    config, layout = resolve_fragments(settings(), "tiny")
    assert (config.fragments, config.interval, config.overlap, config.mode) == (8, 24, 2, "decoupled")
    assert (config.merge, config.take, config.outer_lr, config.outer_momentum) == ("rda", "rebase", 0.7, 0.5)
    assert (config.payload, config.quorum, config.quorum_of(4)) == ("bf16", 0, 2)
    assert len(layout.pieces) == 8


def test_fragments__by_the_layouts_rule_where_the_preset_does_not_fit():
    assert resolve_fragments(settings(interval=20), "tiny")[0].fragments == 20
    config, layout = resolve_fragments(settings(), "small")
    assert 24 % config.fragments == 0
    assert layout.balance <= 1.25


def test_diloco__implies_one_fragment_and_no_overlap():
    config = RunConfig.from_dict(settings(mode="diloco"))
    assert (config.fragments, config.overlap, config.interval) == (1, 0, 24)
    assert RunConfig.from_dict(settings(mode="diloco", interval=7)).interval == 7


def test_tokens__become_steps_of_each_learner_rounded_up():
    assert steps_of(None, 1_000_000, default=300, step_tokens=1024, learners=4) == 245
    assert steps_of(None, None, default=300, step_tokens=1024, learners=4) == 300
    assert steps_of(7, None, default=300, step_tokens=1024, learners=4) == 7


def test_slow_factors__by_name():
    assert slow_factors(["l1=4", "l2=1.5"], ["l1", "l2"]) == {"l1": 4.0, "l2": 1.5}
    with pytest.raises(ConfigError, match="names no learner"):
        slow_factors(["l3=2"], ["l1", "l2"])


@given(st.integers(1, 64), st.integers(1, 32))
def test_shares__never_more_threads_than_cores_and_affinity_is_fair(learners, count):
    cores = tuple(range(100, 100 + count))
    parts = shares(learners, cores)
    assert len(parts) == learners
    assert all(1 <= part.threads <= count and set(part.cores) <= set(cores) for part in parts)
    if learners >= count:
        assert all(part.threads == 1 for part in parts)
        load = [sum(core in part.cores for part in parts) for core in cores]
        assert len(set(load)) == 1
    else:
        used = [core for part in parts for core in part.cores]
        assert len(used) == len(set(used))
        assert all(len(part.cores) == part.threads for part in parts)


def test_threads__by_hand():
    assert [part.threads for part in shares(2, (0, 1, 2, 3), 4)] == [4, 4]
    with pytest.raises(ConfigError, match="threads=5 must be between 1 and the 4 cores"):
        shares(2, (0, 1, 2, 3), 5)
    assert thread_environment(3, {"A": "b"})["OMP_NUM_THREADS"] == "3"


def test_patience__backs_off_and_gives_up_after_five_quick_deaths():
    patience = Patience()
    assert [patience.after(1.0) for _ in range(5)] == [0.5, 1.0, 2.0, 4.0, None]
    patience = Patience()
    for _ in range(4):
        patience.after(1.0)
    assert patience.after(500.0) == 0.5
    assert patience.after(1.0) == 0.5


def test_describe_exit__names_signals():
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(2) == "exit status 2"


def test_prepare__writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("some text that is long enough for a few learners\n" * 2000)
    options = LocalOptions(data=(str(text),), steps=100, slow=("l4=2",), learners=4)
    plan = prepare(options, {})
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
    assert [train.slow for train in plan.learners] == [1, 1, 1, 2]
    assert [train.learner_index for train in plan.learners] == [0, 1, 2, 3]
    assert any("rounded up to 102" in note for note in plan.notes)
    assert len(plan.token) >= 24
    assert prepare(options, {"ATOLL_TOKEN": "mine"}).token == "mine"
    assert prepare(options, {}).token != plan.token
