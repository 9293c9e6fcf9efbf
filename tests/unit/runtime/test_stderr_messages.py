import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.runtime.stderr_messages import flush_streams, print_stderr, print_stdout

PRINT = (
    "from muster.runtime.stderr_messages import flush_streams, print_stderr, print_stdout\n"
    "print_stderr('warning'); print_stdout('progress'); flush_streams()\n"
)


def test_each_message_goes_to_its_stream(capfd: pytest.CaptureFixture[str]) -> None:
    print_stderr("watch out")
    print_stdout("step 1")
    assert capfd.readouterr() == ("step 1\n", "watch out\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_does_not_change_the_exit_code(unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-c", f"{PRINT}raise SystemExit(75)"]
        done = subprocess.run(
            command, stdout=full, stderr=full, env=environment, check=False, timeout=60
        )
    assert done.returncode == 75


def test_closed_descriptors_raise_nothing() -> None:
    closed = ["sh", "-c", 'exec "$0" -c "$1" >&- 2>&-', sys.executable, PRINT]
    assert subprocess.run(closed, check=False, timeout=60).returncode == 0


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise RuntimeError(text)

    def flush(self) -> None:
        raise RuntimeError


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, object(), closed(), Broken()])
def test_a_stream_that_a_program_has_replaced_raises_nothing(
    stream: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    print_stderr("lost")
    flush_streams()


def test_messages_and_prints_keep_their_order() -> None:
    script = f"{PRINT}print('first'); print_stdout('second'); print('third')"
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, env=environment, check=True, timeout=60)
    assert done.stdout.split() == [b"progress", b"first", b"second", b"third"]
