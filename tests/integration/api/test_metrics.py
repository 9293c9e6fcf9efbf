"""A scrape of a real service: who may ask, what it shows of which jobs, what is counted."""

from collections import defaultdict
from collections.abc import Mapping

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from muster.contracts.job import JobStatus
from tests.support.api_service import StandIn
from tests.support.database_samples import worker

HOSTILE = 'a"} 1 # {x="1"} 1\\n\\'


def scrape(client: httpx.Client) -> Mapping[str, dict[str, float]]:
    """Return the values of all samples by their name and labels."""
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    found: Mapping[str, dict[str, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(answer.text):
        for one in family.samples:
            found[one.name][" ".join(one.labels.values())] = one.value
    return found


def test_a_running_job_is_shown_until_after_its_end(
    client: httpx.Client, stand_in: StandIn, job: str, node: str
) -> None:
    assert not any(job in labels for labels in scrape(client)["muster_job_steps"])
    first = worker(0, host=node, step=7, loss=0.5, endings={"crash": 2})
    stand_in.run(job, first, worker(1, host=node, step=8))
    found = scrape(client)
    assert found["muster_job_status"][f"{job}  RUNNING"] == 1
    assert found["muster_job_steps"][f"{job} "] == 15
    assert found["muster_job_loss"][f"{job} "] == 0.5
    assert found["muster_job_ranks"][f"{job}  live"] == 2
    assert found["muster_job_attempts_ended_total"][f"{job}  crash"] == 2
    assert found["muster_slots_taken"][""] >= 2
    stand_in.end(job)
    assert scrape(client)["muster_job_status"][f"{job}  STOPPED"] == 1


def test_requests_are_counted_by_template_and_code(client: httpx.Client, job: str) -> None:
    before = scrape(client)["muster_http_requests_total"]
    for path in (f"/jobs/{job}", f"/api/v1/jobs/{job}", "/jobs/unknown", "/nothing", "/other"):
        client.get(path)
    after = scrape(client)["muster_http_requests_total"]
    grown = {key: count - before.get(key, 0) for key, count in after.items()}
    assert {key: count for key, count in grown.items() if count} == {
        "200 /jobs/{job_id}": 2,
        "404 /jobs/{job_id}": 1,
        "404 none": 2,
        "200 /metrics": 1,
    }


@pytest.mark.usefixtures("job")
def test_the_service_reports_itself(client: httpx.Client, stand_in: StandIn) -> None:
    found = scrape(client)
    assert found["muster_database_up"] == found["muster_coordinator_up"] == {"": 1}
    assert found["muster_coordinator_lease_age_seconds"][""] >= 0
    assert 0 < found["muster_disk_free_bytes"][""] < found["muster_disk_size_bytes"][""]
    assert found["muster_queue_jobs"][""] == found["muster_jobs"]["QUEUED"] >= 1
    stand_in.resign()
    assert scrape(client)["muster_coordinator_up"] == {"": 0}
    stand_in.take_office()


def test_a_hostile_name_is_read_back(client: httpx.Client, stand_in: StandIn, name: str) -> None:
    fields = {"job_id": name, "name": HOSTILE, "mode": "independent", "world_size": 1}
    answer = client.post("/jobs", json=fields)
    assert answer.status_code == 201, answer.text
    stand_in.move(name, JobStatus.STARTING, JobStatus.RUNNING, workers=(worker(0),))
    assert f"{name} {HOSTILE}" in scrape(client)["muster_job_steps"]
    stand_in.end(name)
