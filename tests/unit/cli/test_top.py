"""What ``muster top`` asks for and draws."""

import httpx
import pytest
from click.testing import CliRunner
from rich.console import Console

from cli.jobs.show import NAME_WIDTH_MAX, screen
from cli.main import app
from muster import Client
from muster.contracts.views.job import SummaryView
from tests.support.summaries import SUMMARY, summary


def summaries(**statuses: str) -> list[SummaryView]:
    return [summary(job_id=name, status=status) for name, status in statuses.items()]


def draw(jobs: list[SummaryView], total: int, height: int, width: int = 80) -> list[str]:
    console = Console(width=width, height=height, force_terminal=False)
    with console.capture() as written:
        console.print(screen(jobs, total, "http://api", console.size, ""))
    return [line.rstrip() for line in written.get().splitlines()]


def test_narrow_screen_keeps_id_and_status() -> None:
    jobs = summaries(**{"run-20260301-abcd": "RECOVERING", "b": "QUEUED"})
    lines = draw(jobs, 2, height=9, width=24)
    assert [line.split()[:2] for line in lines[2:4]] == [
        ["run-…bcd", "RECOVERING"],
        ["b", "QUEUED"],
    ]
    assert max(map(len, lines)) <= 24


def test_jobs_fit_the_screen_and_the_rest_is_counted() -> None:
    last = "[bold]" + 63 * "x" + "yz"
    lines = draw(summaries(**{last: "RECOVERING"}, d="QUEUED", b="FAILED"), 7, height=5)
    assert lines[0].startswith("http://api")
    assert lines[0].endswith("1 recovering, 1 queued, 1 failed")
    assert lines[2].startswith("[bold]xx")
    assert lines[2].split()[0].endswith("xxyz"), "the end of an id tells it from others"
    assert lines[2].split()[1:] == ["RECOVERING", "0/2", "5/20", "0.2500", "2.5", "1m15s", "1"]
    assert lines[3].split()[:2] == ["d", "QUEUED"]
    assert lines[4].startswith("5 more: select with --status")
    assert max(map(len, lines)) <= 80


def test_long_id_leaves_the_columns_close_together() -> None:
    (_, header, *_) = draw(summaries(**{63 * "x": "RUNNING"}), 1, height=9, width=200)
    assert header.index("status") == NAME_WIDTH_MAX + 2


@pytest.mark.parametrize("words", [["top"], ["top", "--once"]])
def test_table_is_printed_once_without_a_terminal(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [{**SUMMARY, "status": "FAILED"}, {**SUMMARY, "status": "RUNNING"}]
    answer = httpx.MockTransport(lambda _: httpx.Response(200, json={"jobs": found}))
    monkeypatch.setattr("cli.jobs.show.connected", lambda: Client("http://api", transport=answer))
    header, first, second = CliRunner().invoke(app, words).stdout.splitlines()
    assert header.split()[:2] == ["job", "status"]
    assert [first.split()[1], second.split()[1]] == ["RUNNING", "FAILED"], "active jobs come first"
