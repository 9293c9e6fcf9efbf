"""How a process that runs a training of ours ends, and what it says of that."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from installation import without_ours
from ranks import Ear, write_shards

from muster.contracts.exit_record import ExitRecord
from muster.contracts.job import Reason
from muster.contracts.layout import JobFiles
from muster.contracts.messages import Refused
from muster.departure import last_word
from muster.exit_records import read_own_account

LEAVES = """
import os, threading, time
from muster.contracts.environ import RankSettings
from muster.contracts.messages import Warned
from muster.departure import Account, leave
from muster.line import Line
from muster.voice import Voice
settings = RankSettings.read(os.environ, world_size=1)
voice = Voice(Line.of(settings))
account = Account(settings, voice)
threading.Thread(target=time.sleep, args=[600]).start()
"""
"""A process of ours whose program has left a thread behind; how it goes on is the test's."""

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
    """Run a supervised process to its end; return its exit code and its own account."""

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
        own = read_own_account(files, 0, 3, rank.pid)
        if own is not None:
            heard = {type(message): message for message in ear.heard()}
            assert {type(said.message): said.message for said in own.said} == heard
        return code, own

    return run


@pytest.mark.parametrize(("leave", "code"), [((), 0), ((0,), 0), ((64,), 64), (("no",), 1)])
def test_who_leaves_has_the_exit_code_that_the_interpreter_gives(
    leave: tuple[object, ...], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert last_word(SystemExit(*leave)) == code
    assert capsys.readouterr().err == ("no\n" if code == 1 else "")


def test_any_other_error_is_told_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert last_word(ValueError("wrong")) == 1
    assert "ValueError: wrong" in capsys.readouterr().err


def test_a_rank_that_is_refused_accounts_for_its_own_end(run: Run, files: JobFiles) -> None:
    """Its agent may be gone by then: nobody else knows what it had come to."""
    code, own = run("-m", "worker", DATASET_DIR="nowhere")
    assert code == 1
    assert own is not None
    assert (own.exited.rank, own.exited.incarnation, own.exited.exit_code) == (0, 3, 1)
    assert own.exited.last_lines == tuple(files.log(0, 3).read_text().splitlines())
    (refused,) = (said.message for said in own.said if isinstance(said.message, Refused))
    assert refused.reason is Reason.INVALID_DATASET


def test_a_rank_that_is_through_says_so(run: Run, tmp_path: Path) -> None:
    write_shards(tmp_path / "data", [{"x": [1.0], "y": 0}] * 4)
    places = {"DATASET_DIR": str(tmp_path / "data"), "CHECKPOINT_DIR": str(tmp_path / "saved")}
    code, own = run("-m", "worker", WORLD_SIZE="1", MUSTER_MODE="independent", **places)
    assert code == 0
    assert own is not None
    assert (own.exited.exit_code, own.exited.last_lines) == (0, ())


@pytest.mark.parametrize(("asked", "code"), [(0, 0), (64, 64), (256, 0), (-1, 255), (1 << 70, 0)])
def test_a_process_leaves_with_its_code_and_waits_for_no_thread(
    run: Run, asked: int, code: int
) -> None:
    left, own = run("-c", LEAVES + f"leave({asked}, account)")
    assert left == code
    assert own is not None
    assert own.exited.exit_code == code


def test_who_cannot_account_for_its_end_ends_all_the_same(run: Run) -> None:
    unspeakable = "voice._standing[Warned] = (0, Warned(message='\\udcff'))\n"
    assert run("-c", LEAVES + unspeakable + "leave(0, account)") == (0, None)


def test_without_its_log_it_has_only_nothing_to_quote(run: Run, files: JobFiles) -> None:
    _, own = run("-c", LEAVES + f"os.unlink({str(files.log(0, 3))!r}); leave(3, account)")
    assert own is not None
    assert (own.exited.exit_code, own.exited.last_lines) == (3, ())


def test_an_account_holds_no_secret(run: Run, files: JobFiles) -> None:
    words = "print('refused:', os.environ['KEY'], flush=True); leave(3, account)"
    _, own = run("-c", LEAVES + words, MUSTER_SECRETS="KEY", KEY="correct horse")
    assert own is not None
    assert own.exited.last_lines == ("refused: [secret]",)
    assert b"correct horse" not in files.own_account(0, 3).read_bytes()


def test_a_fork_that_runs_off_its_end_speaks_for_nobody(run: Run) -> None:
    fork = "if os.fork() == 0: leave(5, account)\nos.wait()\nleave(0, account)"
    code, own = run("-c", LEAVES + fork)
    assert code == 0
    assert own is not None
    assert own.exited.exit_code == 0


def test_an_account_quotes_a_log_and_is_for_its_owner_alone(run: Run, files: JobFiles) -> None:
    run("-c", LEAVES + "print('secret', flush=True); leave(3, account)")
    assert files.own_account(0, 3).stat().st_mode & 0o777 == 0o600
    assert files.exits.stat().st_mode & 0o777 == 0o700
