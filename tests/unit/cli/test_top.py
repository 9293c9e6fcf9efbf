"""What ``muster top`` asks for and draws."""

from collections.abc import Callable

import httpx
import pytest
from click.testing import CliRunner
from rich.console import Console

from cli.jobs import JobList, screen
from cli.main import app
from muster import Client
from muster.contracts.views import SummaryView
from tests.support.summaries import SUMMARY


def job_list(answer: Callable[[httpx.Request], httpx.Response]) -> JobList:
    return JobList(Client("http://api", transport=httpx.MockTransport(answer)), [])


def jobs(**statuses: str) -> httpx.Response:
    found = [{**SUMMARY, "job_id": name, "status": status} for name, status in statuses.items()]
    headers = {"ETag": 'W/"1"', "X-Total-Count": "7"}
    return httpx.Response(200, json={"jobs": found}, headers=headers)


def test_unchanged_jobs_are_not_sent_again() -> None:
    tags = []

    def answer(request: httpx.Request) -> httpx.Response:
        tags.append(request.headers.get("If-None-Match"))
        return jobs(a="RUNNING") if len(tags) == 1 else httpx.Response(304)

    seen = job_list(answer)
    for _ in range(3):
        seen.refresh()
        assert [job.job_id for job in seen.active_first()] == ["a"]
    assert tags == [None, 'W/"1"', 'W/"1"']
    assert seen.total == 7


def draw(found: list[SummaryView], total: int, height: int, width: int = 80) -> list[str]:
    console = Console(width=width, height=height, force_terminal=False)
    with console.capture() as written:
        console.print(screen(found, total, "http://api", console.size, None))
    return [line.rstrip() for line in written.get().splitlines()]


def test_narrow_screen_keeps_id_and_status() -> None:
    seen = job_list(lambda _: jobs(**{"run-20260301-abcd": "RECOVERING", "b": "QUEUED"}))
    seen.refresh()
    lines = draw(seen.active_first(), seen.total, height=9, width=24)
    assert [line.split()[:2] for line in lines[2:4]] == [
        ["run-…bcd", "RECOVERING"],
        ["b", "QUEUED"],
    ]
    assert max(map(len, lines)) <= 24


def test_active_jobs_come_first_and_fit_the_screen() -> None:
    last = "[bold]" + 63 * "x" + "yz"
    seen = job_list(lambda _: jobs(b="FAILED", **{last: "RECOVERING"}, d="QUEUED"))
    seen.refresh()
    lines = draw(seen.active_first(), seen.total, height=5)
    assert lines[0].startswith("http://api")
    assert lines[0].endswith("1 recovering, 1 queued, 1 failed")
    assert lines[1].split() == [
        "job", "status", "ranks", "step", "loss", "steps/s", "ETA", "restarts",
    ]  # fmt: skip
    assert lines[2].startswith("[bold]xx")
    assert lines[2].split()[0].endswith("xxyz"), "the end of an id tells it from others"
    assert lines[2].split()[1:] == ["RECOVERING", "0/2", "5/20", "0.2500", "2.5", "1m15s", "1"]
    assert lines[3].split()[:2] == ["d", "QUEUED"]
    assert lines[4].startswith("5 more: select with --status")
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("words", [["top"], ["top", "--once"]])
def test_table_is_printed_once_without_a_terminal(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def connected() -> Client:
        return Client("http://api", transport=httpx.MockTransport(lambda _: jobs(a="RUNNING")))

    monkeypatch.setattr("cli.jobs.connected", connected)
    header, line = CliRunner().invoke(app, words).stdout.splitlines()
    assert (header.split()[0], line.split()[:3]) == ("job", ["a", "RUNNING", "0/2"])
