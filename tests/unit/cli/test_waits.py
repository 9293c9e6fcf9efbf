"""What is said to a person who waits, and only to one who does."""

import threading
from threading import Event, Timer

import pytest

from cli import waits
from cli.waits import said_if_it_lasts


def test_who_waits_is_told_what_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Event()
    remark = waits.remark

    def say(sentence: str) -> None:
        remark(sentence)
        told.set()

    monkeypatch.setattr(waits, "remark", say)
    monkeypatch.setattr(waits, "PATIENCE_SECONDS", 0.0)
    with said_if_it_lasts("the kettle is on …"):
        assert told.wait(60)
    assert capsys.readouterr().err == "muster: the kettle is on …\n"


def test_what_is_done_soon_is_done_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waits, "PATIENCE_SECONDS", 3600.0)
    with said_if_it_lasts("the kettle is on …"):
        (timer,) = [one for one in threading.enumerate() if isinstance(one, Timer)]
    timer.join(60)
    assert not timer.is_alive(), "nobody is left who would say it later"
    assert capsys.readouterr().err == ""
