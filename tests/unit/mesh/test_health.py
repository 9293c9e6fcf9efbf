"""Peers that answer, late or never, and a process that is stopped itself."""

import random

import pytest

from muster.mesh.health import PRESETS, Health

PRESET_NAMES = sorted(PRESETS)


def silence_seconds(preset: str, death: float) -> float:
    """Return how long after its death a peer is lost that has answered each probe at once."""
    health, now = Health(PRESETS[preset]), 0.0
    health.add("peer", now)
    while True:
        now = health.wake_at()
        probed, lost = health.check(now)
        if lost:
            return now - death
        if probed and now < death:
            health.answered("peer")


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_a_dead_peer_is_lost_within_its_limit(preset: str) -> None:
    rules = PRESETS[preset]
    limit = rules.every_seconds + rules.timeout_seconds
    limit += (rules.failures - 1) * rules.every_seconds
    chance = random.Random(1)  # noqa: S311  repeatable, not secret
    seconds = [silence_seconds(preset, chance.uniform(0, 100)) for _ in range(200)]
    assert max(seconds) <= limit + 1e-6
    assert min(seconds) >= limit - rules.every_seconds - 1e-6


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_an_answer_clears_every_open_probe(preset: str) -> None:
    rules = PRESETS[preset]
    health, now = Health(rules), 0.0
    health.add("peer", now)
    for _ in range(50):
        now = health.wake_at()
        assert health.check(now)[1] == []
        if now % (rules.timeout_seconds * 0.9) < rules.every_seconds:
            health.answered("peer")


@pytest.mark.parametrize("seconds", [2.0, 60.0, 7 * 24 * 3600.0])
@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_a_process_that_was_stopped_blames_no_peer(preset: str, seconds: float) -> None:
    health = Health(PRESETS[preset])
    health.add("peer", 0.0)
    now = health.wake_at()
    health.check(now)
    now = health.wake_at() + seconds
    assert health.check(now) == (["peer"], [])
    health.answered("peer")
    assert health.check(health.wake_at())[1] == []


def test_the_latency_is_a_moving_average() -> None:
    health = Health(PRESETS["fast"])
    health.add("peer", 0.0)
    assert health.latencies_seconds() == []
    for seconds in 1.0, 2.0:
        health.measure("peer", seconds)
    assert health.latencies_seconds() == [pytest.approx(1.0 * 0.8 + 2.0 * 0.2)]
    health.remove("peer")
    health.measure("peer", 3.0)
    assert health.latencies_seconds() == []


def test_a_peer_that_left_is_probed_no_more() -> None:
    health = Health(PRESETS["fast"])
    health.add("peer", 0.0)
    health.remove("peer")
    health.answered("peer")
    assert health.wake_at() == float("inf")
    assert health.check(100.0) == ([], [])
