"""Verdicts on a job's reading, as tables."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from store_samples import epoch
from unit.api.jobs import JOB

from api.audit import audit_view
from api.pool_schemas import AuditView
from muster.contracts.job import JobStatus
from store.records import Audit, EpochRecord

EXACT = epoch(0)
OTHER = epoch(1, hash_sum=1)
SHORT = epoch(1, samples=3, hash_sum=1)
TWICE = epoch(1, samples=101)
NOTHING: list[EpochRecord] = []


def audited(
    status: JobStatus, epochs: Sequence[EpochRecord], mode: str = "synchronous"
) -> AuditView:
    verdicts = [record.exactly_once for record in epochs]
    job = replace(JOB, status=status, spec=msgspec.structs.replace(JOB.spec, mode=mode, epochs=2))
    exact, inexact = verdicts.count(True), verdicts.count(False)
    return audit_view(job, Audit(commits=[], epochs=epochs, exact=exact, inexact=inexact))


HISTORIES = [
    ("nothing is known yet", JobStatus.RUNNING, NOTHING, None),
    ("good so far", JobStatus.RUNNING, [EXACT, SHORT], None),
    ("good, but it has not said that it is done", JobStatus.RUNNING, [EXACT, epoch(1)], None),
    ("wrong is known at once", JobStatus.RUNNING, [EXACT, OTHER], False),
    ("too much is wrong", JobStatus.RUNNING, [EXACT, TWICE], False),
    ("stopped in the middle", JobStatus.STOPPED, [EXACT, SHORT], None),
    ("every epoch exactly once", JobStatus.COMPLETED, [EXACT, epoch(1)], True),
    ("done with a short epoch", JobStatus.COMPLETED, [EXACT, SHORT], False),
    ("done with an epoch missing", JobStatus.COMPLETED, [EXACT], False),
    ("done without any proof", JobStatus.COMPLETED, NOTHING, False),
]


@pytest.mark.parametrize("history", HISTORIES, ids=[history[0] for history in HISTORIES])
def test_the_verdict_is_given_when_it_is_known(
    history: tuple[str, JobStatus, list[EpochRecord], bool | None],
) -> None:
    _, status, epochs, verdict = history
    found = audited(status, epochs)
    assert (found.complete, found.exactly_once) == (status is JobStatus.COMPLETED, verdict)


def test_an_epoch_that_was_left_short_is_wrong_when_the_job_is_done() -> None:
    assert [one.exactly_once for one in audited(JobStatus.RUNNING, [EXACT, SHORT]).epochs] == [
        True,
        None,
    ]
    assert [one.exactly_once for one in audited(JobStatus.COMPLETED, [EXACT, SHORT]).epochs] == [
        True,
        False,
    ]


def test_an_answer_that_is_cut_says_so_and_its_verdict_is_on_all_epochs() -> None:
    job = replace(JOB, spec=msgspec.structs.replace(JOB.spec, mode="synchronous", epochs=1000))
    cut = Audit(
        commits=[], epochs=[EXACT], exact=999, inexact=1, epochs_omitted=999, commits_omitted=7
    )
    found = audit_view(job, cut)
    assert (found.epochs_omitted, found.checkpoints_omitted) == (999, 7)
    assert [one.exactly_once for one in found.epochs] == [True]
    assert found.exactly_once is False


def test_ranks_on_their_own_prove_nothing() -> None:
    found = audited(JobStatus.COMPLETED, NOTHING, "independent")
    assert (found.complete, found.exactly_once) == (False, None)
