"""Rows to response bodies: summaries, audits, agents; cursors and entity tags."""

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from api.listing import PLACES, decode_cursor, encode_cursor, required_version
from api.views import (
    audit_view,
    eta_seconds,
    every_rank,
    job_tag,
    mean_loss,
    summary,
    throughput,
    total_steps,
)
from database.records import Audit, MemberRecord, WorkerRecord, values_of
from muster.contracts.job.retry import RetryClass
from muster.contracts.job.status import JobId, JobStatus, StopRequest
from muster.contracts.messages.rank import EpochDone
from muster.contracts.views.history import AuditView
from muster.contracts.views.job import SummaryView
from tests.support.database_samples import epoch, member
from tests.support.database_samples import worker as rank_record
from tests.unit.api.jobs import JOB, NOW


def worker(rank: int = 0, member: MemberRecord | None = None, **changes: object) -> WorkerRecord:
    progress = {"step": 10, "total_steps": 30, "loss": 0.5}
    row = rank_record(
        rank, **{"process": None, "throughput_steps_per_sec": 5.0, **progress, **changes}
    )
    return WorkerRecord(**values_of(row), member=member)


FINISHED = worker(1, finished=True, state="exited", step=30)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([worker(), worker(1)], 4.0),
        ([worker(), worker(1, step=0)], 6.0),
        ([worker(), FINISHED], 4.0),
        ([FINISHED], 0.0),
        ([worker(step=31), FINISHED], 0.0),
        ([worker(), worker(1, throughput_steps_per_sec=0.0)], None),
        ([worker(), worker(1, state="exited")], None),
        ([worker(), worker(1, total_steps=None)], None),
        (every_rank([worker()], 2), None),
    ],
)
def test_the_slowest_rank_decides_the_eta(
    workers: list[WorkerRecord], expected: float | None
) -> None:
    assert eta_seconds(workers) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 5.0),
        ({"state": "suspect"}, 5.0),
        ({"state": "exited"}, 0.0),
        ({"finished": True}, 0.0),
    ],
)
def test_only_a_living_rank_has_a_throughput(changes: dict[str, object], expected: float) -> None:
    assert throughput(worker(**changes)) == expected


@pytest.mark.parametrize(
    ("losses", "expected"),
    [([], None), ([None], None), ([math.nan], None), ([0.5, None], 0.5), ([0.5, 1.5, math.inf], 1)],
)
def test_the_loss_is_the_mean_of_the_known_ones(
    losses: list[float | None], expected: float | None
) -> None:
    assert mean_loss([worker(loss=loss) for loss in losses]) == expected


def test_the_total_is_unknown_until_every_rank_reports_one() -> None:
    assert total_steps([worker(), worker(1)]) == 60
    assert total_steps([worker(), worker(1, total_steps=None)]) is None


def together(*workers: WorkerRecord) -> SummaryView:
    """Return the summary of a synchronous job of two ranks."""
    spec = msgspec.structs.replace(JOB.spec, mode="synchronous")
    return summary(replace(JOB, spec=spec), workers, NOW)


def test_ranks_of_one_model_count_its_steps_once() -> None:
    found = together(worker(), worker(1, step=11, loss=0.25))
    assert (found.step, found.total_steps, found.throughput_steps_per_sec) == (11, 30, 5.0)
    assert (found.eta_seconds, found.loss) == (19 / 5.0, 0.25)


@pytest.mark.parametrize(
    ("fields", "other_total", "steps"),
    [
        ({"command": ("x",), "restart_scope": "gang"}, 40, (11, 40, 5.0)),
        ({"command": ("x",)}, 30, (11, 30, 5.0)),
        ({"command": ("x",)}, 40, (21, 70, 10.0)),
        ({}, 30, (21, 60, 10.0)),
    ],
)
def test_steps_of_ranks_are_summed_unless_they_are_alike(
    fields: dict[str, object], other_total: int, steps: tuple[int, int, float]
) -> None:
    job = replace(JOB, spec=msgspec.structs.replace(JOB.spec, **fields))
    found = summary(job, [worker(), worker(1, step=11, total_steps=other_total, loss=0.25)], NOW)
    assert (found.step, found.total_steps, found.throughput_steps_per_sec) == steps
    assert found.loss == 0.375


def test_a_living_rank_counts_for_the_model_if_there_is_one() -> None:
    down = worker(1, step=11, state="exited")
    assert together(worker(), down).eta_seconds == 4.0
    assert together(worker(state="exited", step=3), down).step == 11
    assert together().step == 0


def test_a_summary_has_as_many_ranks_as_are_wanted_now() -> None:
    started = [worker(), worker(3, in_service=False)]
    found = summary(replace(JOB, wanted_world_size=3), started, NOW)
    assert (found.world_size, [one.rank for one in found.workers]) == (3, [0, 1, 2])


def test_ranks_that_a_job_has_left_out_are_not_counted() -> None:
    """Shrinking empties a host, so that the numbers of the others have gaps."""
    started = [worker(), worker(1, in_service=False), worker(2), worker(3)]
    found = summary(replace(JOB, wanted_world_size=3), started, NOW)
    assert [one.rank for one in found.workers] == [0, 2, 3]


def test_a_rank_without_a_process_is_waiting() -> None:
    never = worker(0, attempt=-1, state="exited")
    for started in ([worker(1, attempt=3)], [never, worker(1, attempt=3)]):
        assert names(summary(JOB, started, NOW)) == [
            ("0", "waiting", None, "waiting"),
            ("1", "live", 3, "live"),
        ]
        assert names(together(*started))[0] == (None, None, None, "waiting")


def test_a_rank_of_a_pool_has_the_state_of_its_member() -> None:
    syncing = member(2, rank=1, attempt=1, state="syncing")
    found = together(worker(0, member(0)), worker(1, syncing, attempt=1, state="spawned"))
    assert names(found) == [("0", "active", 0, "live"), ("2", "syncing", 1, "spawned")]


def names(found: SummaryView) -> list[tuple[str | None, str | None, int | None, str | None]]:
    return [(one.worker_id, one.state, one.attempt, one.process) for one in found.workers]


def test_heartbeat_ages_are_never_negative() -> None:
    beats = [NOW - timedelta(seconds=3), NOW + timedelta(seconds=3)]
    ranks = [worker(rank, last_heartbeat_at=beat) for rank, beat in enumerate(beats)]
    found = summary(JOB, ranks, NOW).workers
    assert [one.last_heartbeat_age_seconds for one in found] == [3.0, 0.0]


def test_a_job_that_is_over_has_no_eta() -> None:
    over = replace(JOB, status=JobStatus.STOPPED)
    assert summary(over, [worker(), worker(1)], NOW).eta_seconds is None


def test_a_stop_request_shows_at_once() -> None:
    stopping = replace(JOB, stop_request=StopRequest.GRACEFUL)
    assert summary(stopping, [], NOW).status is JobStatus.STOPPING


def test_exits_are_summed_over_all_ranks_and_kinds() -> None:
    crashed = {"crash": 2}
    ranks = [worker(endings=crashed), worker(7, endings={"crash": 1, "hang": 1})]
    found = summary(JOB, ranks, NOW)
    counted = {kind: count for kind, count in found.endings.items() if count}
    assert counted == {"crash": 3, "hang": 1}
    assert set(found.endings) == set(RetryClass)
    assert found.workers[0].endings == crashed


@pytest.mark.parametrize(
    ("bits", "is_unchecked", "said"),
    [("same", False, "same"), ("same", True, "unchecked"), ("any", True, "any")],
)
def test_summary_and_audit_say_which_bits_are_promised(
    bits: str,
    is_unchecked: bool,  # noqa: FBT001  as a rank sends it
    said: str,
) -> None:
    promised = {"mode": "synchronous", "bits": bits, "world_size": 2}
    job = replace(JOB, spec=msgspec.structs.replace(JOB.spec, **promised))
    ranks = [worker(), worker(1, is_unchecked=is_unchecked)]
    assert summary(job, ranks, NOW).bits == said
    assert audit_view(job, Audit(commits=[], epochs=[], exact=0, inexact=0), ranks).bits == said


# Audits

EXACT = epoch(0)
OTHER = epoch(1, hash_sum=1)
SHORT = epoch(1, samples=3, hash_sum=1)
TWICE = epoch(1, samples=101)


def audited(status: JobStatus, epochs: Sequence[EpochDone], mode: str = "synchronous") -> AuditView:
    verdicts = [record.exactly_once for record in epochs]
    job = replace(JOB, status=status, spec=msgspec.structs.replace(JOB.spec, mode=mode, epochs=2))
    exact, inexact = verdicts.count(True), verdicts.count(False)
    return audit_view(job, Audit(commits=[], epochs=epochs, exact=exact, inexact=inexact))


@pytest.mark.parametrize(
    ("status", "epochs", "is_exact"),
    [
        (JobStatus.RUNNING, [], None),
        (JobStatus.RUNNING, [EXACT, SHORT], None),
        (JobStatus.RUNNING, [EXACT, epoch(1)], None),
        (JobStatus.RUNNING, [EXACT, OTHER], False),
        (JobStatus.RUNNING, [EXACT, TWICE], False),
        (JobStatus.STOPPED, [EXACT, SHORT], None),
        (JobStatus.COMPLETED, [EXACT, epoch(1)], True),
        (JobStatus.COMPLETED, [EXACT, SHORT], False),
        (JobStatus.COMPLETED, [EXACT], False),
        (JobStatus.COMPLETED, [], False),
    ],
)
def test_exactly_once_is_decided_as_soon_as_it_is_known(
    status: JobStatus,
    epochs: list[EpochDone],
    is_exact: bool | None,  # noqa: FBT001  a table's column
) -> None:
    found = audited(status, epochs)
    assert (found.complete, found.exactly_once) == (status is JobStatus.COMPLETED, is_exact)


@pytest.mark.parametrize(
    ("status", "expected"), [(JobStatus.RUNNING, None), (JobStatus.COMPLETED, False)]
)
def test_a_short_epoch_is_wrong_once_the_job_is_completed(
    status: JobStatus,
    expected: bool | None,  # noqa: FBT001  a table's column
) -> None:
    found = audited(status, [EXACT, SHORT]).epochs
    assert [one.exactly_once for one in found] == [True, expected]


def test_the_result_covers_epochs_that_are_not_listed() -> None:
    job = replace(JOB, spec=msgspec.structs.replace(JOB.spec, mode="synchronous", epochs=1000))
    cut = Audit(
        commits=[], epochs=[EXACT], exact=999, inexact=1, epochs_omitted=999, commits_omitted=7
    )
    found = audit_view(job, cut)
    assert (found.epochs_omitted, found.checkpoints_omitted) == (999, 7)
    assert [one.exactly_once for one in found.epochs] == [True]
    assert found.exactly_once is False


def test_an_independent_job_proves_nothing() -> None:
    found = audited(JobStatus.COMPLETED, [], "independent")
    assert (found.complete, found.exactly_once) == (False, None)


# The agent of a job


# Cursors and entity tags

PLACE = (datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC), JobId("a"))
TAG = '"u.1"'


def test_a_cursor_decodes_to_its_place() -> None:
    assert decode_cursor(encode_cursor(PLACE), PLACES) == PLACE
    assert decode_cursor(None, PLACES) is None


@pytest.mark.parametrize(
    ("wanted", "version"),
    [(TAG, JOB.row_version), (f'"other", {TAG}', JOB.row_version), (None, None), ("*", None)],
)
def test_a_change_requires_the_version_in_if_match(wanted: str | None, version: object) -> None:
    assert required_version(JOB, wanted) == version


def test_another_job_of_the_same_id_has_another_tag() -> None:
    assert job_tag(replace(JOB, uid="v")) != job_tag(JOB) != job_tag(replace(JOB, version=2))
