"""Every exit of a real process is classified correctly and charged to the right budget."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.host.processes import descendants
from tests.support.installation import Installation, Seen, await_value, has_saved

LONG = {"world_size": 2, "epochs": 4, "sleep_sec": 0.1}
"""Two ranks of 64 steps and six seconds: time to be interrupted."""

FAILING_PROGRAM = """
from muster.training.classifier import Classifier

class Failing(Classifier):
    def update(self, state, gradients, step):
        if step == 3:
            raise ZeroDivisionError("the third is the last")
        return super().update(state, gradients, step)
"""


def attempts(installation: Installation, job_id: str) -> list[Seen]:
    """Return all processes of a job, the oldest first."""
    answer = installation.request("GET", f"/jobs/{job_id}/attempts")
    assert answer.headers["x-total-count"] == str(len(answer.json()["attempts"]))
    return list(reversed(answer.json()["attempts"]))


@pytest.mark.parametrize(
    ("line", "starts", "reason", "said"),
    [
        ("raise RuntimeError('busy')", 5, "no_progress", "has failed 5 times in a row without"),
        ("open('/no/data')", 2, "invalid_program", "the last two attempts of every rank ended"),
        ("run.stpe()", 2, "invalid_program", "the last two attempts of every rank ended"),
    ],
)
def test_an_error_that_stays_costs_two_starts_and_others_five(
    installation: Installation, tmp_path: Path, line: str, starts: int, reason: str, said: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import muster\nrun = muster.join()\n{line}\n")
    job_id = installation.submit(world_size=1, command=[sys.executable, str(script)])
    job = installation.fail(job_id)
    assert job["reason"] == reason
    assert said in job["message"]
    ends = attempts(installation, job_id)
    assert [end["retry_class"] for end in ends] == starts * ["crash"]
    assert installation.see(job_id)["endings"]["crash"] == starts


def test_the_code_that_says_so_ends_the_job_at_its_first_start(installation: Installation) -> None:
    command = ["sh", "-c", "echo bad arguments; exit 64"]
    job_id = installation.submit(world_size=2, command=command)
    job = installation.fail(job_id)
    assert (job["reason"], job["exit_code"]) == ("do_not_retry", 64)
    assert "exited with code 64 and is not to be started again" in job["message"]
    assert "bad arguments" in job["message"]
    assert {end["attempt"] for end in attempts(installation, job_id)} == {0}


def test_sigterm_from_outside_is_no_crash(installation: Installation) -> None:
    job_id = installation.submit(**LONG, max_restarts=0)
    installation.wait_until(job_id, has_saved)
    pid = installation.kill(job_id, rank=1, number=signal.SIGTERM)
    seen = installation.complete(job_id)
    assert seen["restarts"] == 0
    assert (seen["endings"]["preemption"], seen["endings"]["crash"]) == (1, 0)
    first, second = (end for end in attempts(installation, job_id) if end["rank"] == 1)
    assert (first["pid"], first["retry_class"], first["reason"]) == (pid, "preemption", "preempted")
    assert first["message"] == "was asked to stop by another process and saved its work"
    assert 0 < first["step_at_end"] <= second["step_at_start"] < second["step_at_end"] == 64
    assert first["started_at"] < first["ended_at"] < second["started_at"]


def test_a_job_with_a_used_preemption_budget_fails(
    installation: Installation,
) -> None:
    job_id = installation.submit(**LONG, max_preemptions=0)
    installation.wait_until(job_id, has_saved)
    installation.kill(job_id, rank=1, number=signal.SIGTERM)
    job = installation.fail(job_id)
    assert (job["reason"], job["exit_code"]) == ("restart_limit", 1)
    assert job["message"] == (
        "rank 1 was asked to stop by another process and may not be restarted after a preemption"
    )


def test_sigterm_of_a_plain_program_costs_no_restart(
    installation: Installation, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    command = ["sh", "-c", f"test -e {again} && exit 0; touch {again}; exec sleep 600"]
    job_id = installation.submit(world_size=1, command=command, max_restarts=0)
    installation.wait_until(job_id, lambda _: again.exists())
    installation.kill(job_id, rank=0, number=signal.SIGTERM)
    assert installation.complete(job_id)["endings"]["preemption"] == 1


def test_heartbeats_without_steps_count_as_a_hang(installation: Installation) -> None:
    words = "import muster, signal; run = muster.join(); signal.pause()"
    job_id = installation.submit(
        world_size=1,
        command=[sys.executable, "-c", words],
        progress_timeout_seconds=1,
        max_hangs=0,
    )
    job = installation.fail(job_id)
    assert (job["reason"], job["exit_code"]) == ("restart_limit", 137)
    assert job["message"].startswith(
        "rank 0 sent heartbeats but took no step for 1 s and was killed "
        "and may not be restarted after a hang"
    )
    (hung,) = attempts(installation, job_id)
    assert (hung["retry_class"], hung["reason"]) == ("hang", "no_progress")


def test_what_cannot_be_run_is_never_started_again(
    installation: Installation, tmp_path: Path
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter")
    program.chmod(0o755)
    command = str(program)
    job_id = installation.submit(world_size=1, command=[command])
    assert installation.fail(job_id)["reason"] == "invalid_program"
    (end,) = attempts(installation, job_id)
    assert (end["retry_class"], end["attempt"]) == ("invalid_program", 0)
    assert end["message"].startswith(f"the command '{command}' cannot be run: ")


def test_a_crash_shows_its_last_line_and_costs_a_restart(
    installation: Installation, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    script = f"test -e {again} && exit 0; touch {again}; echo out of cheese; exit 3"
    job_id = installation.submit(world_size=1, command=["sh", "-c", script])
    seen = installation.complete(job_id)
    assert (seen["restarts"], seen["endings"]["crash"]) == (1, 1)
    crash, done = attempts(installation, job_id)
    assert crash["retry_class"] == "crash"
    assert crash["message"] == "exited with code 3 (out of cheese)"
    assert (done["retry_class"], done["reason"]) == ("finished", None)


def test_a_kill_without_evidence_is_no_lack_of_memory(
    installation: Installation, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    script = f"test -e {again} && exit 0; touch {again}; sh -c 'kill -9 $$'; exit $?"
    job_id = installation.submit(world_size=1, command=["sh", "-c", script], max_out_of_memory=0)
    assert installation.complete(job_id)["endings"]["crash"] == 1
    crash, _ = attempts(installation, job_id)
    assert crash["message"].startswith("exited with code 137, as a shell or a container does")


def test_a_lack_of_memory_has_a_budget_of_its_own(installation: Installation) -> None:
    command = [sys.executable, "-c", "bytearray(1 << 60)"]
    job_id = installation.submit(world_size=1, command=command, max_out_of_memory=1)
    job = installation.fail(job_id)
    assert job["reason"] == "restart_limit"
    assert "has used its one restart for lack of memory" in job["message"]
    ends = attempts(installation, job_id)
    assert [end["retry_class"] for end in ends] == 2 * ["out_of_memory"]
    assert ends[0]["message"] == "exited with code 1 for lack of memory (MemoryError)"


@pytest.fixture
def scarce(tmp_path: Path) -> Iterator[Installation]:
    """An installation whose coordinator, and so its jobs, have 400 MB together."""
    cell = Path(f"/sys/fs/cgroup/memory/muster-test-{os.getpid()}")
    try:
        cell.mkdir()
    except OSError:
        pytest.skip("no control group that limits memory is to be had")
    try:
        (cell / "memory.limit_in_bytes").write_text(str(400 << 20))
        with Installation(tmp_path) as installation:
            coordinator = installation.coordinator.pid
            (cell / "cgroup.procs").write_text(str(coordinator))
            for pid in descendants(coordinator):  # the fork server of its agents, if started before
                (cell / "cgroup.procs").write_text(str(pid))
            yield installation
    finally:
        await_value(lambda: not (cell / "cgroup.procs").read_text(), str)
        cell.rmdir()


def test_a_kill_of_the_kernels_is_evidence_of_a_lack_of_memory(scarce: Installation) -> None:
    greedy = f"{sys.executable} -c \"x = b'x' * (900 << 20)\""
    for script, end_seen in ((f"exec {greedy}", (None, 9)), (f"{greedy}; exit $?", (137, None))):
        command = ["sh", "-c", script]
        job_id = scarce.submit(world_size=1, command=command, max_out_of_memory=0)
        job = scarce.fail(job_id)
        assert (job["reason"], job["exit_code"]) == ("restart_limit", 137)
        assert "and may not be restarted for lack of memory" in job["message"]
        (end,) = attempts(scarce, job_id)
        assert end["retry_class"] == "out_of_memory"
        assert (end["exit_code"], end["exit_signal"]) == end_seen


def test_an_error_repeated_at_the_same_step_is_final(
    installation: Installation, tmp_path: Path
) -> None:
    (tmp_path / "failing.py").write_text(FAILING_PROGRAM)
    job_id = installation.submit(
        mode="synchronous", world_size=1, working_dir=str(tmp_path), program="failing.py:Failing"
    )
    job = installation.fail(job_id)
    assert job["reason"] == "invalid_program"
    assert "update() of the program failed at step 3: " in job["message"]
    assert "failing.py:7, ZeroDivisionError: the third is the last" in job["message"]
    kinds = [end["retry_class"] for end in attempts(installation, job_id)]
    assert kinds == ["crash", "invalid_program"]
    assert "Traceback" in installation.log(job_id)
