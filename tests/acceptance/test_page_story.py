"""A person who sees only the page trains, breaks and stops a job; makes the README's picture."""

import os
import re
import time
from pathlib import Path

import pytest

from tests.support.chromium import Browser, Page
from tests.support.installation import Installation

playwright = pytest.importorskip("playwright.sync_api", reason="needs: pip install playwright")
pytestmark = pytest.mark.timeout(300)

PICTURES = os.environ.get("MUSTER_PICTURES")
"""A directory, such as docs: the picture of the time line is written there."""

PICTURE_LIMIT_BYTES = 100_000

JOB = """\
name: digits
mode: synchronous
max_workers: 4
epochs: 100000
sleep_sec: 0.02
"""


def test_a_job_is_trained_broken_understood_and_stopped(
    browser: Browser,
    installation: Installation,
    tmp_path: Path,
) -> None:
    expect = playwright.expect
    viewport = {"width": 900, "height": 900}
    page = browser.new_page(
        base_url=installation.url, viewport=viewport, device_scale_factor=2, color_scheme="light"
    )
    page.goto("/ui/")
    page.get_by_role("link", name="submit", exact=True).click()
    page.get_by_label("job file").fill(JOB)
    page.get_by_label("world_size").fill("3")
    expect(page.locator("#verdict")).to_contain_text("valid")
    page.get_by_role("button", name="submit").click()
    page.wait_for_selector("#head[data-live]")
    job_id = page.locator("#head").get_attribute("data-job")
    status = page.locator("#head [data-text=status]")
    expect(status).to_have_text("▶ RUNNING")
    expect(page.locator("#curves")).to_contain_text("loss")
    training(page, seconds=3)
    page.get_by_role("button", name="kill a rank").click()
    expect(page.locator("#events")).to_contain_text("was ended by signal 9")
    training(page, seconds=2)
    page.get_by_label("ranks", exact=True).fill("4")
    page.get_by_role("button", name="scale").click()
    expect(page.locator("#command")).to_have_text(f"muster scale {job_id} 4")
    expect(page.locator("#head [data-text=ranks]")).to_have_text("4/4")
    training(page, seconds=2)
    page.get_by_role("button", name="pause").click()
    expect(status).to_have_text("⏸ PAUSED")
    page.get_by_role("button", name="resume").click(timeout=20_000)
    training(page, seconds=2)
    page.locator("#timeline rect.lost").press("Enter")
    expect(page.locator("#attempt")).to_contain_text("signal 9")
    page.get_by_role("button", name="stop").click()
    expect(status).to_have_text("■ STOPPED")
    seen = installation.request("GET", f"/jobs/{job_id}/summary").json()
    assert page.locator("#head [data-text=restarts]").inner_text() == str(seen["restarts"]) == "1"
    assert page.locator("#head [data-text=step]").inner_text().startswith(f"{seen['step']}/")
    page.reload()
    for scheme, width in [("dark", 900), ("light", 360), ("light", 900)]:
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(300)
        page.screenshot(path=tmp_path / f"{scheme}-{width}.png", full_page=True)
    picture = page.locator("#timeline").screenshot()
    assert 5_000 < len(picture) < PICTURE_LIMIT_BYTES
    if PICTURES is not None:
        (Path(PICTURES) / "timeline.png").write_bytes(picture)
    page.close()


def training(page: Page, seconds: float) -> None:
    """Wait until the job trains, and so long."""
    playwright.expect(page.locator("#head [data-text=status]")).to_have_text(
        "▶ RUNNING", timeout=20_000
    )
    until = time.monotonic() + seconds
    step = first_number(page)
    while time.monotonic() < until or first_number(page) == step:
        page.wait_for_timeout(100)


def first_number(page: Page) -> int:
    found = re.match(r"\d+", page.locator("#head [data-text=step]").inner_text())
    assert found is not None
    return int(found[0])
