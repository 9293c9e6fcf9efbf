"""What a tab does with much: ``python bench/tab.py``. Needs Chromium and Playwright.

The events of two hours, one a second, are written as fast as the tab takes them: its memory should
stay. Then a log of 1 GiB: how soon its last lines are there, and those that a search finds.
"""

import argparse
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from page import show
from playwright.sync_api import Page, sync_playwright

from database.engine import Database
from database.records import Event, utc_now
from muster.contracts.job.status import JobStatus
from tests.support.api_service import Agent, Service, StandIn
from tests.support.chromium import launch

BURST = 20
"""Events of one commit."""

LINE = "epoch 3 step 12345/99999 loss 0.1234 accuracy 0.9876 rate 1234.5/s ok\n"
FIRST_LINES = """() => new Promise((done) => {
  const list = document.getElementById("lines");
  const look = () => (list?.childElementCount > 50 ? done(performance.now()) : setTimeout(look, 2));
  look(); })"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=7200)
    parser.add_argument("--log-mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        service = Service(Path(name))
        service.start()
        database = Database.open(service.database_url)
        stand_in = StandIn(database)
        browser = launch(playwright)
        page = browser.new_page(base_url=service.url)
        replay(page, stand_in, asked.events)
        read_log(page, Agent(service.files), asked)
        browser.close()
        stand_in.move("job", JobStatus.STOPPING, JobStatus.STOPPED)
        database.close()
        service.end(15)


def replay(page: Page, stand_in: StandIn, events: int) -> None:
    page.request.post("/jobs", data={"job_id": "job"})
    stand_in.run("job")
    page.goto("/ui/jobs/job")
    page.wait_for_selector("#head[data-live]")
    cdp = page.context.new_cdp_session(page)
    cdp.send("Performance.enable")
    sizes, began = [], utc_now()
    for number in range(0, events, BURST):
        written = [
            Event(
                at=began + timedelta(seconds=it),
                kind="warning" if it % 9 else "rank_exited",
                message=f"rank {it % 64} said something, event number {it}",
                rank=it % 64,
            )
            for it in range(number, number + BURST)
        ]
        stand_in.write("job", events=written)
        page.wait_for_function(
            "text => document.querySelector('#events bdi')?.textContent === text",
            arg=written[-1].message,
        )
        if number % (events // 20 // BURST * BURST) == 0:
            cdp.send("HeapProfiler.collectGarbage")
            found = {
                it["name"]: it["value"] for it in cdp.send("Performance.getMetrics")["metrics"]
            }
            sizes.append(found["JSHeapUsedSize"] / 1e6)
    # The list of events fills up at first.
    print(f"tab's memory over {events} events: {sizes[1]:.2f} MB to {sizes[-1]:.2f} MB")


def read_log(page: Page, agent: Agent, asked: argparse.Namespace) -> None:
    piece = LINE * (1 << 14)
    for number in range(asked.log_mib * (1 << 20) // len(piece)):
        agent.write("job", 0, piece, at_micros=number)
    times = []
    for _ in range(asked.rounds):
        page.goto("/ui/jobs/job/logs")
        times.append(page.evaluate(FIRST_LINES))
    show(f"first lines of a log of {asked.log_mib} MiB", times, "ms")


if __name__ == "__main__":
    main()
