from dataclasses import replace

import pytest

from coordinator.decide.events import describe_exit, describe_recovery, quote_end, quote_lines
from coordinator.decide.state.rank import Attempt, AttemptEnd, Cause, RankSnapshot, RetryBudget
from muster.contracts.job import Reason
from muster.contracts.retry import RetryClass, describe_status
from tests.support.stories import beat, queued_job


@pytest.mark.parametrize(
    ("code", "signal", "words"),
    [
        (0, None, "exited with code 0"),
        (255, None, "exited with code 255"),
        (None, 9, "was ended by signal 9 (SIGKILL)"),
        (None, 11, "was ended by signal 11 (SIGSEGV)"),
        (None, 50, "was ended by signal 50 (an unnamed signal)"),
        (None, None, "ended unseen"),
    ],
)
def test_an_exit_is_described_by_a_verb_phrase(
    code: int | None, signal: int | None, words: str
) -> None:
    assert describe_exit(Attempt(exit_code=code, exit_signal=signal)) == words


@pytest.mark.parametrize(
    ("status", "words"), [(3, "exited with code 3"), (-15, "was ended by signal 15 (SIGTERM)")]
)
def test_a_negative_status_is_a_signal(status: int, words: str) -> None:
    assert describe_status(status) == words


@pytest.mark.parametrize(
    ("kind", "count", "sentence"),
    [
        (None, 0, "rank 3 died; it is started again"),
        (RetryClass.PREEMPTION, 2, "rank 3 died; it is started again"),
        (RetryClass.CRASH, 2, "rank 3 died; restart 2 of 5"),
        (RetryClass.HANG, 1, "rank 3 died; restart 1 of 7 after a hang"),
    ],
)
def test_a_recovery_names_rank_cause_and_budget(
    kind: RetryClass | None, count: int, sentence: str
) -> None:
    job = queued_job(max_restarts=5, max_hangs=7)
    cause = Cause(reason=Reason.WORKER_EXITED, message="died")
    ending = kind and AttemptEnd(retry_class=kind, reason=cause.reason, message=cause.message)
    budget = RetryBudget(endings={kind: count} if kind else {})
    rank = RankSnapshot(rank=3, ending=ending, budget=budget)
    assert describe_recovery(job, rank, cause) == sentence


def test_a_rank_resumes_from_a_known_checkpoint() -> None:
    job = queued_job()
    cause = Cause(reason=Reason.AGENT_LOST, message="died")
    saved = replace(job.ranks[0], progress=beat(20, last_checkpoint_step=20).progress)
    sentence = "rank 0 died; it resumes from its last checkpoint"
    assert describe_recovery(job.with_rank(saved), saved, cause) == sentence


@pytest.mark.parametrize(
    ("restarts", "fruitless", "kind", "words"),
    [
        (
            1,
            1,
            RetryClass.CRASH,
            "it is started again (failure 1 of 5 in a row without progress)",
        ),
        (1, 0, RetryClass.CRASH, "restart 1 of 50"),
        (50, 3, RetryClass.CRASH, "restart 50 of 50"),
        (
            49,
            3,
            RetryClass.CRASH,
            "it is started again (failure 3 of 5 in a row without progress)",
        ),
        (3, 2, RetryClass.KILLED, "restart 3 of 1000 after a kill"),
    ],
    ids=["a typing error", "after a checkpoint", "the last restart", "as near", "not its doing"],
)
def test_the_nearer_limit_is_named(
    restarts: int, fruitless: int, kind: RetryClass, words: str
) -> None:
    cause = Cause(reason=Reason.WORKER_EXITED, message="died")
    rank = RankSnapshot(
        rank=0,
        ending=AttemptEnd(retry_class=kind, reason=cause.reason, message=cause.message),
        budget=RetryBudget(endings={kind: restarts}, fruitless=fruitless),
    )
    assert describe_recovery(queued_job(), rank, cause) == f"rank 0 died; {words}"


def test_a_gang_counts_the_failures_of_all_its_ranks() -> None:
    cause = Cause(reason=Reason.WORKER_EXITED, message="died")
    ending = AttemptEnd(retry_class=RetryClass.CRASH, reason=cause.reason, message=cause.message)
    budget = RetryBudget(endings={RetryClass.CRASH: 2}, fruitless=2)
    rank = RankSnapshot(rank=1, ending=ending, budget=budget)
    gang = queued_job(restart_scope="gang", mode="independent", command=("a",))
    again = "rank 1 died; all ranks are started again"
    gang = gang.with_rank(rank)
    assert describe_recovery(gang, rank, cause) == (
        f"{again} (failure 2 of 5 in a row without progress)"
    )
    other = RankSnapshot(rank=0, budget=RetryBudget(endings={RetryClass.CRASH: 1}))
    gang = gang.with_rank(other)
    restarted = replace(rank, budget=replace(budget, fruitless=0))
    assert describe_recovery(gang, restarted, cause) == f"{again}, restart 3 of 50"


def test_a_quoted_log_has_no_control_characters() -> None:
    lines = ("50 %\r100 %", "\x1b]0;done\x07\x1b[2J\x9b1mlost")
    assert quote_end(lines) == " ( ]0;done  [2J 1mlost)"
    assert quote_lines(lines).splitlines()[1:] == ["  50 % 100 %", "   ]0;done  [2J 1mlost"]
