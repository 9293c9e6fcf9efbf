"""Answers as tables, JSON, YAML and names; times and sizes as people read them."""

import json
import threading
from datetime import UTC, datetime, timedelta
from queue import Queue
from threading import Timer

import click
import pytest
from ruamel.yaml import YAML

from cli import output
from cli.jobs.show import parse_time
from cli.main import app
from cli.output import (
    Output,
    cropped,
    facts,
    notice_if_slow,
    plural,
    seconds_of,
    shortened,
    show,
    table,
)

CONTROLS = "\x1b]0;done\x07\x1b[2J\x7f\x9bm\u202e\u200b\U000e0001"


@pytest.mark.parametrize("form", Output)
def test_no_control_character_reaches_a_terminal(
    form: Output, capsys: pytest.CaptureFixture[str]
) -> None:
    show(
        form, {"name": f"a{CONTROLS}", "mark": "\u202e"}, [f"name  {CONTROLS}", "größe"], [CONTROLS]
    )
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())


def test_json_and_yaml_keep_every_value(capsys: pytest.CaptureFixture[str]) -> None:
    body = {"name": f"{CONTROLS} größe", "none": None, "list": [1, 0.5, True, "12:30"]}
    show(Output.JSON, body, [], [])
    assert json.loads(capsys.readouterr().out) == body
    show(Output.YAML, body, [], [])
    text = capsys.readouterr().out
    assert YAML(typ="safe", pure=True).load(text) == body
    assert text.startswith("name: "), "the order is that of the API"


def test_table_aligns_numbers_right_and_text_left() -> None:
    rows = [("höst", 7, None), ("b", 1234, None)]
    assert list(table(("node", "step", "pid"), rows)) == [
        "node  step  pid",
        "höst     7  -",
        "b     1234  -",
    ]
    assert list(table(("a", "bb"), [])) == ["a  bb"]


def test_facts_omit_unknown_values() -> None:
    assert list(facts([("job", "a"), ("message", None), ("ranks", "2")])) == [
        "job    a",
        "ranks  2",
    ]


@pytest.mark.parametrize(
    ("text", "end", "middle"), [("four", "four", "four"), ("fives", "fiv…", "fi…s"), ("", "", "")]
)
def test_long_text_is_cut_with_an_ellipsis(text: str, end: str, middle: str) -> None:
    assert (shortened(text, 4), cropped(text, 4)) == (end, middle)


def test_counts_have_a_noun() -> None:
    assert [plural(count, "rank") for count in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("12h", 43_200), ("2d", 172_800), ("5", None), ("-1m", None)],
)
def test_duration_has_a_unit(text: str, seconds: int | None) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["2026-03-01T13:00+02:00", "2026-03-01T11:00Z"])
def test_time_may_be_iso_8601(text: str) -> None:
    assert parsed(text) == datetime(2026, 3, 1, 11, tzinfo=UTC)


def test_time_may_be_relative() -> None:
    then = parsed("10m")
    assert timedelta(minutes=10) <= datetime.now(UTC) - then < timedelta(minutes=11)


@pytest.mark.parametrize("text", ["yesterday", "9999999999d"])
def test_text_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a time such as 10m"):
        parsed(text)


def parsed(text: str) -> datetime:
    found = parse_time(click.Context(app), app.params[0], text)
    assert found is not None
    return found


def test_slow_work_prints_a_notice_and_quick_work_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed: Queue[str] = Queue()
    monkeypatch.setattr(output, "print_stderr", printed.put)
    monkeypatch.setattr(output, "NOTICE_SECONDS", 3600.0)
    with notice_if_slow("quick"):
        (timer,) = [one for one in threading.enumerate() if isinstance(one, Timer)]
    timer.join(60)
    assert not timer.is_alive()
    monkeypatch.setattr(output, "NOTICE_SECONDS", 0.0)
    with notice_if_slow("slow"):
        assert printed.get(timeout=60) == "muster: slow"
