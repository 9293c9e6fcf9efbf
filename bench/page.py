"""How soon the page shows a job: ``python bench/page.py``. Needs Chromium and Playwright.

A job of a few ranks trains; a tab opens its page again and again. Then changes are timed from the
event of the coordinator to the document, by one clock.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from playwright.sync_api import Page, sync_playwright

from tests.acceptance.test_page import CHROMIUM, OPTIONS
from tests.support.installation import Installation, is_running

JOB = {"mode": "synchronous", "epochs": 10**6, "sleep_sec": 0.05}

SIZES = """() => ["resource", "navigation"]
  .flatMap((kind) => performance.getEntriesByType(kind))
  .reduce((sum, it) => sum + it.decodedBodySize, 0)"""
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
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        Installation(Path(name)) as installation,
        sync_playwright() as playwright,
    ):
        job_id = installation.submit(world_size=asked.ranks, **JOB)
        installation.wait_until(job_id, is_running)
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=OPTIONS)
        page = browser.new_page()
        paints, lives, sizes = [], [], []
        for _ in range(asked.rounds):
            page.goto(f"{installation.url}/ui/jobs/{job_id}")
            lives.append(page.evaluate(LIVE))
            paints.append(page.evaluate(PAINT))
            sizes.append(page.evaluate(SIZES) / 1000)
        show("first paint", paints, "ms")
        show("first live state", lives, "ms")
        show("bytes, uncompressed", sizes, "KB")
        show("event written -> in the document", lags(page, installation, job_id, asked), "ms")
        browser.close()
        installation.end_jobs()


def lags(
    page: Page, installation: Installation, job_id: str, asked: argparse.Namespace
) -> list[float]:
    found = []
    for _ in range(asked.rounds):
        installation.wait_until(job_id, is_running)
        watching = page.evaluate_handle(f"() => {{ window.lag = ({LAG})(); }}")
        installation.request("POST", f"/jobs/{job_id}/checkpoint", json={})
        found.append(page.evaluate("() => window.lag"))
        watching.dispose()
    return found


def show(what: str, values: list[float], unit: str) -> None:
    ordered = sorted(values)
    p95 = ordered[min(int(0.95 * len(ordered)), len(ordered) - 1)]
    print(f"{what:<36} median {statistics.median(values):7.1f}  p95 {p95:7.1f} {unit}")


if __name__ == "__main__":
    main()
