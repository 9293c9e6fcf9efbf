"""`muster run`: its command line, and the logs it shows."""

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from textwrap import indent

import click
import pytest
from click.testing import CliRunner

from cli.jobs.run import (
    argv_of_module,
    argv_of_script,
    new_job_id,
    parse_ranks,
    run,
)
from cli.main import app
from cli.services.terminal import CHUNK_BYTES, Terminal
from muster.contracts.job.problems import checked_job_id
from muster.contracts.settings.paths import JobFiles
from muster.contracts.views.history import EventView
from muster.logs.source import LINE_LIMIT_BYTES
from tests.support.logs import JobLogs

CONTEXT = click.Context(run)
PYTHON = sys.executable


def ranks(word: str) -> int:
    return parse_ranks(CONTEXT, run.params[1], word)


def test_script_runs_with_the_python_anything_else_is_a_command(tmp_path: Path) -> None:
    for name in ("train.py", "train.sh"):
        (tmp_path / name).touch()
    words = ["train.py", "--lr", "-n", "3"]
    assert argv_of_script(words, tmp_path, PYTHON) == (PYTHON, *words)
    assert argv_of_script([str(tmp_path / "train.py")], Path("/"), PYTHON)[0] == PYTHON
    assert argv_of_script(["bash", "train.sh"], tmp_path, PYTHON) == ("bash", "train.sh")
    with pytest.raises(click.BadParameter, match=r"there is no train\.py in"):
        argv_of_script(["train.py"], Path("/"), PYTHON)
    with pytest.raises(click.BadParameter, match="nope is not found in PATH"):
        argv_of_script(["nope"], tmp_path, PYTHON)


def test_module_is_one_that_the_python_finds(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    words = ["package.train", "-m", "3"]
    assert argv_of_module(words, tmp_path, PYTHON) == (PYTHON, "-m", *words)
    assert argv_of_module(["json.tool"], tmp_path, PYTHON) == (PYTHON, "-m", "json.tool")
    with pytest.raises(click.BadParameter, match="there is no module nope in"):
        argv_of_module(["nope.train"], tmp_path, PYTHON)


def test_number_of_ranks_may_be_a_word_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks("4") == 4
    monkeypatch.setattr("cli.jobs.run.visible_gpus", lambda _: 2)
    assert (ranks("gpu"), ranks("auto")) == (2, 2)
    monkeypatch.setattr("cli.jobs.run.visible_gpus", lambda _: 0)
    assert ranks("auto") == ranks("cpu") >= 1
    for word in ("gpu", "0", "-1", "many"):
        with pytest.raises(click.BadParameter):
            ranks(word)


def test_torchrun_options_are_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--rdzv_backend=c10d", "--rdzv-endpoint", "localhost:0", "--node_rank", "0"]
    words = [
        "--nproc_per_node",
        "2",
        "--standalone",
        "--gang",
        "--tee",
        "3",
        "nowhere.py",
        "--rank",
        "x",
    ]
    refused = CliRunner().invoke(app, ["run", *options, *words])
    assert "there is no nowhere.py" in refused.output  # so the options were accepted


def test_several_machines_are_refused_and_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MUSTER_DATA_DIR", str(tmp_path / "data"))
    refused = CliRunner().invoke(app, ["run", "--nnodes", "2", "--max_restarts", "0", "true"])
    assert (refused.exit_code, "on this machine only" in refused.output) == (2, True)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ([], 0),
        (["-n", "4"], 2),
        (["-n", "1"], 2),  # as by default
        (["--python", PYTHON], 2),
        (["--gang"], 2),
        (["--standalone"], 2),
        (["--rdzv-id", "x"], 2),
    ],
)
def test_a_job_of_the_environment_takes_no_options(
    monkeypatch: pytest.MonkeyPatch, options: list[str], code: int
) -> None:
    started: list[str] = []
    monkeypatch.setattr("cli.services.foreground.run_job", lambda job_id, _: started.append(job_id))
    monkeypatch.setenv("JOB_ID", "one")
    result = CliRunner().invoke(app, ["run", *options])
    assert (result.exit_code, started) == (code, [] if code else ["one"])
    assert ("give a script, or leave out the options" in result.output) == bool(code)


def test_new_job_id_is_valid_and_unique() -> None:
    first, second = new_job_id(), new_job_id()
    assert checked_job_id(first) == first != second


TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 1, in <module>
    import a
ModuleNotFoundError: No module named 'a'"""


class Logs(JobLogs):
    """The logs of a job, a terminal that shows them, and what that wrote."""

    def __init__(self, root: Path) -> None:
        super().__init__(JobFiles(root))
        self.written: list[str] = []

    def terminal(self) -> Terminal:
        return Terminal(self.files, self.written.append)


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path)


def test_each_line_is_shown_once_with_its_rank(logs: Logs) -> None:
    logs.write(0, "before\n")
    terminal = logs.terminal()
    logs.write(0, "one\ntwo\nunfin")
    logs.write(11, "10%\r20%\r\n\n")
    terminal.show_output()
    terminal.show_output()
    assert logs.written == ["[0] one\n[0] two", "[11] 20%\n[11] "]
    logs.write(0, "ished")
    logs.write(0, "of the next process\n", attempt=1)
    terminal.show_rest()
    terminal.show_rest()
    assert logs.written[2:] == ["[0] unfinished", "[0] of the next process"]


def test_a_traceback_of_several_ranks_is_shown_once(
    logs: Logs, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = logs.terminal()
    for rank in (0, 1):
        logs.write(rank, f"{TRACEBACK}\nbye\n")
    logs.write(2, TRACEBACK.replace("'a'", "'b'"))
    logs.write(3, "Traceback (most recent call last):\n  File")
    terminal.show_rest()
    shown = "\n".join(logs.written).splitlines()
    assert shown[:5] == [f"[0] {line}" for line in (*TRACEBACK.splitlines(), "bye")]
    again = "ModuleNotFoundError: No module named 'a' (as above)"
    assert shown[5:7] == [f"[1] {again}", "[1] bye"]
    assert len(shown) == 5 + 2 + 4 + 2
    end = f"it failed; the last lines of its log:\n{indent(TRACEBACK, '  ')}\n  install it"
    terminal.show_event(EventView(at=datetime.now(UTC), kind="job_failed", message=end))
    assert capsys.readouterr().err.splitlines()[1:] == [f"  {again}", "  install it"]


@pytest.mark.slow
def test_a_flood_is_shown_in_parts_and_long_lines_whole(logs: Logs) -> None:
    terminal = logs.terminal()
    line = "x" * (LINE_LIMIT_BYTES + 1)
    count = 1 + CHUNK_BYTES // len(line)
    logs.write(0, f"{line}\n" * (count + 9))
    terminal.show_output()
    shown = "\n".join(logs.written).splitlines()
    assert count <= len(shown) < count + 9
    assert shown[0] == f"[0] {line}"
    terminal.show_rest()
    assert len("\n".join(logs.written).splitlines()) == count + 9


def test_closed_output_is_reported_once() -> None:
    words = (
        "from cli.services.terminal import print_lines as p; [p('x' * 100_000) for _ in range(3)]"
    )
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-c", words], stdout=writing, stderr=subprocess.PIPE, text=True, check=True
    )
    os.close(writing)
    assert "only in their logs from now on" in ended.stderr
    assert "Broken pipe" in ended.stderr
    assert ended.stderr.count("\n") == 1
