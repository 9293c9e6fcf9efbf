"""Peers that answer, late or never, and a process that is stopped itself."""

import random

import pytest

from muster.mesh.health import ALL_LIMIT, PRESETS, SAMPLE, Condition, Due, Health, HealthEvent
from muster.mesh.messages import Leave, Message, Probe, ProbeFor, Reached
from tests.support.probes import (
    WITHOUT,
    detection_seconds,
    faults_of_loss,
    faults_of_stops,
    silence_seconds,
)

PRESET_NAMES = sorted(PRESETS)


def health_of(preset: str = "default", *peers: str) -> Health:
    health = Health(PRESETS[preset], random.Random(1))  # noqa: S311  repeatable, not secret
    for peer in peers:
        health.add(peer, 0.0)
    return health


def go_on(health: Health, until: float, *answering: str) -> list[tuple[str, str]]:
    """Check at each time that is due; return who was asked to probe whom."""
    asked: list[tuple[str, str]] = []
    while (now := health.wake_at()) <= until:
        due = health.check(now)
        asked += due.indirect
        for peer in set(due.probed) & set(answering):
            health.answered(peer)
        for peer in due.lost:
            health.remove(peer)
    return asked


def conditions(health: Health, peer: str) -> list[str]:
    return [event.condition for event in health.events if event.peer == peer]


def test_a_dead_peer_is_lost_within_its_limit() -> None:
    for name, limit in ("default", 31.0), ("fast", 6.0):
        seconds = [silence_seconds(seed, PRESETS[name]) for seed in range(2)]
        assert max(seconds) <= min(limit, detection_seconds(PRESETS[name]) + 0.1)
        assert min(seconds) >= PRESETS[name].timeout_seconds


def test_no_peer_that_runs_is_removed_over_lossy_links() -> None:
    assert faults_of_loss(0, 300.0) == []


def test_a_node_that_was_stopped_is_removed_and_removes_none() -> None:
    assert faults_of_stops(0, 1200.0) == []


@pytest.mark.slow
@pytest.mark.parametrize("rule", WITHOUT)
def test_without_a_rule_a_peer_that_runs_is_removed(rule: str) -> None:
    assert WITHOUT[rule](0, 1200.0 if rule.startswith("sockets") else 300.0)


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_an_answer_clears_every_open_probe(preset: str) -> None:
    rules = PRESETS[preset]
    health = health_of(preset, "peer")
    for _ in range(50):
        now = health.wake_at()
        assert health.check(now).lost == ()
        if now % (rules.timeout_seconds * 0.9) < rules.every_seconds:
            health.answered("peer")


@pytest.mark.parametrize("seconds", [2.0, 60.0, 7 * 24 * 3600.0])
@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_a_process_that_was_stopped_blames_no_peer(preset: str, seconds: float) -> None:
    health = health_of(preset, "peer")
    now = health.wake_at()
    health.check(now)
    now = health.wake_at() + seconds
    assert health.check(now) == Due(probed=("peer",))
    health.answered("peer")
    assert health.check(health.wake_at()).lost == ()


def test_the_latency_is_a_moving_average() -> None:
    health = health_of("fast", "peer", "other")
    assert health.summary().latency_seconds is None
    for now in 1.0, 2.0:
        health.receive("peer", Probe(is_answer=True, sent_at=0.0), now)
    assert health.summary().latency_seconds == pytest.approx(1.0 * 0.8 + 2.0 * 0.2)


def test_a_peer_that_left_is_probed_no_more() -> None:
    health = health_of("fast", "peer")
    health.remove("peer")
    health.answered("peer")
    assert health.events == [HealthEvent("peer", Condition.REMOVED)]
    assert health.wake_at() == float("inf")
    assert health.check(100.0) == Due()


def test_a_silent_peer_goes_through_all_conditions() -> None:
    health = health_of("default", "silent", "well")
    health.answered("silent")  # its hello: no probe was judged yet
    assert health.summary().counts == {Condition.UNKNOWN: 2}
    assert health.summary().is_healthy
    go_on(health, 9.0, "silent", "well")
    go_on(health, 60.0, "well")
    assert conditions(health, "silent") == ["healthy", "degraded", "unhealthy", "removed"]
    assert conditions(health, "well") == ["healthy"]


def test_a_peer_that_answers_again_is_healthy() -> None:
    health = health_of("default", "peer")
    assert health.peers["peer"].uptime_ratio == 1.0
    go_on(health, 26.0)
    assert (health.peers["peer"].failed, health.peers["peer"].condition) == (2, Condition.DEGRADED)
    health.answered("peer")
    assert conditions(health, "peer") == ["degraded", "healthy"]
    assert health.peers["peer"].uptime_ratio == pytest.approx(3 / 5)


def test_an_unhealthy_peer_makes_the_summary_unhealthy() -> None:
    health = health_of("default", "peer")
    while not health.check(health.wake_at()).lost:
        assert health.summary().is_healthy
    health.answered("peer")  # too late
    assert not health.summary().is_healthy


def test_each_failure_asks_three_healthy_peers() -> None:
    health = health_of("default", "silent", "too", *"abcd")
    asked = go_on(health, 20.0, *"abcd")
    for subject in "silent", "too":
        helpers = [helper for helper, other in asked if other == subject]
        assert len(set(helpers)) == len(helpers) == 3
        assert set(helpers) <= set("abcd")


def test_an_answer_through_a_helper_clears_older_probes() -> None:
    health = health_of("default", "peer")
    go_on(health, 26.0)  # sent at 5, 10, 15, 20 and 25; two have failed
    health.receive("helper", Reached(subject="peer", asked_at=20.0), 26.0)
    peer = health.peers["peer"]
    assert (list(peer.open), peer.condition) == ([25.0], Condition.HEALTHY)
    health.answered("peer", 7.0)
    assert list(peer.open) == [25.0]


def test_a_helper_answers_once_after_the_subject() -> None:
    health = health_of("default", "asker", "subject")
    sent: list[tuple[str, Message]] = []
    said: list[tuple[str, Message]] = [
        ("asker", ProbeFor(subject="subject", asked_at=7.0)),
        ("asker", ProbeFor(subject="stranger", asked_at=7.0)),
        ("subject", Leave()),
        ("subject", Leave()),
    ]
    for peer, message in said:
        sent += health.receive(peer, message, 1.0)
    probe, reached = Probe(sent_at=1.0), Reached(subject="subject", asked_at=7.0)
    assert sent == [("subject", probe), ("asker", reached)]


def test_among_many_peers_a_few_are_probed_in_a_period() -> None:
    for count in ALL_LIMIT, 10 * ALL_LIMIT:
        peers = [str(number) for number in range(count)]
        health, probed = health_of("default", *peers), 0
        for _ in range(20):
            due = health.check(health.wake_at())
            probed += len(due.probed)
            for peer in due.probed:
                health.answered(peer)
        assert probed == pytest.approx(20 * (SAMPLE if count > ALL_LIMIT else count), 0.3)
