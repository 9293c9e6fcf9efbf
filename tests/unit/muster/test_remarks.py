import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.remarks import finish, narrate, remark

SPEAK = "from muster.remarks import *; remark('to a person'); narrate('on it goes'); finish()"


def test_a_remark_is_for_standard_error_and_the_progress_for_standard_output(
    capfd: pytest.CaptureFixture[str],
) -> None:
    remark("watch out")
    narrate("step 1")
    assert capfd.readouterr() == ("step 1\n", "watch out\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_on_a_full_disk_nothing_is_raised_and_the_exit_code_is_the_process_s_own(
    unbuffered: str,
) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("wb") as full:
        speaker = [sys.executable, "-c", f"{SPEAK}; raise SystemExit(75)"]
        done = subprocess.run(
            speaker, stdout=full, stderr=full, env=environment, check=False, timeout=60
        )
    assert done.returncode == 75


def test_without_any_output_nothing_is_raised() -> None:
    closed = ["sh", "-c", 'exec "$0" -c "$1" >&- 2>&-', sys.executable, SPEAK]
    assert subprocess.run(closed, check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("sink", [None, object()])
def test_what_is_no_output_at_all_is_passed_over(
    sink: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", sink)
    remark("to nobody")
    finish()


def test_an_output_that_a_program_has_closed_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    narrate("to nobody")
    finish()


def test_what_a_program_has_put_in_its_place_is_spoken_to(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = io.StringIO()
    monkeypatch.setattr(sys, "stderr", heard)
    remark("watch out")
    assert heard.getvalue() == "watch out\n"


def test_an_error_of_what_a_program_has_put_there_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise RuntimeError(text)

        def flush(self) -> None:
            raise RuntimeError

    monkeypatch.setattr(sys, "stderr", Broken())
    remark("to nobody")
    finish()


def test_what_was_printed_before_comes_before() -> None:
    script = "from muster.remarks import narrate; print('first'); narrate('second'); print('third')"
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    speaker = [sys.executable, "-c", script]
    done = subprocess.run(speaker, capture_output=True, env=environment, check=True, timeout=60)
    assert done.stdout.split() == [b"first", b"second", b"third"]
