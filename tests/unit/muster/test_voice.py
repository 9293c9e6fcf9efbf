import os
import signal
import socket
import threading
from pathlib import Path

from ranks import Ear
from stories import beat

from muster.contracts.messages import Beat, Hello, Warned
from muster.line import Line
from muster.voice import Heart, Voice

OFTEN_SECONDS = 0.001
NEVER_SECONDS = 3600.0


def heart_of(ear: Ear, state: Beat, heartbeat_seconds: float) -> Heart:
    return Heart(
        ear.voice,
        lambda: state,
        heartbeat_seconds=heartbeat_seconds,
        orphan_timeout_seconds=NEVER_SECONDS,
        on_orphaned=lambda: None,
        on_replaced=lambda: None,
    )


def test_what_is_said_is_heard_message_by_message() -> None:
    ear = Ear()
    ear.voice.say(Hello())
    ear.voice.say(Warned(message="careful"))
    assert ear.heard() == [Hello(), Warned(message="careful")]
    ear.close()


def test_without_an_agent_nobody_is_told() -> None:
    Voice(Line(None)).say(Hello())


def test_an_agent_that_is_gone_does_no_harm() -> None:
    ear = Ear()
    ear.hang_up()
    for _ in range(3):
        ear.voice.say(Hello())
    ear.close()


def test_an_agent_that_does_not_listen_holds_nobody_up() -> None:
    ear = Ear()
    for _ in range(10_000):
        ear.voice.say(Warned(message="x" * 1000))
    heard = ear.heard()
    assert 0 < len(heard) < 10_000, "what does not fit is lost, and lost whole"
    assert set(heard) == {Warned(message="x" * 1000)}
    ear.close()


def test_a_channel_that_a_launcher_in_between_has_closed_is_no_agent() -> None:
    ours, theirs = socket.socketpair()
    closed = theirs.detach()
    ours.close()
    os.close(closed)
    Voice(Line(closed)).say(Hello())


def test_a_descriptor_that_is_something_else_by_now_is_left_alone(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        Voice(Line(file.fileno())).say(Hello())
        file.write(b"still ours")
    assert (tmp_path / "file").read_bytes() == b"still ours"


def test_a_heart_beats_by_itself_until_it_is_stopped() -> None:
    ear = Ear()
    heart = heart_of(ear, beat(step=7), OFTEN_SECONDS)
    heart.start()
    assert [ear.hear() for _ in range(3)] == [beat(step=7)] * 3
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "muster-heart"]
    heart.stop()
    thread.join(20)
    assert not thread.is_alive()
    ear.heard()
    assert ear.heard() == []
    ear.close()


def test_news_is_told_at_once_but_not_more_often_than_is_useful() -> None:
    ear = Ear()
    heart = heart_of(ear, beat(step=1), NEVER_SECONDS)
    for _ in range(100):
        heart.news()
    assert 1 <= len(ear.heard()) < 50
    ear.close()


def test_the_last_word_is_always_said() -> None:
    ear = Ear()
    heart = heart_of(ear, beat(step=9), NEVER_SECONDS)
    heart.news()
    heart.stop()
    assert ear.heard() == [beat(step=9), beat(step=9)]
    ear.close()


def test_a_broken_channel_sends_no_signal_to_the_program() -> None:
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        ear = Ear()
        ear.hang_up()
        ear.voice.say(Hello())
        ear.close()
    finally:
        signal.signal(signal.SIGPIPE, before)
