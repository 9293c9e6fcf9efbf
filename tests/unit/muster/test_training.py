"""How a process that runs a training of ours ends, and what it says of that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from installation import without_ours
from ranks import Ear

from muster.contracts.job import Reason
from muster.contracts.layout import JobFiles
from muster.contracts.messages import Refused
from muster.exit_records import read_own_account
from muster.training import last_word


@pytest.mark.parametrize(("leave", "code"), [((), 0), ((0,), 0), ((64,), 64), (("no",), 1)])
def test_who_leaves_has_the_exit_code_that_the_interpreter_gives(
    leave: tuple[object, ...], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert last_word(SystemExit(*leave)) == code
    assert capsys.readouterr().err == ("no\n" if code == 1 else "")


def test_any_other_error_is_told_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert last_word(ValueError("wrong")) == 1
    assert "ValueError: wrong" in capsys.readouterr().err


def test_a_process_accounts_for_its_own_end(tmp_path: Path) -> None:
    """Its agent may be gone by then: nobody else knows what it had come to."""
    files = JobFiles(tmp_path)
    files.run.mkdir()
    files.logs.mkdir()
    ear = Ear()
    environment = {
        **without_ours(os.environ),
        "DATASET_DIR": str(tmp_path / "nowhere"),
        "TORCHELASTIC_RESTART_COUNT": "3",
        "MUSTER_AGENT_FD": str(ear.descriptor),
        "MUSTER_AGENT_SOCKET": str(files.agent_socket(1)),
    }
    with files.log(0, 3).open("wb") as log:
        rank = subprocess.Popen(
            [sys.executable, "-P", "-m", "worker"],
            stdout=log,
            stderr=log,
            env=environment,
            pass_fds=(ear.descriptor,),
        )
    assert rank.wait(60) == 1
    own = read_own_account(files, 0, 3, rank.pid)
    assert own is not None
    assert (own.exited.rank, own.exited.incarnation, own.exited.exit_code) == (0, 3, 1)
    assert own.exited.last_lines == tuple(files.log(0, 3).read_text().splitlines())
    assert [said.message for said in own.said] == ear.heard()
    refused = own.said[-2].message
    assert isinstance(refused, Refused)
    assert refused.reason is Reason.INVALID_DATASET
    ear.close()
