"""Answers as tables, JSON, YAML and names; times and sizes as people read them."""

import json
import threading
from datetime import UTC, datetime
from queue import Queue
from threading import Timer

import pytest
from ruamel.yaml import YAML

from cli import output
from cli.output import (
    Output,
    cropped,
    facts,
    moment_of,
    notice_if_slow,
    plural,
    seconds_of,
    shortened,
    show,
    table,
)

CONTROLS = "\x1b]0;done\x07\x1b[2J\x7f\x9bm"
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize("form", Output)
def test_no_control_character_reaches_a_terminal(
    form: Output, capsys: pytest.CaptureFixture[str]
) -> None:
    show(form, {"name": CONTROLS}, [f"name  {CONTROLS}", "größe"], [CONTROLS])
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


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("10m", datetime(2026, 3, 1, 11, 50, tzinfo=UTC)),
        ("2026-03-01T13:00+02:00", datetime(2026, 3, 1, 11, tzinfo=UTC)),
        ("2026-03-01T13:00Z", datetime(2026, 3, 1, 13, tzinfo=UTC)),
        ("yesterday", None),
        ("9999999999d", None),
    ],
)
def test_time_is_relative_or_iso_8601(text: str, time: datetime | None) -> None:
    assert moment_of(text, NOON) == time


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
