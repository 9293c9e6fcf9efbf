"""How a managed training process exits, and the record that it writes itself."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from muster.contracts.job.status import Reason
from muster.contracts.messages.rank import PermanentFailure
from muster.contracts.messages.wire import ExitRecord
from muster.contracts.settings.paths import JobFiles
from muster.runtime.exit_report import print_error, read_own_record
from tests.support.installation import without_ours
from tests.support.ranks import Ear, write_shards

SUPERVISED = """
import os, threading, time
from muster.contracts.settings.environ import RankSettings
from muster.contracts.messages.rank import (Warned)
from muster.runtime.exit_report import ExitReport, exit_process
from muster.runtime.agent_client import AgentClient, AgentSocket
settings = RankSettings.read(os.environ, world_size=1)
voice = AgentClient(AgentSocket.of(settings))
report = ExitReport(settings, voice)
threading.Thread(target=time.sleep, args=[600]).start()
"""
"""A supervised process whose program has left a thread behind."""

Run = Callable[..., tuple[int, ExitRecord | None]]


@pytest.fixture
def files(tmp_path: Path) -> JobFiles:
    files = JobFiles(tmp_path)
    files.run.mkdir()
    files.logs.mkdir()
    return files


@pytest.fixture
def ear() -> Iterator[Ear]:
    ear = Ear()
    yield ear
    ear.close()


@pytest.fixture
def run(files: JobFiles, ear: Ear) -> Run:
    """Run a supervised process to its end; return its exit code and its own record."""

    def run(*words: str, **environ: str) -> tuple[int, ExitRecord | None]:
        environment = {
            **without_ours(os.environ),
            "TORCHELASTIC_RESTART_COUNT": "3",
            "MUSTER_AGENT_FD": str(ear.descriptor),
            "MUSTER_AGENT_SOCKET": str(files.agent_socket(1)),
            **environ,
        }
        with files.log(0, 3).open("wb") as log:
            rank = subprocess.Popen(
                [sys.executable, "-P", *words],
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=(ear.descriptor,),
            )
        code = rank.wait(60)
        own = read_own_record(files, 0, 3, rank.pid)
        if own is not None:
            received = {type(message): message for message in ear.received()}
            assert {type(said.message): said.message for said in own.said} == received
        return code, own

    return run


@pytest.mark.parametrize(("raised", "code"), [((), 0), ((0,), 0), ((64,), 64), (("no",), 1)])
def test_sys_exit_gives_the_interpreters_exit_code(
    raised: tuple[object, ...], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert print_error(SystemExit(*raised)) == code
    assert capsys.readouterr().err == ("no\n" if code == 1 else "")


def test_any_other_error_is_printed_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_error(ValueError("wrong")) == 1
    assert "ValueError: wrong" in capsys.readouterr().err


def test_a_rank_with_a_permanent_error_records_it(run: Run, files: JobFiles) -> None:
    code, own = run("-m", "worker", DATASET_DIR="nowhere")
    assert code == 1
    assert own is not None
    assert (own.exited.rank, own.exited.attempt, own.exited.exit_code) == (0, 3, 1)
    assert own.exited.last_lines == tuple(files.log(0, 3).read_text().splitlines())
    (refused,) = (said.message for said in own.said if isinstance(said.message, PermanentFailure))
    assert refused.reason is Reason.INVALID_DATASET


def test_a_completed_rank_records_exit_code_0(run: Run, tmp_path: Path) -> None:
    write_shards(tmp_path / "data", [{"x": [1.0], "y": 0}] * 4)
    places = {"DATASET_DIR": str(tmp_path / "data"), "CHECKPOINT_DIR": str(tmp_path / "saved")}
    code, own = run("-m", "worker", WORLD_SIZE="1", MUSTER_MODE="independent", **places)
    assert code == 0
    assert own is not None
    assert (own.exited.exit_code, own.exited.last_lines) == (0, ())


@pytest.mark.parametrize(("asked", "code"), [(0, 0), (64, 64), (256, 0), (-1, 255), (1 << 70, 0)])
def test_exit_process_keeps_the_code_and_awaits_no_thread(run: Run, asked: int, code: int) -> None:
    left, own = run("-c", SUPERVISED + f"exit_process({asked}, report)")
    assert left == code
    assert own is not None
    assert own.exited.exit_code == code


def test_an_own_record_that_fails_does_not_prevent_the_exit(run: Run) -> None:
    unencodable = "voice._latest[Warned] = (0, Warned(message='\\udcff'))\n"
    assert run("-c", SUPERVISED + unencodable + "exit_process(0, report)") == (0, None)


def test_a_missing_log_leaves_the_last_lines_empty(run: Run, files: JobFiles) -> None:
    _, own = run("-c", SUPERVISED + f"os.unlink({str(files.log(0, 3))!r}); exit_process(3, report)")
    assert own is not None
    assert (own.exited.exit_code, own.exited.last_lines) == (3, ())


def test_an_own_record_is_redacted(run: Run, files: JobFiles) -> None:
    words = "print('refused:', os.environ['KEY'], flush=True); exit_process(3, report)"
    _, own = run("-c", SUPERVISED + words, MUSTER_SECRETS="KEY", KEY="correct horse")
    assert own is not None
    assert own.exited.last_lines == ("refused: [secret]",)
    assert b"correct horse" not in files.exit_report(0, 3).read_bytes()


def test_a_fork_of_the_program_writes_no_own_record(run: Run) -> None:
    fork = "if os.fork() == 0: exit_process(5, report)\nos.wait()\nexit_process(0, report)"
    code, own = run("-c", SUPERVISED + fork)
    assert code == 0
    assert own is not None
    assert own.exited.exit_code == 0


def test_own_records_are_readable_by_their_owner_only(run: Run, files: JobFiles) -> None:
    run("-c", SUPERVISED + "print('secret', flush=True); exit_process(3, report)")
    assert files.exit_report(0, 3).exists()
    assert files.exits.stat().st_mode & 0o777 == 0o700
