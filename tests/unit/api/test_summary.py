"""The arithmetic of a summary, as tables."""

import math
from dataclasses import replace
from datetime import timedelta

import msgspec
import pytest
from unit.api.jobs import JOB, NOW

from api.schemas import SummaryView
from api.summary import eta_seconds, every_rank, mean_loss, summary, throughput, total_steps
from muster.contracts.endings import RetryClass
from muster.contracts.job import JobStatus, StopRequest
from store.records import Worker


def worker(rank: int = 0, **changes: object) -> Worker:
    lively = Worker(
        rank=rank,
        incarnation=0,
        state="live",
        process=None,
        step=10,
        total_steps=30,
        throughput_steps_per_sec=5.0,
        loss=0.5,
    )
    return replace(lively, **changes)  # type: ignore[arg-type]


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
        ([worker(), worker(1, throughput_steps_per_sec=math.nan)], None),
        ([worker(), worker(1, state="exited")], None),
        ([worker(), worker(1, total_steps=None)], None),
        (every_rank([worker()], 2), None),
    ],
)
def test_the_slowest_rank_decides_when_it_is_over(
    workers: list[Worker], expected: float | None
) -> None:
    assert eta_seconds(workers) == expected


def test_a_rank_that_waits_for_its_first_process_is_known_by_its_number() -> None:
    assert [one.worker_id for one in every_rank([worker()], 2)] == ["0.0", "1"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 5.0),
        ({"state": "suspect"}, 5.0),
        ({"state": "exited"}, 0.0),
        ({"finished": True}, 0.0),
        ({"throughput_steps_per_sec": math.inf}, 0.0),
    ],
)
def test_only_a_living_rank_has_a_rate(changes: dict[str, object], expected: float) -> None:
    assert throughput(worker(**changes)) == expected


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([], None),
        ([None], None),
        ([math.nan], None),
        ([0.5, None], 0.5),
        ([0.5, 1.5, math.inf], 1.0),
    ],
)
def test_the_loss_is_the_mean_of_those_known(
    losses: list[float | None], expected: float | None
) -> None:
    assert mean_loss([worker(loss=loss) for loss in losses]) == expected


def test_the_total_is_known_when_every_rank_has_said_its_own() -> None:
    assert total_steps([worker(), worker(1)]) == 60
    assert total_steps([worker(), worker(1, total_steps=None)]) is None


def together(*workers: Worker) -> SummaryView:
    """Return the summary of a synchronous job of two ranks."""
    spec = msgspec.structs.replace(JOB.spec, mode="synchronous")
    return summary(replace(JOB, spec=spec), workers, NOW)


def test_ranks_of_one_model_count_its_steps_once() -> None:
    found = together(worker(), worker(1, step=11, loss=0.25))
    assert (found.step, found.total_steps, found.throughput_steps_per_sec) == (11, 30, 5.0)
    assert (found.eta_seconds, found.loss) == (19 / 5.0, 0.25)


def test_one_model_is_spoken_for_by_a_rank_that_lives_if_any_does() -> None:
    down = worker(1, step=11, state="exited")
    assert together(worker(), down).eta_seconds == 4.0
    assert together(worker(state="exited", step=3), down).step == 11
    assert together().step == 0


def test_the_ranks_shown_are_as_many_as_are_wanted_now() -> None:
    scaled = replace(JOB, wanted_world_size=3)
    found = summary(scaled, [worker(), worker(3)], NOW)
    assert found.world_size == 3
    assert [one.rank for one in found.workers] == [0, 1, 2]


def test_a_rank_without_a_process_waits() -> None:
    never = worker(0, incarnation=-1, state="exited")
    for started in ([worker(1)], [never, worker(1)]):
        found = summary(JOB, started, NOW).workers
        assert [(one.rank, one.state) for one in found] == [(0, "waiting"), (1, "live")]


def test_ages_are_those_of_now_and_never_negative() -> None:
    beats = [NOW - timedelta(seconds=3), NOW + timedelta(seconds=3)]
    ranks = [worker(rank, last_heartbeat_at=beat) for rank, beat in enumerate(beats)]
    found = summary(JOB, ranks, NOW).workers
    assert [one.last_heartbeat_age_seconds for one in found] == [3.0, 0.0]


def test_a_job_that_is_over_has_no_time_left() -> None:
    over = replace(JOB, status=JobStatus.STOPPED)
    assert summary(over, [worker(), worker(1)], NOW).eta_seconds is None


def test_a_request_to_stop_shows_at_once() -> None:
    asked = replace(JOB, stop_request=StopRequest.GRACEFUL)
    assert summary(asked, [], NOW).status is JobStatus.STOPPING


def test_ends_are_summed_over_all_ranks_and_those_that_never_came_are_zero() -> None:
    crashed, both = {"crash": 2}, {"crash": 1, "hang": 1}
    ranks = [worker(endings=crashed), worker(7, endings=both)]
    found = summary(JOB, ranks, NOW)
    assert {kind: count for kind, count in found.endings.items() if count} == {
        "crash": 3,
        "hang": 1,
    }
    assert set(found.endings) == set(RetryClass)
    assert found.workers[0].endings == crashed
