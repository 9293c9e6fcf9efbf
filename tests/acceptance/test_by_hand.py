"""`python -P -m worker` and `python -P -m coordinator` on a terminal, without services."""

import signal

import pytest

from muster.contracts.settings.paths import JobFiles
from tests.support.installation import DEADLINE_SECONDS, Undisturbed, await_value
from tests.support.terminals import Terminal

ALONE = {"MUSTER_MODE": "independent"}


def test_a_worker_runs_without_services(terminal: Terminal) -> None:
    rank = {"JOB_ID": "test", "RANK": "0", "WORLD_SIZE": "4"}
    code, output = terminal.run("-P", "-m", "worker", **rank)
    assert code == 0, output
    assert "step 8/8  is done" in output.splitlines()
    code, output = terminal.run("-P", "-m", "worker", **rank)
    assert code == 0, output
    assert "goes on from its checkpoint of step 8" in output


def test_a_worker_that_is_terminated_goes_on_at_the_next_call(
    terminal: Terminal, undisturbed: Undisturbed
) -> None:
    rank = {"JOB_ID": "test", "RANK": "0", "WORLD_SIZE": "2", "CHECKPOINT_EVERY": "1000"}
    first = terminal.start("-P", "-m", "worker", **rank, SLEEP_SEC="1")
    assert first.stdout is not None
    next(line for line in first.stdout if "loss" in line)
    first.send_signal(signal.SIGTERM)
    output, _ = first.communicate(timeout=DEADLINE_SECONDS)
    assert first.returncode == 0
    assert "is asked to stop; saved" in output
    _, output = terminal.run("-P", "-m", "worker", **rank)
    assert "goes on from its checkpoint" in output
    assert terminal.digest("test", 0, 2) == undisturbed(world_size=2)[0]


BUSY = """
import threading
import numpy as np
from muster.program import Contribution

threading.Thread(target=threading.Event().wait).start()

class Busy:
    def initial(self, seed):
        return {"weights": np.zeros(8, np.float32)}

    def gradient(self, state, batch, random):
        return Contribution({"weights": np.zeros(8, np.float32)}, 0.0)

    def update(self, state, gradients, step):
        if step == FAILS_AT:
            raise RuntimeError("seven is not a colour")
        return state
"""


@pytest.mark.parametrize(
    ("fails_at", "code", "words"), [(3, 1, "seven is not a colour"), (None, 0, "is done")]
)
def test_no_thread_of_a_program_outlives_its_training(
    terminal: Terminal, fails_at: int | None, code: int, words: str
) -> None:
    (terminal.directory / "busy.py").write_text(f"FAILS_AT = {fails_at}\n{BUSY}")
    rank = {"JOB_ID": "test", "RANK": "0", "WORLD_SIZE": "1"}
    program = {"MUSTER_MODE": "synchronous", "MUSTER_PROGRAM": "busy.py:Busy"}
    ended, output = terminal.run("-P", "-m", "worker", **rank, **program)
    assert (ended, words in output) == (code, True), output


@pytest.mark.parametrize(("module", "name"), [("worker", "RANK"), ("coordinator", "WORLD_SIZE")])
def test_an_invalid_environment_is_one_sentence(terminal: Terminal, module: str, name: str) -> None:
    ended, output = terminal.run("-P", "-m", module, **{"JOB_ID": "test", name: "many"})
    assert (ended, name in output, output.count("\n")) == (2, True, 1), output


@pytest.mark.parametrize("module", ["api", "coordinator"])
def test_a_service_that_is_asked_for_help_does_not_start(terminal: Terminal, module: str) -> None:
    code, output = terminal.run("-P", "-m", module, "--help")
    assert (code, output.startswith(f"usage: python -P -m {module} ")) == (0, True), output
    code, output = terminal.run("-P", "-m", module, "--port=8000")
    assert (code, "unrecognized arguments: --port=8000" in output) == (2, True), output


def test_a_coordinator_with_a_job_id_runs_that_job(
    terminal: Terminal, undisturbed: Undisturbed
) -> None:
    code, output = terminal.run("-P", "-m", "coordinator", JOB_ID="one", WORLD_SIZE="2", **ALONE)
    assert code == 0, output
    assert "the job is COMPLETED" in output
    assert [terminal.digest("one", rank, 2) for rank in range(2)] == undisturbed(world_size=2)
    # It neither needs nor touches the service's own database.
    assert not (terminal.directory / "data" / "muster.db").exists()


def test_a_failed_job_run_once_more_finds_nothing_of_the_first(terminal: Terminal) -> None:
    one = {"JOB_ID": "one", "WORLD_SIZE": "1", "MUSTER_COMMAND": '["false"]', "MAX_RESTARTS": "0"}
    code, output = terminal.run("-P", "-m", "coordinator", **one)
    assert code == 1, output
    assert "rank 0 exited with code 1 and may not be restarted" in output
    jobs = terminal.directory / "data" / "foreground" / "one" / "jobs"
    files = JobFiles(jobs / "one")
    files.agent_socket(2).touch()
    code, output = terminal.run("-P", "-m", "coordinator", **{**one, "MUSTER_COMMAND": '["true"]'})
    assert code == 0, output
    assert "agent" not in output
    assert not files.agent_socket(2).exists()
    assert len(list(jobs.glob("one.*/logs"))) == 1, "what the first has said is kept"


def test_a_coordinator_refuses_checkpoints_of_another_mode(
    terminal: Terminal,
) -> None:
    own = terminal.directory / "checkpoints" / "one" / "worker_0"
    (own / "step_0000000042.g0003").mkdir(parents=True)
    code, output = terminal.run("-P", "-m", "coordinator", JOB_ID="one", WORLD_SIZE="1")
    assert code == 6, output
    assert "use mode independent, or start a job with another id" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_same_command_goes_on_after_an_interruption(
    terminal: Terminal, undisturbed: Undisturbed, number: signal.Signals
) -> None:
    job = {"WORLD_SIZE": "2", "MUSTER_EPOCHS": "3", **ALONE}
    first = terminal.start("-P", "-m", "coordinator", JOB_ID="one", SLEEP_SEC="0.15", **job)
    latest = [terminal.directory / f"checkpoints/one/worker_{rank}/LATEST" for rank in range(2)]
    await_value(lambda: all(path.exists() for path in latest), str)
    first.send_signal(number)
    output, _ = first.communicate(timeout=DEADLINE_SECONDS)
    if number is signal.SIGINT:
        assert first.returncode == 130, output
        assert "the same command with --job-id one goes on" in output
        assert not terminal.left_running()
    code, output = terminal.run("-P", "-m", "coordinator", JOB_ID="one", **job)
    assert code == 0, output
    assert [terminal.digest("one", rank, 2) for rank in range(2)] == undisturbed(
        world_size=2, epochs=3
    )


def test_a_rank_that_a_person_interrupts_ends_with_a_sentence(terminal: Terminal) -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MUSTER_MODE": "synchronous", "SLEEP_SEC": "1"}
    process = terminal.start("-P", "-m", "worker", JOB_ID="try", CHECKPOINT_EVERY="1", **rank)
    latest = terminal.directory / "checkpoints/try/LATEST"
    await_value(latest.exists, str)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 130, output
    assert "muster: interrupted: " in output
    assert "Traceback" not in output


DAEMON = """
import multiprocessing, time
import muster

def wait(is_running):
    is_running.set()
    time.sleep(1000)

run = muster.join()
fork = multiprocessing.get_context("fork")
is_running = fork.Event()
fork.Process(target=wait, args=[is_running], daemon=True).start()
is_running.wait()
run.is_complete = True
"""


def test_a_daemon_of_a_script_ends_with_it(terminal: Terminal) -> None:
    code, output = terminal.run("-c", DAEMON)
    assert code == 0, output
