"""The page while what it shows goes away: the service, the job, or the sense of its numbers."""

import signal

import pytest

from tests.support.chromium import Page
from tests.support.installation import TOGETHER, Installation, is_running

playwright = pytest.importorskip("playwright.sync_api", reason="needs: pip install playwright")
pytestmark = pytest.mark.timeout(300)


def test_the_page_goes_on_after_the_service_was_killed(
    page: Page,
    installation: Installation,
) -> None:
    job_id = installation.submit(world_size=2, **TOGETHER)
    installation.wait_until(job_id, is_running)
    page.goto(f"/ui/jobs/{job_id}")
    page.wait_for_selector("#head[data-live]")
    installation.api.end(signal.SIGKILL)
    stale = page.locator("#stale")
    playwright.expect(stale).to_contain_text("stale since")
    installation.start_api()
    playwright.expect(stale).to_be_hidden()
    installation.kill(job_id, 0)
    events = page.locator("#events")
    playwright.expect(events).to_contain_text("was ended by signal 9")
    installation.stop(job_id)
    playwright.expect(events).to_contain_text("the job is STOPPED")
    known = installation.request("GET", f"/jobs/{job_id}/events").json()["events"]
    texts = page.locator("#events li bdi").all_inner_texts()
    assert texts == [event["message"] for event in reversed(known)], "once each, in order"


def test_a_deleted_job_is_said_to_be_deleted(
    page: Page,
    installation: Installation,
) -> None:
    submitted = installation.request("POST", "/jobs", json={"world_size": 1, **TOGETHER})
    job_id = submitted.json()["job_id"]
    installation.wait_until(job_id, is_running)
    page.goto(f"/ui/jobs/{job_id}")
    page.wait_for_selector("#head[data-live]")
    installation.request("DELETE", f"/jobs/{job_id}?force=true")
    playwright.expect(page.locator("#stale")).to_have_text("deleted")
    page.reload()
    playwright.expect(page.locator("main")).to_contain_text(f"there is no job {job_id}")


@pytest.mark.parametrize("path", ["/ui/jobs/unknown", "/ui/?status=NO"])
def test_a_refusal_is_a_page(page: Page, path: str) -> None:
    page.goto(path)
    assert page.locator("main h1").inner_text()
    assert page.get_by_role("link", name="Muster").get_attribute("href") == "/ui/"
