"""What the API asks of jobs."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import insert
from store_samples import (
    EVERY_STATUS,
    NOON,
    SteppingClock,
    bring_to,
    commit,
    epoch,
    everything,
    finish,
    member,
    nothing_moves,
    submit,
    take_lease,
    worker,
    write_of,
)

from muster.contracts.job import JobId, JobStatus, JobUid, StopRequest
from muster.contracts.spec import JobSpec
from store.database import Database
from store.errors import JobExists, JobMissing, JobNotTerminal, JobOver
from store.events import Events
from store.jobs import Jobs
from store.members import Members
from store.records import Job
from store.rows import values_of
from store.selection import Selection
from store.tables import JOBS
from store.tenure import Tenure

GRACEFUL, FORCED = StopRequest.GRACEFUL, StopRequest.FORCED


def ids(found: list[Job]) -> list[str]:
    return [job.job_id for job in found]


def test_a_created_job_reads_back_as_it_was_answered(jobs: Jobs) -> None:
    spec = JobSpec(name="añ \U0001f680", command=("python", "x.py"), env={"A": "b"}, seed=2**63 - 1)
    created = jobs.create(JobId("a"), JobUid("u"), spec, message="data set made", idempotency=None)
    assert created.spec == spec
    assert created.status is JobStatus.QUEUED
    assert created.created_at == NOON + timedelta(seconds=1)
    assert jobs.get(JobId("a")) == created


def test_a_job_begins_with_the_event_of_its_submission(database: Database, jobs: Jobs) -> None:
    job = submit(jobs, "a")
    (event,) = Events(database).of_job(job.job_id, 10)
    assert (event.kind, event.at) == ("submitted", job.created_at)


def test_an_id_is_given_once(database: Database, jobs: Jobs) -> None:
    submit(jobs, "a")
    with nothing_moves(database), pytest.raises(JobExists, match="job a exists already"):
        submit(jobs, "a", uid="another")


def test_an_unknown_job_is_none_or_an_error(jobs: Jobs) -> None:
    assert jobs.find(JobId("nobody")) is None
    with pytest.raises(JobMissing, match="there is no job nobody"):
        jobs.get(JobId("nobody"))


def test_paging_shows_each_of_a_thousand_jobs_once_while_new_ones_arrive(
    database: Database, jobs: Jobs, clock: SteppingClock
) -> None:
    first = submit(jobs, "first")
    old = [
        # Three to a microsecond, so that the id has to break the tie.
        replace(
            first,
            job_id=JobId(f"job-{number:04d}"),
            uid=JobUid(f"uid-{number:04d}"),
            created_at=NOON + timedelta(days=1, microseconds=number // 3),
        )
        for number in range(999)
    ]
    with database.writing() as connection:
        connection.execute(insert(JOBS), [values_of(job) for job in old])
    clock.now = NOON + timedelta(days=2)
    seen, after = [], None
    while page := jobs.page(Selection(), 70, after):
        seen += ids(page)
        after = (page[-1].created_at, page[-1].job_id)
        submit(jobs, f"new-{len(seen)}")
    assert seen == [*ids(old)[::-1], "first"]


def test_jobs_are_in_the_order_of_their_creation_whatever_a_clock_says(
    jobs: Jobs, clock: SteppingClock
) -> None:
    clock.step = timedelta(hours=-1)
    created = [submit(jobs, job_id) for job_id in ("c", "b", "a")]
    assert ids(jobs.page(Selection(oldest_first=True), 10, None)) == ["c", "b", "a"]
    later = Selection(created_after=created[0].created_at)
    assert ids(jobs.page(later, 10, None)) == ["a", "b"]


def test_a_filter_acts_on_the_status_a_person_sees(database: Database, jobs: Jobs) -> None:
    for name in ("queued", "running", "stopping", "over"):
        submit(jobs, name)
    bring_to(database, jobs.get(JobId("running")), JobStatus.STARTING, JobStatus.RUNNING)
    finish(database, jobs.get(JobId("over")))
    jobs.request_stop(JobId("stopping"), GRACEFUL, None)
    seen = {status: ids(jobs.page(Selection(statuses=[status]), 10, None)) for status in JobStatus}
    assert {status: found for status, found in seen.items() if found} == {
        JobStatus.QUEUED: ["queued"],
        JobStatus.RUNNING: ["running"],
        JobStatus.STOPPING: ["stopping"],
        JobStatus.FAILED: ["over"],
    }
    waiting = Selection(statuses=[JobStatus.QUEUED, JobStatus.STOPPING])
    assert jobs.count(waiting) == 2
    assert jobs.count(Selection(statuses=[])) == 0
    assert jobs.page(Selection(statuses=[]), 10, None) == []


def labelled(jobs: Jobs, job_id: str, name: str | None = None, **labels: str) -> None:
    spec = JobSpec(name=name, labels=labels)
    jobs.create(JobId(job_id), JobUid(f"uid-{job_id}"), spec, message=None, idempotency=None)


STRANGE = 'it\'s "a\\b", {c}'
STRANGE_NAMES = ("{", "}", "{=", "a,b", "NULL", "null", "it's", "two words", " ", "$", "[0]", "0")
"""What the paths of a database give a meaning of their own."""

FILTERS: list[tuple[Selection, list[str]]] = [
    (Selection(), ["c", "b", "a"]),
    (Selection(oldest_first=True), ["a", "b", "c"]),
    (Selection(name="näme\"'%"), ["b"]),
    (Selection(name="team"), []),
    (Selection(labels={"team": "red"}), ["b", "a"]),
    *((Selection(labels={name: STRANGE}), ["c"]) for name in STRANGE_NAMES),
    *((Selection(labels={name: "red"}), []) for name in STRANGE_NAMES),
    (Selection(labels={"team": "red", "a.b": "$"}), ["b"]),
    (Selection(labels={"team": "r%"}), []),
    (Selection(labels={"seed": "0"}), []),
    (Selection(created_after=NOON + timedelta(seconds=1)), ["c", "b"]),
    (Selection(created_before=NOON + timedelta(seconds=3)), ["b", "a"]),
    (
        Selection(created_after=NOON + timedelta(seconds=1), labels={"team": "red"}),
        ["b"],
    ),
]


@pytest.mark.parametrize(("selection", "found"), FILTERS)
def test_a_selection_is_what_all_its_filters_let_through(
    jobs: Jobs, selection: Selection, found: list[str]
) -> None:
    labelled(jobs, "a", team="red")
    labelled(jobs, "b", "näme\"'%", team="red", **{"a.b": "$"})
    labelled(jobs, "c", team="blue", **dict.fromkeys(STRANGE_NAMES, STRANGE))
    assert ids(jobs.page(selection, 10, None)) == found
    assert jobs.count(selection) == len(found)


def test_the_oldest_first_go_on_where_the_page_before_ended(jobs: Jobs) -> None:
    for job_id in ("a", "b", "c"):
        labelled(jobs, job_id)
    first = jobs.get(JobId("a"))
    page = jobs.page(Selection(oldest_first=True), 1, (first.created_at, first.job_id))
    assert ids(page) == ["b"]


def test_the_coordinator_sees_what_is_not_over_in_the_order_of_creation(
    database: Database, jobs: Jobs
) -> None:
    for name in ("c", "a", "b", "over"):
        submit(jobs, name)
    finish(database, jobs.get(JobId("over")))
    jobs.request_stop(JobId("a"), FORCED, None)
    assert ids(jobs.unfinished()) == ["c", "a", "b"]


def test_of_what_is_known_only_what_has_changed_is_read_again(jobs: Jobs) -> None:
    known = [submit(jobs, name) for name in ("c", "a", "b")]
    changed = jobs.request_stop(JobId("a"), FORCED, None)
    submit(jobs, "d")
    found = jobs.unfinished(known)
    assert ids(found) == ["c", "a", "b", "d"]
    assert found[0] is known[0]
    assert found[1] == changed


def test_of_some_jobs_it_is_known_which_are_not_over(database: Database, jobs: Jobs) -> None:
    open_job, over = submit(jobs, "open"), finish(database, submit(jobs, "over"))
    submit(jobs, "nobody-asked")
    assert jobs.not_over({open_job.uid, over.uid, JobUid("gone")}) == {open_job.uid}
    assert jobs.not_over([]) == set()


def test_age_counts_from_the_end_and_from_the_creation_while_there_is_none(
    database: Database, jobs: Jobs
) -> None:
    young = finish(database, submit(jobs, "ended-late"), at=NOON + timedelta(days=3))
    finish(database, submit(jobs, "ended-early"), at=NOON + timedelta(days=1))
    submit(jobs, "waits-since-noon")
    assert young.finished_at == NOON + timedelta(days=3)
    old = jobs.finished_before(NOON + timedelta(days=2), EVERY_STATUS)
    assert ids(old) == ["waits-since-noon", "ended-early"]
    assert ids(jobs.finished_before(young.finished_at, [JobStatus.FAILED])) == ["ended-early"]
    assert len(jobs.finished_before(None, [JobStatus.FAILED])) == 2


STOPS = [
    ("a second graceful request changes nothing", [GRACEFUL, GRACEFUL], GRACEFUL, 1),
    ("force overrides grace", [GRACEFUL, FORCED], FORCED, 2),
    ("grace does not override force", [FORCED, GRACEFUL], FORCED, 1),
    ("force once is enough", [FORCED, FORCED], FORCED, 1),
]


@pytest.mark.parametrize(
    ("requests", "left", "events"), [s[1:] for s in STOPS], ids=[s[0] for s in STOPS]
)
def test_requests_to_stop_only_get_stronger(
    database: Database, jobs: Jobs, requests: list[StopRequest], left: StopRequest, events: int
) -> None:
    job = submit(jobs, "a")
    for number, request in enumerate(requests):
        answered = jobs.request_stop(job.job_id, request, float(number))
    assert answered == jobs.get(job.job_id)
    assert answered.status is JobStatus.QUEUED
    assert answered.status_shown is JobStatus.STOPPING
    assert answered.stop_request is left
    assert answered.stop_grace_seconds == float(events - 1)
    assert answered.version == job.version + events
    kinds = [event.kind for event in Events(database).of_job(job.job_id, 10)]
    assert kinds == ["submitted"] + ["stop_requested"] * events


def test_a_job_that_is_over_cannot_be_stopped_and_says_so_by_its_status(
    database: Database, jobs: Jobs
) -> None:
    over = finish(database, submit(jobs, "a"))
    with nothing_moves(database):
        assert jobs.request_stop(over.job_id, FORCED, None) == over


def test_to_stop_nobody_is_an_error(jobs: Jobs) -> None:
    with pytest.raises(JobMissing):
        jobs.request_stop(JobId("nobody"), GRACEFUL, None)


def test_who_means_a_job_that_is_gone_does_not_stop_the_next_one_of_its_id(
    database: Database, jobs: Jobs
) -> None:
    job = submit(jobs, "a", uid="new")
    with nothing_moves(database), pytest.raises(JobMissing):
        jobs.request_stop(job.job_id, FORCED, None, uid=JobUid("old"))
    assert jobs.request_stop(job.job_id, FORCED, None, uid=job.uid).stop_request is FORCED


def test_a_job_has_the_size_it_was_scaled_to_last(database: Database, jobs: Jobs) -> None:
    job = submit(jobs, "a")
    assert (job.world_size, job.wanted_world_size) == (2, None)
    for size in (5, 5, 1, 2):
        scaled = jobs.scale(job.job_id, size)
        assert scaled == jobs.get(job.job_id)
        assert scaled.world_size == scaled.wanted_world_size == size
    assert scaled.spec == job.spec
    assert scaled.version == job.version + 3, "the same size again changes nothing"
    assert [event.message for event in Events(database).of_job(job.job_id, 10)] == [
        "the job was submitted",
        "the job is to have 5 ranks instead of 2",
        "the job is to have 1 rank instead of 5",
        "the job is to have 2 ranks instead of 1",
    ]


def test_what_is_to_be_known_of_a_job_is_told_with_its_submission(
    database: Database, jobs: Jobs
) -> None:
    jobs.create(JobId("a"), JobUid("u"), JobSpec(), message="data set made", idempotency=None)
    (event,) = Events(database).of_job(JobId("a"), 10)
    assert event.message == "the job was submitted: data set made"


def test_the_size_of_the_spec_is_no_change(database: Database, jobs: Jobs) -> None:
    job = submit(jobs, "a")
    with nothing_moves(database):
        assert jobs.scale(job.job_id, 2) == job


def test_a_pause_holds_until_it_is_ended(database: Database, jobs: Jobs) -> None:
    job = submit(jobs, "a")
    assert job.pause_request is False
    for paused in (False, True, True, False):
        answered = jobs.set_pause(job.job_id, paused=paused)
        assert answered == jobs.get(job.job_id)
        assert answered.pause_request is paused
    assert answered.version == job.version + 2
    kinds = [event.kind for event in Events(database).of_job(job.job_id, 10)]
    assert kinds == ["submitted", "pause_requested", "resume_requested"]


WISHES = [
    lambda jobs, job_id: jobs.scale(job_id, 3),
    lambda jobs, job_id: jobs.set_pause(job_id, paused=True),
    lambda jobs, job_id: jobs.set_pause(job_id, paused=False),
]


@pytest.mark.parametrize("wish", WISHES, ids=["scale", "pause", "resume"])
def test_a_job_that_ends_takes_up_no_wish(
    database: Database, jobs: Jobs, wish: Callable[[Jobs, JobId], Job]
) -> None:
    job = submit(jobs, "a")
    with pytest.raises(JobMissing):
        wish(jobs, JobId("nobody"))
    jobs.request_stop(job.job_id, GRACEFUL, None)
    with nothing_moves(database), pytest.raises(JobOver, match="job a is STOPPING"):
        wish(jobs, job.job_id)
    finish(database, job)
    with nothing_moves(database), pytest.raises(JobOver, match="job a is FAILED"):
        wish(jobs, job.job_id)


def test_what_a_person_wishes_survives_what_the_coordinator_writes(
    database: Database, jobs: Jobs
) -> None:
    job = submit(jobs, "a")
    jobs.scale(job.job_id, 7)
    jobs.set_pause(job.job_id, paused=True)
    after = bring_to(database, job, JobStatus.STARTING)
    assert (after.world_size, after.pause_request) == (7, True)


def test_a_delete_takes_everything_of_the_job_along(database: Database, jobs: Jobs) -> None:
    submit(jobs, "kept")
    job = submit(jobs, "gone")
    tenure = Tenure(database, take_lease(database))
    pool = {"workers": [worker(0), worker(1)], "members": [member(0), member(1)]}
    tenure.commit([write_of(job, **pool, commits=[commit(5)], epochs=[epoch(0)])])
    Members(database).request_departure(job.job_id, 0)
    over = finish(database, job)
    jobs.delete(over.job_id, over.uid)
    assert jobs.find(over.job_id) is None
    left = everything(database)
    assert [row[1] for row in left["events"]] == ["kept"]
    for table in ("workers", "members", "departures", "commits", "epochs"):
        assert left[table] == []
    assert submit(jobs, "gone", uid="again").version == 1


def test_a_delete_is_refused_while_the_job_is_not_over(database: Database, jobs: Jobs) -> None:
    job = submit(jobs, "a")
    jobs.request_stop(job.job_id, FORCED, None)
    with nothing_moves(database), pytest.raises(JobNotTerminal, match="job a is STOPPING"):
        jobs.delete(job.job_id, job.uid)


def test_a_delete_meant_for_an_earlier_job_spares_the_later_one(
    database: Database, jobs: Jobs
) -> None:
    old = finish(database, submit(jobs, "a", uid="old"))
    jobs.delete(old.job_id, old.uid)
    finish(database, submit(jobs, "a", uid="new"))
    with nothing_moves(database), pytest.raises(JobMissing):
        jobs.delete(old.job_id, old.uid)
