"""What ``muster top`` asks for and draws."""

from collections.abc import Callable

import httpx
import pytest
from rich.console import Console
from summaries import SUMMARY

from cli.screen import NAME_WIDTH_MIN, screen
from cli.top import Overview, top
from muster import Client
from muster.client.views import SummaryView


def overview(answer: Callable[[httpx.Request], httpx.Response]) -> Overview:
    return Overview(Client("http://api", transport=httpx.MockTransport(answer)), [])


def said(**statuses: str) -> httpx.Response:
    jobs = [{**SUMMARY, "job_id": name, "status": status} for name, status in statuses.items()]
    headers = {"ETag": 'W/"1"', "X-Total-Count": "7"}
    return httpx.Response(200, json={"jobs": jobs}, headers=headers)


def test_what_has_not_changed_is_not_given_again() -> None:
    tags = []

    def answer(request: httpx.Request) -> httpx.Response:
        tags.append(request.headers.get("If-None-Match"))
        return said(a="RUNNING") if len(tags) == 1 else httpx.Response(304)

    seen = overview(answer)
    for _ in range(3):
        seen.look()
        assert [job.job_id for job in seen.in_order()] == ["a"]
    assert tags == [None, 'W/"1"', 'W/"1"']
    assert seen.total == 7


def drawn(jobs: list[SummaryView], total: int, height: int, width: int = 80) -> list[str]:
    console = Console(width=width, height=height, force_terminal=False)
    with console.capture() as written:
        console.print(screen(jobs, total, "http://api", console.size, None))
    return [line.rstrip() for line in written.get().splitlines()]


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (50, ["job", "status", "ranks", "step", "loss", "ETA"]),
        (40, ["job", "status", "ranks", "step"]),
        (30, ["job", "status", "step"]),
        (20, ["job", "status"]),
    ],
)
def test_a_narrow_terminal_has_fewer_columns_and_still_says_which_job_is_how(
    width: int, columns: list[str]
) -> None:
    seen = overview(lambda _: said(**{"run-20260301-abcd": "RECOVERING", "b": "QUEUED"}))
    seen.look()
    lines = drawn(seen.in_order(), seen.total, height=9, width=width)
    assert lines[1].split() == columns
    assert [line.split()[1] for line in lines[2:4]] == ["RECOVERING", "QUEUED"]
    names = [line.split()[0] for line in lines[2:4]]
    assert len(names[0]) >= NAME_WIDTH_MIN
    assert (names[0][:3], names[1]) == ("run", "b")
    assert max(map(len, lines)) <= width


def test_who_goes_on_is_first_and_80_columns_and_the_height_are_enough() -> None:
    last = "[bold]" + 63 * "x" + "yz"
    seen = overview(lambda _: said(b="FAILED", **{last: "RECOVERING"}, d="QUEUED"))
    seen.look()
    lines = drawn(seen.in_order(), seen.total, height=5)
    assert lines[0].startswith("http://api")
    assert lines[0].endswith("1 recovering, 1 queued, 1 failed")
    assert lines[1].split() == [
        "job", "status", "ranks", "step", "loss", "steps/s", "ETA", "restarts",
    ]  # fmt: skip
    assert lines[2].startswith("[bold]xx")
    assert lines[2].split()[0].endswith("xxyz"), "the end of an id tells it from others"
    assert lines[2].split()[1:] == ["RECOVERING", "0/2", "5/20", "0.2500", "2.5", "1m15s", "1"]
    assert lines[3].split()[:2] == ["d", "QUEUED"]
    assert lines[4].startswith("5 more: --status chooses")
    assert max(map(len, lines)) <= 80


@pytest.fixture
def _connected(monkeypatch: pytest.MonkeyPatch) -> None:
    def connected() -> Client:
        return Client("http://api", transport=httpx.MockTransport(lambda _: said(a="RUNNING")))

    monkeypatch.setattr("cli.top.connected", connected)


@pytest.mark.usefixtures("_connected")
def test_what_is_printed_once_on_a_terminal_fits_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    top(once=True)
    header, line = capsys.readouterr().out.splitlines()
    assert line.split()[:2] == ["a", "RUNNING"]
    assert "steps/s" not in header
    assert len(header) <= 50


@pytest.mark.usefixtures("_connected")
def test_off_a_terminal_it_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    top()
    header, line = capsys.readouterr().out.splitlines()
    assert (header.split()[0], line.split()[:3]) == ("job", ["a", "RUNNING", "0/2"])
