"""The agent machine: two queues, reconnects, goodbyes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from atoll.core import events as ev
from atoll.core.agent import Agent
from atoll.core.messages import (
    Announce,
    Counters,
    Fate,
    Heartbeat,
    Leave,
    Merged,
    Pace,
    Refuse,
    Report,
    Timings,
    UpdateReady,
    Version,
    Welcome,
)

S = 1_000_000_000
WELCOME = Welcome(7, 1, False, (), 0, 0, "running", ())


def started(places: int = 2) -> Agent:
    agent = Agent()
    assert agent.start(now_ns=0) == [ev.Connect(0, 0)]
    agent.handle(ev.Connected(WELCOME), now_ns=1)
    for place in range(places):
        agent.handle(ev.PlaceFreed(place), now_ns=1)
    return agent


def announce(seq: int, piece: int) -> Announce:
    return Announce(seq, piece, piece + 8, Version(1, 0), 1, 1, 1, Counters(1, 1), 10)


def update(piece: int, n: int) -> UpdateReady:
    return UpdateReady(piece, Version(1, n), n, 10, "h", Merged())


def only(actions: list[Any], kind: type) -> list[Any]:
    return [a for a in actions if isinstance(a, kind)]


def test_uploads_go_one_at_a_time_in_order_of_capture() -> None:
    agent = started()
    first = agent.handle(ev.FromLearner(announce(1, 0)), now_ns=2)
    assert first == [ev.ToSyncer(announce(1, 0)), ev.StartUpload(0, 1, 10)]
    assert only(agent.handle(ev.FromLearner(announce(2, 1)), now_ns=3), ev.StartUpload) == []
    done = agent.handle(ev.UploadEnded(0, 1, "ok", 10, 5), now_ns=4)
    assert done == [ev.ToLearner(ev.UploadDone(0, 1, 10, 5, True)), ev.StartUpload(1, 2, 10)]


def test_updates_coalesce_and_keep_their_place_in_the_queue() -> None:
    agent = started(places=1)
    begun = agent.handle(ev.FromSyncer(update(5, 1)), now_ns=2)
    assert only(begun, ev.StartDownload) == [ev.StartDownload(5, Version(1, 1), 0, 10)]
    for piece, n in ((0, 1), (1, 1), (0, 2), (0, 3)):
        agent.handle(ev.FromSyncer(update(piece, n)), now_ns=3)
    agent.handle(ev.DownloadEnded(5, 0, Version(1, 1), 1, Merged(), True), now_ns=4)
    after = agent.handle(ev.PlaceFreed(0), now_ns=5)
    assert after == [ev.StartDownload(0, Version(1, 3), 0, 10)]


def test_an_update_newer_than_asked_for_settles_the_queue() -> None:
    agent = started()
    agent.handle(ev.FromSyncer(update(0, 1)), now_ns=2)
    agent.handle(ev.FromSyncer(update(0, 2)), now_ns=3)
    actions = agent.handle(ev.DownloadEnded(0, 0, Version(1, 2), 2, Merged(7, 4), True), now_ns=4)
    assert only(actions, ev.ToLearner) == [ev.ToLearner(ev.UpdateArrived(0, Version(1, 2), 2, 0, Merged(7, 4)))]
    assert only(actions, ev.StartDownload) == []
    assert agent.handle(ev.FromSyncer(update(0, 2)), now_ns=5)[-1:] == [ev.ToLearner(ev.Heard(update(0, 2), 5))]


def test_a_damaged_download_is_tried_again_after_a_pause() -> None:
    agent = started(places=1)
    agent.handle(ev.FromSyncer(update(0, 1)), now_ns=2)
    actions = agent.handle(ev.DownloadEnded(0, 0, Version(1, 1), 1, Merged(), False), now_ns=3)
    [timer] = actions
    assert isinstance(timer, ev.SetTimer)
    assert agent.handle(ev.Wake(), now_ns=timer.at_ns) == [ev.StartDownload(0, Version(1, 1), 0, 10)]


def test_a_broken_upload_is_tried_again_an_unwanted_one_is_not() -> None:
    agent = started()
    agent.handle(ev.FromLearner(announce(1, 0)), now_ns=2)
    actions = agent.handle(ev.UploadEnded(0, 1, "broken", 4, 5), now_ns=3)
    assert actions[0] == ev.ToLearner(ev.UploadDone(0, 1, 4, 5, False)), "its rate is worth knowing"
    assert agent.handle(ev.Wake(), now_ns=S) == [ev.StartUpload(0, 1, 10, again=True)]
    assert only(agent.handle(ev.UploadEnded(0, 1, "unwanted", 0, 5), now_ns=2 * S), ev.StartUpload) == []


def test_a_fate_stops_the_upload_and_drops_it_from_the_queue() -> None:
    agent = started()
    for seq, piece in ((1, 0), (2, 1)):
        agent.handle(ev.FromLearner(announce(seq, piece)), now_ns=2)
    stopped = agent.handle(ev.FromSyncer(Fate(0, 1, 8, "missed", "x")), now_ns=3)
    assert ev.StopUpload(0, 1) in stopped
    agent.handle(ev.FromSyncer(Fate(1, 2, 9, "missed", "x")), now_ns=4)
    assert only(agent.handle(ev.UploadEnded(0, 1, "broken", 0, 5), now_ns=5), ev.StartUpload) == []
    assert only(agent.handle(ev.Wake(), now_ns=S), ev.StartUpload) == []


def test_reconnect__what_has_no_fate_is_announced_again_in_order_then_the_newest_report() -> None:
    """Hazard 45: nothing hangs on a message that was lost."""
    agent = started()
    for seq, piece in ((1, 3), (2, 1), (3, 2)):
        agent.handle(ev.FromLearner(announce(seq, piece)), now_ns=2)
    agent.handle(ev.FromSyncer(Fate(1, 2, 9, "missed", "x")), now_ns=3)
    lost = agent.handle(ev.ConnectionLost("reset"), now_ns=4)
    assert lost[0] == ev.ToLearner(ev.StreamLost("reset"))
    assert isinstance(lost[1], ev.Connect)
    assert lost[1].generation == 7
    report = Report(Counters(5, 5))
    assert agent.handle(ev.FromLearner(report), now_ns=5) == []
    again = [a.message for a in only(agent.handle(ev.Connected(WELCOME), now_ns=6), ev.ToSyncer)]
    assert again == [announce(1, 3), announce(3, 2), replace(report, sent_ns=6)]


def test_reconnect__delays_grow_to_a_limit_and_start_over() -> None:
    agent = started()
    delays = []
    for turn in range(8):
        [connect] = only(agent.handle(ev.ConnectionLost("x"), now_ns=turn), ev.Connect)
        delays.append(connect.delay_ns)
    assert delays == sorted(delays)
    assert delays[-1] == 2 * S
    agent.handle(ev.Connected(WELCOME), now_ns=9)
    assert only(agent.handle(ev.ConnectionLost("x"), now_ns=10), ev.Connect)[0].delay_ns == delays[0]


def test_heartbeats_go_out_only_while_connected() -> None:
    agent = started()
    assert len(agent.handle(ev.Beat(3, False, 0), now_ns=2)) == 1
    agent.handle(ev.ConnectionLost("x"), now_ns=3)
    assert agent.handle(ev.Beat(3, False, 0), now_ns=4) == []


def test_a_beat_is_left_out_where_a_message_just_went_and_never_twice() -> None:
    agent = started()
    agent.handle(ev.FromLearner(Report(Counters(5, 5))), now_ns=2)
    assert agent.handle(ev.Beat(5, False, 0), now_ns=3) == []
    assert len(agent.handle(ev.Beat(5, False, 0), now_ns=4)) == 1
    agent.handle(ev.FromLearner(Report(Counters(6, 6))), now_ns=5)
    assert len(agent.handle(ev.Beat(6, True, 0), now_ns=6)) == 1, "a wait is always told"


def test_a_name_in_use_is_asked_for_again_only_as_long_as_told() -> None:
    agent = Agent(name_wait_ns=S)
    agent.start(now_ns=0)
    refusal = Refuse("name", "in use")
    assert agent.handle(ev.FromSyncer(refusal), now_ns=S // 2) == []
    assert only(agent.handle(ev.ConnectionLost("closed"), now_ns=S // 2), ev.Connect)
    final = agent.handle(ev.FromSyncer(refusal), now_ns=2 * S)
    assert final == [ev.ToLearner(ev.Heard(refusal, 2 * S)), ev.AgentDone()]


def test_goodbye_is_sent_or_given_up_after_a_while() -> None:
    leave = Leave("finished", Counters(), Timings())
    assert started().handle(ev.FromLearner(leave), now_ns=2) == [ev.ToSyncer(leave), ev.AgentDone()]
    agent = started()
    agent.handle(ev.ConnectionLost("x"), now_ns=2)
    [timer] = agent.handle(ev.FromLearner(leave), now_ns=3)
    assert agent.handle(ev.Wake(), now_ns=timer.at_ns) == [ev.AgentDone()]


def test_messages_pass_to_the_learner_with_the_time_they_came() -> None:
    pace = Pace(3, 4, 5)
    assert started().handle(ev.FromSyncer(pace), now_ns=9) == [ev.ToLearner(ev.Heard(pace, 9))]


def test_reconnect__a_repeated_report_is_never_older_than_what_was_told_since() -> None:
    """Or the syncer would see counters run backwards and put an honest learner out."""
    agent = started()
    agent.handle(ev.FromLearner(Report(Counters(3, 30), Timings())), now_ns=2)
    later = Announce(1, 0, 8, Version(1, 0), 5, 5, 50, Counters(5, 50), 10)
    agent.handle(ev.FromLearner(later), now_ns=3)
    agent.handle(ev.FromSyncer(Fate(0, 1, 8, "missed", "")), now_ns=4)
    agent.handle(ev.ConnectionLost("cut"), now_ns=5)
    again = only(agent.handle(ev.Connected(WELCOME), now_ns=6), ev.ToSyncer)
    assert again == [ev.ToSyncer(Report(Counters(5, 50), Timings(), sent_ns=6))]


def test_downloads__a_piece_that_is_newer_again_goes_to_the_end() -> None:
    """On a downlink where one download takes longer than a round the same piece came for ever, the others never."""
    agent = started(places=8)
    agent.handle(ev.FromSyncer(update(0, 1)), now_ns=2)
    agent.handle(ev.FromSyncer(update(1, 1)), now_ns=3)
    agent.handle(ev.FromSyncer(update(0, 2)), now_ns=4)
    after = agent.handle(ev.DownloadEnded(0, 0, Version(1, 1), 1, Merged(), True), now_ns=5)
    assert [a.piece for a in only(after, ev.StartDownload)] == [1]
    after = agent.handle(ev.DownloadEnded(1, 1, Version(1, 1), 1, Merged(), True), now_ns=6)
    assert [(a.piece, a.version.n) for a in only(after, ev.StartDownload)] == [(0, 2)]


def test_seed__one_that_was_named_and_is_too_late_does_not_send_a_whole_model() -> None:
    agent = started()
    agent.handle(ev.SeedOffered((10, 10, 10)), now_ns=2)
    stopped = agent.handle(ev.FromSyncer(update(0, 0)), now_ns=3)
    assert only(stopped, ev.StopUpload) == [ev.StopUpload(0, 0)]
    after = agent.handle(ev.UploadEnded(0, 0, "unwanted", 4, 5), now_ns=4)
    assert only(after, ev.StartUpload) == []


KINDS = ("run", "protocol", "layout", "name", "token", "settings", "put out", "one of a later version")


@pytest.mark.parametrize("kind", KINDS)
def test_refusal__of_a_life_that_was_granted_is_no_end__it_is_asked_again_more_and_more_seldom(kind: str) -> None:
    """R28: another run at the old address, an evicted name, a rotated token: training goes on."""
    agent = started()
    delays = []
    for turn in range(8):
        assert agent.handle(ev.FromSyncer(Refuse(kind, "no")), now_ns=turn) == []
        lost, connect = agent.handle(ev.ConnectionLost("closed"), now_ns=turn)
        assert lost == ev.ToLearner(ev.StreamLost("no", kind))
        assert connect.generation == 7
        delays.append(connect.delay_ns)
    assert delays == sorted(delays)
    assert (delays[0], delays[-1]) == (S, 30 * S)


@pytest.mark.parametrize("kind", ["finished", "replaced"])
def test_refusal__that_ends_a_life_is_passed_on(kind: str) -> None:
    refusal = Refuse(kind, "over")
    actions = started().handle(ev.FromSyncer(refusal), now_ns=5)
    assert actions == [ev.ToLearner(ev.Heard(refusal, 5)), ev.AgentDone()]


def test_new_agent__goes_on_with_the_life_and_asks_before_it_sends_again() -> None:
    agent = Agent(past=ev.Past(7, ((0, Version(1, 2)),), (1,)))
    assert agent.start(now_ns=0) == [ev.Connect(7, 0)]
    assert agent.handle(ev.FromLearner(announce(4, 1)), now_ns=1) == []
    actions = agent.handle(ev.Connected(WELCOME), now_ns=2)
    assert [a.message for a in only(actions, ev.ToSyncer)] == [announce(4, 1)]
    assert only(actions, ev.StartUpload) == [ev.StartUpload(1, 4, 10, again=True)]
    assert only(agent.handle(ev.FromSyncer(update(0, 2)), now_ns=3), ev.StartDownload) == [], "it is held already"
    assert only(agent.handle(ev.FromSyncer(update(0, 3)), now_ns=3), ev.StartDownload) == [
        ev.StartDownload(0, Version(1, 3), 1, 10)
    ]


def test_new_life__nothing_of_the_one_before_is_said_in_it() -> None:
    """Another generation was granted; what the training thread says until it has begun that is of the old one."""
    agent = started()
    agent.handle(ev.FromLearner(announce(1, 0)), now_ns=2)
    agent.handle(ev.FromLearner(Report(Counters(90, 90))), now_ns=2)
    agent.handle(ev.FromSyncer(update(1, 5)), now_ns=2)
    agent.handle(ev.ConnectionLost("x"), now_ns=3)
    welcome = replace(WELCOME, generation=9)
    actions = agent.handle(ev.Connected(welcome), now_ns=4)
    assert only(actions, ev.ToSyncer) == []
    assert only(actions, ev.StopUpload) == [ev.StopUpload(0, 1)]
    assert agent.handle(ev.FromLearner(Report(Counters(91, 91))), now_ns=5) == []
    assert agent.handle(ev.Beat(91, False, 0), now_ns=6) == [], "the report before the cut said as much"
    assert agent.handle(ev.Beat(91, False, 0), now_ns=6) == [ev.ToSyncer(Heartbeat(0, False, 0))]
    void = agent.handle(ev.DownloadEnded(1, 0, Version(1, 5), 5, Merged(), True), now_ns=7)
    assert only(void, ev.ToLearner) == [], "it was asked for by the life before"
    agent.handle(ev.LifeBegun(9), now_ns=8)
    report = Report(Counters(0, 0))
    said = only(agent.handle(ev.FromLearner(report), now_ns=9), ev.ToSyncer)
    assert said == [ev.ToSyncer(replace(report, sent_ns=9))]


def test_new_life__one_that_leaves_meanwhile_is_let_go() -> None:
    agent = started()
    agent.handle(ev.ConnectionLost("x"), now_ns=3)
    agent.handle(ev.Connected(replace(WELCOME, generation=9)), now_ns=4)
    assert agent.handle(ev.FromLearner(Leave("x", Counters(5, 5), Timings())), now_ns=5) == [ev.AgentDone()]
