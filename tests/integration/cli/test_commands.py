"""The verbs for synchronous jobs, from the command line to the rows."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from click.testing import Result

from cli.errors import ExitCode
from cli.jobs.workers import AUDIT_UNKNOWN
from muster.contracts.job.status import JobId, JobStatus
from tests.support.api_service import Service, StandIn
from tests.support.database_samples import NOON, attempt, commit, epoch, member, worker

TERMINAL_COLUMNS = 80

Muster = Callable[..., Result]


def test_job_is_scaled(muster: Muster, stand_in: StandIn, elastic: str) -> None:
    result = muster("scale", elastic, "6")
    assert result.stdout == f"{elastic} will continue with 6 ranks; see: muster workers {elastic}\n"
    assert result.exit_code == 0
    assert stand_in.jobs.get(JobId(elastic)).world_size == 6


def test_job_is_paused_and_resumed(muster: Muster, stand_in: StandIn, elastic: str) -> None:
    for verb, paused, said in (
        ("pause", True, f"{elastic} will pause; resume it with: muster resume {elastic}\n"),
        ("resume", False, f"{elastic} resumes\n"),
        ("resume", False, f"{elastic} is not paused: it is RUNNING\n"),
    ):
        assert muster(verb, elastic).stdout == said
        assert stand_in.jobs.get(JobId(elastic)).pause_request is paused


def test_one_checkpoint_is_requested_at_a_time(
    muster: Muster, stand_in: StandIn, elastic: str
) -> None:
    result = muster("checkpoint", "now", elastic, "--no-wait")
    assert result.stdout == f"{elastic} will save a checkpoint; see: muster events {elastic}\n"
    assert stand_in.jobs.get(JobId(elastic)).is_checkpoint_pending
    again = muster("checkpoint", "now", elastic)
    assert (again.exit_code, "wait until that is durable" in again.stderr) == (6, True)


def test_workers_table_fits_80_columns(muster: Muster, stand_in: StandIn, elastic: str) -> None:
    mine = replace(stand_in.lease.process, pid=4_194_304)
    gone = member(0, state="failed", node="a-node-of-a-rather-long-name.example")
    young = member(17, rank=4095, attempt=1, state="syncing", joined_step=None, node=None)
    young = replace(young, backend="cpu")
    busy = member(1, joined_step=99_999_999, backend="cuda", gpu_count=2)
    workers = [worker(1, process=mine, step=99_999_999)]
    stand_in.write(elastic, members=[gone, busy, young], ranks=workers)
    lines = muster("workers", elastic).stdout.splitlines()
    assert lines == [
        "worker  rank  state        step    joined      pid  node          device  beat",
        "0          0  failed          -         0        -  a-node-of-a…  -       -",
        "1          1  active   99999999  99999999  4194304  höst-1        2 GPU   -",
        "17      4095  syncing         -         -        -  -             cpu     -",
        "world_size is 4 ranks, active: 1; workers are joining or leaving",
    ]
    assert max(len(line) for line in lines) <= TERMINAL_COLUMNS


def test_audit_shows_epochs_and_checkpoints(
    muster: Muster, stand_in: StandIn, elastic: str
) -> None:
    million = {"samples": 10**9, "expected_samples": 10**9}
    stand_in.write(
        elastic,
        commits=[commit(10**8, generation=1000)],
        epochs=[epoch(998, **million), epoch(999, samples=1, hash_sum=1)],
    )
    result = muster("audit", elastic)
    assert result.exit_code == AUDIT_UNKNOWN
    assert result.stdout.splitlines() == [
        (
            f"{elastic} is RUNNING: every sample of every durable whole epoch was read exactly "
            "once; ask again later"
        ),
        "",
        "epoch     samples          of  hash              expected          once",
        "  998  1000000000  1000000000  8000000000000000  8000000000000000  yes",
        "  999           1         100  0000000000000001  8000000000000000  -",
        "",
        "     step  epoch  generation  ranks' hash       saved at (UTC)",
        "100000000      0        1000  ddddddddddddddd…  2026-03-01 12:00:00",
        "(the ranks' hash covers their memory; for the checkpoint: muster digest)",
    ]
    last = muster("audit", elastic, "--last", "1").stdout
    assert "  998  " not in last
    assert "(1 earlier epoch not shown: --last)" in last


def test_attempts_show_each_process_and_its_end(
    muster: Muster, stand_in: StandIn, elastic: str
) -> None:
    crashed = attempt(
        4095,
        17,
        pid=4_194_304,
        ended_at=NOON + timedelta(seconds=99_999),
        retry_class="invalid_program",
        message=f"exited with code 1 ({99 * 'x'})",
        step_at_start=None,
        step_at_end=99_999,
    )
    young = attempt(0, 1, started_at=NOON + timedelta(seconds=1))
    stand_in.write(elastic, attempts=[crashed, young], ranks=[worker(0, attempt=1, step=8)])
    first, *lines = muster("attempts", elastic).stdout.splitlines()
    assert first.startswith(f"{elastic} is RUNNING: no data set was named")
    assert lines == [
        "rank  attempt      pid  started (UTC)   seconds  from  to step  class",
        "   0        1     4711  03-01 12:00:01        -     5        -  alive",
        "4095       17  4194304  03-01 12:00:00    99999     -    99999  invalid_program",
        f"      exited with code 1 ({99 * 'x'})",
    ]
    assert muster("attempts", elastic, "--last", "1").stdout.splitlines()[1:] == [
        "rank  attempt   pid  started (UTC)   seconds  from  to step  class",
        "   0        1  4711  03-01 12:00:01  -           5  -        alive",
    ]


def test_audit_that_fails_is_exit_code_1(muster: Muster, stand_in: StandIn, elastic: str) -> None:
    stand_in.write(elastic, epochs=[epoch(0, hash_sum=1)])
    stand_in.move(elastic, JobStatus.COMPLETED)
    result = muster("audit", elastic)
    assert result.exit_code == 1
    assert "did NOT read every sample" in result.stdout.splitlines()[0]


def typed(port: int, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "cli", *words],
        env={"MUSTER_URL": f"http://127.0.0.1:{port}/"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_refusal_is_one_line_and_an_exit_code(service: Service, job: str) -> None:
    for words, sentence, code in [
        (("scale", job, "3"), "it keeps its world size of 2", ExitCode.CONFLICT),
        (("workers", "no/body"), "there is no job 'no/body'", ExitCode.NOT_FOUND),
        (("audit", f"{job}x"), f"did you mean '{job}'?", ExitCode.NOT_FOUND),
    ]:
        ended = typed(service.port, *words)
        assert (ended.returncode, ended.stdout) == (code, "")
        assert ended.stderr.startswith("muster: ")
        assert sentence in ended.stderr
        assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("pause", "{job}"), "(muster stop {job})"),
        (("rm", "{job}"), "(muster stop {job})"),
        (("token", "revoke", "nope"), "there is no token nope"),
    ],
)
def test_refusal_does_not_mention_http_requests(
    muster: Muster, job: str, words: tuple[str, ...], said: str
) -> None:
    refused = muster(*(word.format(job=job) for word in words))
    assert said.format(job=job) in refused.stderr
    assert not re.search("(GET|POST|DELETE|PATCH) /", refused.stderr)
