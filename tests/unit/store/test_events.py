"""What happened to a job can be read from any place on."""

from store_samples import submit

from muster.contracts.job import StopRequest
from store.database import Database
from store.events import Events
from store.jobs import Jobs


def test_events_are_read_on_from_the_last_one_that_was_seen(database: Database, jobs: Jobs) -> None:
    job = submit(jobs, "a")
    submit(jobs, "another")
    jobs.scale(job.job_id, 3)
    jobs.request_stop(job.job_id, StopRequest.GRACEFUL, None)
    events = Events(database)
    every = events.following(job.job_id, 0, 10)
    assert [event.kind for event in every] == ["submitted", "scale_requested", "stop_requested"]
    assert every == events.of_job(job.job_id, 10)
    assert events.following(job.job_id, every[0].event_id or 0, 1) == every[1:2]
    assert events.following(job.job_id, every[-1].event_id or 0, 10) == []
