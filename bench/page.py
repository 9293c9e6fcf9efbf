"""How soon the page shows a job: ``python bench/page.py``. Needs Chromium and Playwright.

A job of a few ranks trains; a tab opens its page again and again. Then changes are timed from the
event of the coordinator to the document, by one clock. At last a job that has reported its loss in
a million steps is opened again and again, until its curves are drawn.
"""

import argparse
import socket
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent.parent))

from _services import cpu_seconds
from playwright.sync_api import Page, sync_playwright

from tests.support.chromium import launch
from tests.support.installation import Installation, is_over, is_running

JOB = {"mode": "synchronous", "epochs": 10**6, "sleep_sec": 0.05}
SLOW = """
import time
import muster

run = muster.join()
while not run.should_stop:
    run.step(loss=1.0)
    time.sleep(1)
"""
WATCHED_SECONDS = 20.0
LONG = """
import random, time
import muster

run = muster.join()
while run.steps_done < STEPS:
    run.step(loss=1e6 / (run.steps_done + 1e5) + random.random())
    if run.steps_done % 1000 == 0:
        time.sleep(0.1)
"""

SIZES = """(isOfCurves) => ["resource", "navigation"]
  .flatMap((kind) => performance.getEntriesByType(kind))
  .filter((it) => it.name.includes("/series") === isOfCurves)
  .reduce((sum, it) => sum + it.decodedBodySize, 0)"""
DRAWN = """() => new Promise((done) => {
  const canvas = document.querySelector("canvas");
  const look = () => requestAnimationFrame(
    () => (canvas.dataset.points > 0 ? done(performance.now()) : look()));
  look(); })"""
PAINT = """() => new Promise((done) => {
  const look = () => {
    const [first] = performance.getEntriesByType("paint");
    return first ? done(first.startTime) : setTimeout(look, 2); };
  look(); })"""
LIVE = """() => new Promise((done) => {
  const head = document.getElementById("head");
  const look = () => ("live" in head.dataset ? done(performance.now()) : setTimeout(look, 2));
  look(); })"""
LAG = """() => new Promise(done => {
  new MutationObserver((_, watching) => {
    const at = document.querySelector('#events time').dateTime;
    watching.disconnect(); done(Date.now() - Date.parse(at));
  }).observe(document.querySelector('#events ol'), {childList: true}); })"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--slow", action="store_true", help="ranks that report once a second")
    parser.add_argument("--clients", type=int, default=0, help="that watch the job beside the tab")
    parser.add_argument("--steps", type=int, default=10**6)
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        Installation(Path(name)) as installation,
        sync_playwright() as playwright,
    ):
        job = {"command": ["python", "-c", SLOW]} if asked.slow else JOB
        job_id = installation.submit(world_size=asked.ranks, **job)
        installation.wait_until(job_id, is_running)
        browser = launch(playwright)
        page = browser.new_page()
        paints, lives, sizes = [], [], []
        for _ in range(asked.rounds):
            page.goto(f"{installation.url}/ui/jobs/{job_id}")
            lives.append(page.evaluate(LIVE))
            paints.append(page.evaluate(PAINT))
            sizes.append(page.evaluate(SIZES, arg=False) / 1000)
        show("first paint", paints, "ms")
        show("first live state", lives, "ms")
        show("bytes, uncompressed", sizes, "KB")
        show("event written -> in the document", lags(page, installation, job_id, asked), "ms")
        if asked.clients:
            share = watched(installation, f"/jobs/{job_id}/watch", asked.clients)
            print(f"{asked.clients} clients and a tab: {share:.1%} of a core")
        installation.stop(job_id)
        installation.wait_until(job_id, is_over)
        curves(page, installation, asked)
        browser.close()
        installation.end_jobs()


def watched(installation: Installation, path: str, clients: int) -> float:
    """Return the share of a core that the API takes while so many clients watch a job."""
    address = urlsplit(installation.url)
    with ExitStack() as stack:
        for _ in range(clients):
            client = socket.create_connection((address.hostname, address.port))
            stack.enter_context(client)
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode())
            threading.Thread(target=drain, args=(client,), daemon=True).start()
        time.sleep(2)
        pid = installation.api.process.pid
        before = cpu_seconds(pid, with_children=False)
        time.sleep(WATCHED_SECONDS)
        return (cpu_seconds(pid, with_children=False) - before) / WATCHED_SECONDS


def drain(client: socket.socket) -> None:
    """Read until the end; the service must not have refused."""
    assert b" 200 " in client.recv(64)
    with suppress(OSError):  # closed at the end
        while client.recv(1 << 16):
            pass


def curves(page: Page, installation: Installation, asked: argparse.Namespace) -> None:
    program = LONG.replace("STEPS", str(asked.steps))
    job_id = installation.submit(world_size=1, command=["python", "-c", program])
    installation.deadline_seconds = 600
    installation.complete(job_id)
    drawn, sizes = [], []
    for _ in range(asked.rounds):
        page.goto(f"{installation.url}/ui/jobs/{job_id}")
        drawn.append(page.evaluate(DRAWN))
        sizes.append(page.evaluate(SIZES, arg=True) / 1000)
    points = page.evaluate("() => document.querySelector('canvas').dataset.points")
    show(f"curve of {asked.steps} steps ({points} points)", drawn, "ms")
    show("bytes of its points", sizes, "KB")


def lags(
    page: Page, installation: Installation, job_id: str, asked: argparse.Namespace
) -> list[float]:
    found = []
    for number in range(asked.rounds):
        installation.wait_until(job_id, is_running)
        watching = page.evaluate_handle(f"() => {{ window.lag = ({LAG})(); }}")
        if asked.slow:
            installation.request("POST", f"/jobs/{job_id}/faults", json={"rank": number})
        else:
            installation.request("POST", f"/jobs/{job_id}/checkpoint", json={})
        found.append(page.evaluate("() => window.lag"))
        watching.dispose()
    return found


def show(what: str, values: list[float], unit: str) -> None:
    ordered = sorted(values)
    p95 = ordered[min(int(0.95 * len(ordered)), len(ordered) - 1)]
    print(f"{what:<40} median {statistics.median(values):7.1f}  p95 {p95:7.1f} {unit}")


if __name__ == "__main__":
    main()
