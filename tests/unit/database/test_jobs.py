"""Jobs: creation, queries, requests and deletion."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import event, insert

from database.engine import Database
from database.errors import CheckpointPending, JobExists, JobMissing, JobNotTerminal, JobOver
from database.fenced_writer import FencedWriter
from database.history import History
from database.jobs import FAULTS_KEPT, JobQuery, Jobs, NewJob
from database.records import Job, values_of
from database.tables import JOBS
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import JobId, JobStatus, JobUid, StopRequest
from muster.contracts.views.history import FaultView, StruckProcess
from tests.support.database_samples import (
    EVERY_STATUS,
    NOON,
    SteppingClock,
    attempt,
    bring_to,
    commit,
    epoch,
    everything,
    finish,
    member,
    nothing_moves,
    store,
    submit,
    take_lease,
    worker,
    write_of,
)

GRACEFUL, FORCED = StopRequest.GRACEFUL, StopRequest.FORCED


def ids(found: list[Job]) -> list[str]:
    return [job.job_id for job in found]


def test_a_created_job_reads_back(database: Database, jobs: Jobs) -> None:
    spec = JobSpec(name="añ \U0001f680", command=("python", "x.py"), env={"A": "b"}, seed=2**63 - 1)
    created = store(jobs, NewJob(JobId("a"), JobUid("u"), spec, message="data set made"))
    assert created.spec == spec
    assert created.status is JobStatus.QUEUED
    assert created.created_at == NOON + timedelta(seconds=1)
    assert jobs.get(JobId("a")) == created
    (event,) = History(database).events(JobId("a"), 10)
    assert (event.kind, event.at) == ("submitted", created.created_at)
    assert event.message == "the job was submitted: data set made"


def test_an_id_is_unique(database: Database, jobs: Jobs) -> None:
    submit(jobs, "a")
    with nothing_moves(database), pytest.raises(JobExists, match="job a exists already"):
        submit(jobs, "a", uid="another")


def test_an_unknown_job_is_none_or_an_error(jobs: Jobs) -> None:
    assert jobs.find(JobId("none")) is None
    with pytest.raises(JobMissing, match="there is no job none"):
        jobs.get(JobId("none"))


def test_pages_show_each_job_once_while_new_ones_arrive(
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
    while page := jobs.page(JobQuery(), 70, after):
        seen += ids(page)
        after = (page[-1].created_at, page[-1].job_id)
        submit(jobs, f"new-{len(seen)}")
    assert seen == [*ids(old)[::-1], "first"]


def test_the_order_of_creation_survives_a_clock_set_back(jobs: Jobs, clock: SteppingClock) -> None:
    clock.step = timedelta(hours=-1)
    created = [submit(jobs, job_id) for job_id in ("c", "b", "a")]
    assert ids(jobs.page(JobQuery(oldest_first=True), 10, None)) == ["c", "b", "a"]
    later = JobQuery(created_after=created[0].created_at)
    assert ids(jobs.page(later, 10, None)) == ["a", "b"]


def test_a_filter_acts_on_the_status_shown(database: Database, jobs: Jobs) -> None:
    for name in ("queued", "running", "stopping", "over"):
        submit(jobs, name)
    bring_to(database, jobs.get(JobId("running")), JobStatus.STARTING, JobStatus.RUNNING)
    finish(database, jobs.get(JobId("over")))
    jobs.request_stop(JobId("stopping"), GRACEFUL, None)
    seen = {status: ids(jobs.page(JobQuery(statuses=[status]), 10, None)) for status in JobStatus}
    assert {status: found for status, found in seen.items() if found} == {
        JobStatus.QUEUED: ["queued"],
        JobStatus.RUNNING: ["running"],
        JobStatus.STOPPING: ["stopping"],
        JobStatus.FAILED: ["over"],
    }
    waiting = JobQuery(statuses=[JobStatus.QUEUED, JobStatus.STOPPING])
    assert jobs.count(waiting) == 2
    assert jobs.count(JobQuery(statuses=[])) == 0
    assert jobs.page(JobQuery(statuses=[]), 10, None) == []


def labelled(jobs: Jobs, job_id: str, name: str | None = None, **labels: str) -> None:
    spec = JobSpec(name=name, labels=labels)
    store(jobs, NewJob(JobId(job_id), JobUid(f"uid-{job_id}"), spec))


STRANGE = 'it\'s "a\\b", {c}'
STRANGE_NAMES = ("{", "}", "{=", "a,b", "NULL", "null", "it's", "two words", " ", "$", "[0]", "0")
"""Names with a meaning in JSON paths of a database."""

FILTERS: list[tuple[JobQuery, list[str]]] = [
    (JobQuery(), ["c", "b", "a"]),
    (JobQuery(oldest_first=True), ["a", "b", "c"]),
    (JobQuery(name="näme\"'%"), ["b"]),
    (JobQuery(name="team"), []),
    (JobQuery(labels={"team": "red"}), ["b", "a"]),
    *((JobQuery(labels={name: STRANGE}), ["c"]) for name in STRANGE_NAMES),
    *((JobQuery(labels={name: "red"}), []) for name in STRANGE_NAMES),
    (JobQuery(labels={"team": "red", "a.b": "$"}), ["b"]),
    (JobQuery(labels={"team": "r%"}), []),
    (JobQuery(labels={"seed": "0"}), []),
    (JobQuery(created_after=NOON + timedelta(seconds=1)), ["c", "b"]),
    (JobQuery(created_before=NOON + timedelta(seconds=3)), ["b", "a"]),
    (
        JobQuery(created_after=NOON + timedelta(seconds=1), labels={"team": "red"}),
        ["b"],
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("selection", "found"), FILTERS)
def test_a_query_returns_what_all_filters_match(
    jobs: Jobs, selection: JobQuery, found: list[str]
) -> None:
    labelled(jobs, "a", team="red")
    labelled(jobs, "b", "näme\"'%", team="red", **{"a.b": "$"})
    labelled(jobs, "c", team="blue", **dict.fromkeys(STRANGE_NAMES, STRANGE))
    assert ids(jobs.page(selection, 10, None)) == found
    assert jobs.count(selection) == len(found)


def test_each_sweep_is_listed_once(jobs: Jobs) -> None:
    labelled(jobs, "a", sweep="lr")
    labelled(jobs, "b", sweep=STRANGE)
    labelled(jobs, "c", sweep="lr", team="red")
    labelled(jobs, "d", team="red")
    assert jobs.sweeps() == [STRANGE, "lr"]


def test_oldest_first_continues_after_the_last_page(jobs: Jobs) -> None:
    for job_id in ("a", "b", "c"):
        labelled(jobs, job_id)
    first = jobs.get(JobId("a"))
    page = jobs.page(JobQuery(oldest_first=True), 1, (first.created_at, first.job_id))
    assert ids(page) == ["b"]


def test_unfinished_jobs_come_in_order_of_creation(database: Database, jobs: Jobs) -> None:
    for name in ("c", "a", "b", "over"):
        submit(jobs, name)
    finish(database, jobs.get(JobId("over")))
    jobs.request_stop(JobId("a"), FORCED, None)
    assert ids(jobs.unfinished()) == ["c", "a", "b"]


def test_only_changed_jobs_are_read_again(jobs: Jobs) -> None:
    known = [submit(jobs, name) for name in ("c", "a", "b")]
    changed = jobs.request_stop(JobId("a"), FORCED, None)
    submit(jobs, "d")
    found = jobs.unfinished(known)
    assert ids(found) == ["c", "a", "b", "d"]
    assert found[0] is known[0]
    assert found[1] == changed


def test_not_over_returns_open_jobs_only(database: Database, jobs: Jobs) -> None:
    open_job, over = submit(jobs, "open"), finish(database, submit(jobs, "over"))
    submit(jobs, "not-asked")
    assert jobs.not_over({open_job.uid, over.uid, JobUid("gone")}) == {open_job.uid}
    assert jobs.not_over([]) == set()


def test_age_counts_from_the_end_or_the_creation(database: Database, jobs: Jobs) -> None:
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
def test_stop_requests_only_get_stronger(
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
    kinds = [event.kind for event in History(database).events(job.job_id, 10)]
    assert kinds == ["submitted"] + ["stop_requested"] * events


def test_a_finished_job_ignores_a_stop_request(database: Database, jobs: Jobs) -> None:
    over = finish(database, submit(jobs, "a"))
    with nothing_moves(database):
        assert jobs.request_stop(over.job_id, FORCED, None) == over


def test_a_stop_spares_a_later_job_with_the_same_id(database: Database, jobs: Jobs) -> None:
    job = submit(jobs, "a", uid="new")
    with nothing_moves(database):
        with pytest.raises(JobMissing):
            jobs.request_stop(job.job_id, FORCED, None, uid=JobUid("old"))
        with pytest.raises(JobMissing):
            jobs.request_stop(JobId("none"), GRACEFUL, None)
    assert jobs.request_stop(job.job_id, FORCED, None, uid=job.uid).stop_request is FORCED


def test_the_last_scaling_holds(database: Database, jobs: Jobs) -> None:
    job = submit(jobs, "a")
    with nothing_moves(database):
        assert jobs.scale(job.job_id, 2) == job, "the size of the spec"
    for size in (5, 5, 1, 2):
        scaled = jobs.scale(job.job_id, size)
        assert scaled == jobs.get(job.job_id)
        assert scaled.world_size == scaled.wanted_world_size == size
    assert scaled.spec == job.spec
    assert scaled.version == job.version + 3, "repeating a size changes nothing"
    assert [event.message for event in History(database).events(job.job_id, 10)] == [
        "the job was submitted",
        "a change from 2 to 5 ranks was requested",
        "a change from 5 to 1 rank was requested",
        "a change from 1 to 2 ranks was requested",
    ]


def test_a_pause_holds_until_it_is_ended(database: Database, jobs: Jobs) -> None:
    job = submit(jobs, "a")
    assert job.pause_request is False
    for paused in (False, True, True, False):
        answered = jobs.set_pause(job.job_id, paused=paused)
        assert answered == jobs.get(job.job_id)
        assert answered.pause_request is paused
    assert answered.version == job.version + 2
    kinds = [event.kind for event in History(database).events(job.job_id, 10)]
    assert kinds == ["submitted", "pause_requested", "resume_requested"]


def test_a_checkpoint_is_requested_again_once_it_is_durable(database: Database, jobs: Jobs) -> None:
    job = submit(jobs, "a")
    assert jobs.request_checkpoint(job.job_id).is_checkpoint_pending
    with nothing_moves(database), pytest.raises(CheckpointPending, match="wait until"):
        jobs.request_checkpoint(job.job_id)
    writer = FencedWriter(database, take_lease(database))
    writer.commit([write_of(job, checkpoint_requests_done=1)])
    after = jobs.get(job.job_id)
    assert (after.checkpoint_requests, after.is_checkpoint_pending) == (1, False)
    assert jobs.request_checkpoint(job.job_id).checkpoint_requests == 2


FAULT = FaultView(
    number=0,
    fault="kill",
    host="local",
    agent=None,
    processes=[StruckProcess(rank=1, attempt=2, pid=7)],
)


def test_faults_are_counted_and_the_last_ones_kept(database: Database, jobs: Jobs) -> None:
    job = submit(jobs, "a")
    numbers = [jobs.request_fault(job, FAULT, actor="ada").number for _ in range(20)]
    assert numbers == [*range(1, 21)]
    kept = jobs.get(job.job_id).faults
    assert [it.number for it in kept] == numbers[-FAULTS_KEPT:]
    assert kept[-1] == msgspec.structs.replace(FAULT, number=20)
    event = History(database).events(job.job_id, 1)[0]
    assert event.message == "SIGKILL was requested for rank 1 on local"
    over = finish(database, job)
    with nothing_moves(database), pytest.raises(JobOver):
        jobs.request_fault(over, FAULT)


REQUESTS = [
    lambda jobs, job_id: jobs.scale(job_id, 3),
    lambda jobs, job_id: jobs.set_pause(job_id, paused=True),
    lambda jobs, job_id: jobs.set_pause(job_id, paused=False),
    lambda jobs, job_id: jobs.request_checkpoint(job_id),
]


@pytest.mark.parametrize("change", REQUESTS, ids=["scale", "pause", "resume", "save"])
def test_a_job_that_ends_refuses_requests(
    database: Database, jobs: Jobs, change: Callable[[Jobs, JobId], Job]
) -> None:
    job = submit(jobs, "a")
    with pytest.raises(JobMissing):
        change(jobs, JobId("none"))
    jobs.request_stop(job.job_id, GRACEFUL, None)
    with nothing_moves(database), pytest.raises(JobOver, match="job a is STOPPING"):
        change(jobs, job.job_id)
    finish(database, job)
    with nothing_moves(database), pytest.raises(JobOver, match="job a is FAILED"):
        change(jobs, job.job_id)


def test_requests_survive_the_coordinators_writes(database: Database, jobs: Jobs) -> None:
    job = submit(jobs, "a")
    jobs.scale(job.job_id, 7)
    jobs.set_pause(job.job_id, paused=True)
    after = bring_to(database, job, JobStatus.STARTING)
    assert (after.world_size, after.pause_request) == (7, True)


def test_a_delete_removes_every_row_of_the_job(database: Database, jobs: Jobs) -> None:
    submit(jobs, "kept")
    job = submit(jobs, "gone")
    writer = FencedWriter(database, take_lease(database))
    pool = {"workers": [worker(0), worker(1)], "members": [member(0), member(1)]}
    rows = {**pool, "attempts": [attempt(0, 0)], "commits": [commit(5)], "epochs": [epoch(0)]}
    writer.commit([write_of(job, **rows)])
    History(database).request_departure(job.job_id, 0)
    over = finish(database, job)
    jobs.delete(over.job_id, over.uid)
    assert jobs.find(over.job_id) is None
    left = everything(database)
    assert [row[0] for row in left["events"]] == ["kept"]
    for table in (*rows, "departures"):
        assert left[table] == []
    assert submit(jobs, "gone", uid="again").version == 1


def test_an_open_job_is_not_deleted(database: Database, jobs: Jobs) -> None:
    job = submit(jobs, "a")
    jobs.request_stop(job.job_id, FORCED, None)
    with nothing_moves(database), pytest.raises(JobNotTerminal, match="job a is STOPPING"):
        jobs.delete(job.job_id, job.uid)


def test_a_delete_spares_a_later_job_with_the_same_id(database: Database, jobs: Jobs) -> None:
    old = finish(database, submit(jobs, "a", uid="old"))
    jobs.delete(old.job_id, old.uid)
    finish(database, submit(jobs, "a", uid="new"))
    with nothing_moves(database), pytest.raises(JobMissing):
        jobs.delete(old.job_id, old.uid)


def test_statuses_are_counted_as_they_are_shown(database: Database, jobs: Jobs) -> None:
    for name in "abcd":
        submit(jobs, name)
    bring_to(database, jobs.get(JobId("b")), JobStatus.STARTING, JobStatus.RUNNING)
    jobs.request_stop(JobId("b"), GRACEFUL, None)
    jobs.request_stop(JobId("c"), GRACEFUL, None)
    finish(database, jobs.get(JobId("d")))
    counted = {status: count for status, count in jobs.statuses().items() if count}
    assert counted == {JobStatus.QUEUED: 1, JobStatus.STOPPING: 2, JobStatus.FAILED: 1}
    assert len(jobs.statuses()) == len(JobStatus)


def test_active_jobs_and_the_last_that_ended(database: Database, jobs: Jobs) -> None:
    for name in "abcdef":
        submit(jobs, name)
    for name in "bf":
        bring_to(database, jobs.get(JobId(name)), JobStatus.STARTING)
    for minute, name in enumerate("cde"):
        finish(database, jobs.get(JobId(name)), at=NOON + timedelta(minutes=minute))
    assert sorted(ids(jobs.lately_active(NOON, 9))) == ["b", "d", "e", "f"]
    assert sorted(ids(jobs.lately_active(NOON, 1))) == ["b", "e", "f"]


def test_a_scrape_reads_no_whole_table(sqlite_url: str) -> None:
    database = Database.open(sqlite_url)
    with database.reading() as connection:
        engine = connection.engine
    seen: list[tuple[str, Any]] = []
    event.listen(engine, "before_cursor_execute", lambda *it: seen.append((it[2], it[3])))
    jobs = Jobs(database)
    jobs.statuses()
    jobs.lately_active(NOON, 9)
    History(database).workers_by_job([JobId("a"), JobId("b")])
    queries = [it for it in seen if it[0].startswith("SELECT")]
    with engine.connect() as reader:
        plan = [
            str(row.detail)
            for text, values in queries
            for row in reader.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", values)
        ]
    database.close()
    assert len(queries) == 6
    # The index alone holds what is counted; everything else is looked up.
    whole = [line for line in plan if line.startswith("SCAN") and "COVERING INDEX" not in line]
    assert (whole, len(plan) >= 6) == ([], True)
