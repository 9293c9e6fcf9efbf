"""`muster run`: torchrun scripts on a terminal, without services."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO

import pytest

from cli.services.signals import END_SIGNALS, ONE_REQUEST_SECONDS
from muster.contracts.settings.paths import DataDir
from tests.support.installation import DEADLINE_SECONDS, await_value
from tests.support.screens import Screen
from tests.support.terminals import Terminal

RUN = ("-P", "-m", "cli", "run")
GANG = Path(__file__).parents[2] / "examples" / "gang.py"


def script(terminal: Terminal, text: str) -> str:
    (terminal.directory / "train.py").write_text(text)
    return "train.py"


def test_a_script_runs_on_all_ranks_and_what_they_print_is_shown(terminal: Terminal) -> None:
    code, output = terminal.run(*RUN, "-n", "3", str(GANG), "0")
    assert code == 0, output
    for rank in range(3):
        assert f"[{rank}] one of 3 ranks at port " in output
        assert f"[{rank}] has the sum 30300\n" in output
    assert "muster: the job is COMPLETED" in output


def test_what_follows_the_script_and_the_environment_are_its_own(terminal: Terminal) -> None:
    name = script(terminal, "import os, sys; print(sys.argv[1:], os.environ['HF_TOKEN'])")
    # Of a service it would be for those jobs that ask for it.
    lent = {"MUSTER_SECRET_ENV": "HF_TOKEN", "HF_TOKEN": "of this shell"}
    code, output = terminal.run(*RUN, name, "--", "--help", "-n", "4", "--", "x y", **lent)
    assert code == 0, output
    assert "[0] ['--help', '-n', '4', '--', 'x y'] of this shell\n" in output


def test_a_gang_is_started_again_as_a_whole(terminal: Terminal) -> None:
    name = script(
        terminal,
        "import os, pathlib, signal, time\n"
        "rank, before = (int(os.environ[n]) for n in ('RANK', 'TORCHELASTIC_RESTART_COUNT'))\n"
        "print('start', before, os.environ['MASTER_PORT'], flush=True)\n"
        "started = pathlib.Path('rank_0_started')\n"
        "if before == 0 and rank == 0:\n"
        "    started.touch()\n"
        "    signal.pause()\n"
        "while not started.exists():\n"
        "    time.sleep(0.01)\n"
        "if before == 0:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n",
    )
    code, output = terminal.run(*RUN, "-n", "2", name)
    assert code == 0, output
    assert "rank 1 was ended by signal 9 (SIGKILL); all ranks are started again, " in output
    starts = [line for line in output.splitlines() if "] start " in line]
    assert {line[:11] for line in starts} == {f"[{r}] start {n}" for r in "01" for n in "01"}
    assert len({line.split()[-1] for line in starts}) == 2, "one port for each start of all"


def test_a_job_that_fails_is_exit_code_1_and_says_why(terminal: Terminal) -> None:
    name = script(terminal, "print('no end of line', end=''); raise SystemExit(3)")
    code, output = terminal.run(*RUN, "--max-restarts", "0", name)
    assert code == 1, output
    assert "[0] no end of line\n" in output
    assert "rank 0 exited with code 3 and may not be restarted" in output


def test_a_typing_mistake_costs_two_starts_of_a_gang(terminal: Terminal) -> None:
    code, output = terminal.run(*RUN, "-n", "4", script(terminal, "import torchy"))
    assert code == 1, output
    assert output.count(" runs as pid ") == 2 * 4
    assert "exited with code 1 and a restart did not help" in output


def test_a_missing_script_is_refused_and_creates_nothing(terminal: Terminal) -> None:
    code, output = terminal.run(*RUN, "train.py")
    assert code == 2
    assert "there is no train.py" in output
    assert not (terminal.directory / "data").exists()


LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
"""


def test_the_open_file_limit_is_raised_but_not_for_ranks(terminal: Terminal) -> None:
    words = (*RUN, "-n", "8", "sh", "-c", "echo $(ulimit -Sn) of $(ulimit -Hn)")
    code, output = terminal.run("-c", LIMITED, "14", "48", *words)
    assert code == 0, output
    for rank in range(8):
        assert f"[{rank}] 14 of 48\n" in output


WAITS = (
    "import pathlib, time\n"
    "print('it waits', flush=True)\n"
    "while not pathlib.Path('go').exists(): time.sleep(0.01)\n"
)


def test_closing_the_terminal_leaves_nothing_running(terminal: Terminal) -> None:
    words = ("run", "-n", "2", script(terminal, WAITS))
    with Screen(*words, environment=terminal.environment, directory=terminal.directory) as screen:
        screen.see(r"(?s)it waits.*it waits")
        assert screen.close() == 130
    assert not terminal.left_running()


BREATHES = (
    "import pathlib, time\n"
    "while not pathlib.Path('go').exists():\n"
    "    print('it breathes', flush=True)\n"
    "    time.sleep(0.01)\n"
)


def test_under_nohup_the_job_outlives_the_terminal(terminal: Terminal) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited by processes started here
    try:
        run = terminal.start(*RUN, script(terminal, BREATHES))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert run.stdout is not None
    breaths = (line for line in run.stdout if "it breathes" in line)
    next(breaths)
    run.send_signal(signal.SIGHUP)
    # A process that is being ended may still print a few lines.
    assert len(list(islice(breaths, 50))) == 50
    (terminal.directory / "go").touch()
    output, _ = run.communicate(timeout=DEADLINE_SECONDS)
    assert run.returncode == 0, output


FLOOD = (
    "import itertools, signal, sys\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit())\n"
    "for number in itertools.count():\n"
    "    print(number, 'x' * 99)\n"
)


@contextmanager
def flooding(terminal: Terminal, stderr: IO[str] | int) -> Iterator[subprocess.Popen[str]]:
    """A run whose standard output is not read, so its pipe is full."""
    reading, writing = os.pipe()
    run = subprocess.Popen(
        [sys.executable, *RUN, "--job-id", "mine", script(terminal, FLOOD)],
        cwd=terminal.directory,
        env=terminal.environment,
        stdout=writing,
        stderr=stderr,
        text=True,
    )
    has_room = select.poll()
    has_room.register(writing, select.POLLOUT)
    try:
        while has_room.poll(0):
            assert run.poll() is None
            time.sleep(0.01)
        yield run
    finally:
        run.kill()
        run.wait()
        os.close(reading)
        os.close(writing)


def test_an_interrupted_job_leaves_no_process_and_resumes_by_id(terminal: Terminal) -> None:
    name = script(
        terminal,
        "import os, signal\n"
        "before = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('start', before, flush=True)\n"
        f"if before != '{len(END_SIGNALS)}': signal.pause()\n",
    )
    words = (*RUN, "-n", "2", "--job-id", "mine")
    ended = DataDir(terminal.directory / "data").foreground("mine").ended
    for count, number in enumerate(END_SIGNALS):
        run = terminal.start(*words, name)
        assert run.stdout is not None
        for _ in range(2):
            next(line for line in run.stdout if f"start {count}" in line)
        run.send_signal(number)
        output, _ = run.communicate(timeout=DEADLINE_SECONDS)
        assert run.returncode == 130, output
        assert "the same command with --job-id mine goes on" in output
        assert "muster: interrupted; ranks checkpoint and exit" in output
        assert "service" not in output
        assert not terminal.left_running()
        assert not ended.exists()
    code, output = terminal.run(*words, "true")
    assert code == 6
    assert "mine was started with another command and is not finished" in output
    code, output = terminal.run(*words, name)
    assert code == 0, output
    starts = {line for line in output.splitlines() if "] start " in line}
    assert starts == {f"[{rank}] start {len(END_SIGNALS)}" for rank in range(2)}, "shown before"
    assert ended.exists()


def test_an_interrupt_leaves_time_to_save_behind_a_pipe(terminal: Terminal) -> None:
    name = script(
        terminal,
        "import muster, time\n"
        "run = muster.join()\n"
        "print('it waits', flush=True)\n"
        "while not run.should_stop: time.sleep(0.01)\n"
        "for part in range(10):\n"
        "    print('part', part, flush=True)\n"
        "    time.sleep(0.1)\n"
        "print('saved', flush=True)\n",
    )
    run = terminal.start(*RUN, "sh", "-c", f"{sys.executable} {name} | tee copy")
    assert run.stdout is not None
    next(line for line in run.stdout if "it waits" in line)
    for number in (signal.SIGINT, signal.SIGTERM):  # as `timeout`, which signals the group as well
        run.send_signal(number)
    output, _ = run.communicate(timeout=DEADLINE_SECONDS)
    assert run.returncode == 130, output
    assert "[0] saved\n" in output
    assert not terminal.left_running()


def test_a_script_edited_between_two_runs_is_taken_as_it_is(terminal: Terminal) -> None:
    text = "import signal; print('started', flush=True); signal.pause()\n"
    name = script(terminal, text)
    first = terminal.start(*RUN, "--job-id", "mine", name)
    assert first.stdout is not None
    next(line for line in first.stdout if "started" in line)
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=DEADLINE_SECONDS)
    script(terminal, "print('edited')\n")
    code, output = terminal.run(*RUN, "--job-id", "mine", name)
    assert code == 0, output
    assert "edited before this start, which takes it as it is: " in output
    assert "[0] edited" in output


DEAF = (
    "import signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('it is deaf', flush=True)\n"
    "time.sleep(600)\n"
)


@pytest.mark.parametrize(("text", "code"), [("", 0), (DEAF, 130)])
def test_a_second_interrupt_kills_ranks_and_more_print_nothing(
    terminal: Terminal, text: str, code: int
) -> None:
    words = ("run", script(terminal, text))
    with Screen(*words, environment=terminal.environment, directory=terminal.directory) as screen:
        if text:
            screen.see("it is deaf")
            screen.type("\x03")
            screen.see("interrupted; ranks checkpoint and exit")
            time.sleep(ONE_REQUEST_SECONDS)  # a signal before that is of the same request
            screen.type("\x03")
        screen.see("logs: ")
        with suppress(OSError):  # the terminal's other end is closed
            while screen.process.poll() is None:
                screen.type("\x03")
                time.sleep(0.01)
        assert screen.end() == code, screen.written
    assert "Traceback" not in screen.written
    assert not terminal.left_running()


def test_a_killed_run_leaves_nothing_running(terminal: Terminal) -> None:
    run = terminal.start(*RUN, "-n", "2", script(terminal, WAITS))
    assert run.stdout is not None
    next(line for line in run.stdout if "it waits" in line)
    run.kill()
    await_value(lambda: not terminal.left_running(), str)


def test_a_run_with_unread_output_ends_on_request(terminal: Terminal) -> None:
    remarks = terminal.directory / "remarks"
    with remarks.open("w") as stderr, flooding(terminal, stderr) as run:
        run.send_signal(signal.SIGINT)
        assert run.wait(DEADLINE_SECONDS) == 130
    said = remarks.read_text()
    assert "muster: logs: " in said
    assert "the same command with --job-id mine goes on" in said
    assert not terminal.left_running()


def test_a_run_with_all_output_unread_ends_on_request(terminal: Terminal) -> None:
    with flooding(terminal, subprocess.STDOUT) as run:
        run.send_signal(signal.SIGTERM)
        assert run.wait(DEADLINE_SECONDS) == 130
    assert not terminal.left_running()


def test_a_run_with_a_late_reader_loses_no_line(terminal: Terminal) -> None:
    name = script(terminal, "for number in range(200_000): print(number)")
    run = terminal.start(*RUN, name)
    assert run.stdout is not None
    logs = terminal.directory / "data" / "foreground"
    while not any("199999" in log.read_text()[-9:] for log in logs.rglob("rank_00000.*.log")):
        assert run.poll() is None
        time.sleep(0.01)
    output, _ = run.communicate(timeout=DEADLINE_SECONDS)
    assert run.returncode == 0
    shown = [line for line in output.splitlines() if line.startswith("[0] ")]
    assert shown == [f"[0] {number}" for number in range(200_000)]
