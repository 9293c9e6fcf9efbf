"""The table of commands, and how a command ends."""

import inspect
import json
import sys
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner, Result

from cli import main as main_module
from cli.main import ALIASES, COMMANDS, HEADINGS, OTHER_TOOLS, app, main
from muster.client.errors import Unreachable
from muster.contracts.errors import MusterError

LINE = 80


def muster(*words: str) -> Result:
    return CliRunner().invoke(app, words, prog_name="muster")


def leaves(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield name, command
        return
    for below, one in command.commands.items():
        yield from leaves(f"{name} {below}", one)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_is_where_the_table_says(name: str) -> None:
    command = app.get_command(click.Context(app), name)
    assert isinstance(command, click.Command)
    first_line = (command.help or "").splitlines()[0]
    assert first_line == COMMANDS[name].help
    for path, one in leaves(name, command):
        assert (one.help or "").splitlines()[0].endswith("."), path


def test_names_and_aliases_do_not_overlap() -> None:
    assert not OTHER_TOOLS.keys() & (COMMANDS.keys() | ALIASES.keys())
    assert set(OTHER_TOOLS.values()) <= COMMANDS.keys()
    assert len(COMMANDS) == sum(map(len, HEADINGS.values()))
    assert set(ALIASES.values()) <= set(COMMANDS)
    assert not set(ALIASES) & set(COMMANDS)


def test_list_is_another_name_of_ls_in_every_group() -> None:
    commands = [app.get_command(click.Context(app), name) for name in COMMANDS]
    for group in (one for one in commands if isinstance(one, click.Group)):
        assert group.get_command(click.Context(group), "list") is group.commands.get("ls")


def test_help_lists_every_command_on_one_line() -> None:
    lines = CliRunner().invoke(app, ["--help"], terminal_width=LINE).output.splitlines()
    assert all(len(line) < LINE for line in lines)
    for name, entry in COMMANDS.items():
        assert [line for line in lines if line.split()[:1] == [name] and entry.help in line]


@pytest.mark.parametrize("path", [[], ["ps"], ["checkpoint"], ["checkpoint", "ls"]])
def test_short_help_option_is_the_long_one(path: list[str]) -> None:
    short, long = muster(*path, "-h"), muster(*path, "--help")
    assert (short.exit_code, short.output) == (0, long.output)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sumbit"], "Did you mean 'submit'?"),
        (["checkpoint", "veryfy"], "Did you mean 'verify'?"),
        (["ps", "--statsu"], "Did you mean '--status'?"),
        (["ps", "-o", "jsno"], "'jsno' is not one of 'table', 'json', 'yaml', 'name'"),
        (["scale", "a", "0"], "0 is not in the range x>=1"),
        (["rm"], "Missing argument 'JOB...'"),
        (["logs", "a", "--since", "soon"], "'soon' is not a time such as 10m"),
        (["logs", "a", "--since", "1h", "-f"], "--since cannot be used with -f"),
        (["events", "a", "-f", "-o", "json"], "-o cannot be used with -f"),
        (["wait", "a", "--until", "DONE"], "'DONE' is not one of 'terminal', 'queued'"),
        (["submit", "--set", "seed"], "'seed' is not FIELD=VALUE"),
        (["submit", "--set", "seed=["], "'[' is invalid YAML: "),
        (["list"], "No such command 'list'. Try muster ps."),
        (["tail"], "No such command 'tail'. Try muster logs."),
        (["ps", "-a", "-o", "jsno"], "'jsno' is not one of 'table', 'json', 'yaml', 'name'"),
        (["logs", "a", "-n", "x"], "'x' is not a valid integer range"),
        (["submit"], "Missing a script or job file, or a command after --."),
        (["submit", "-n", "4"], "Missing a script or job file, or a command after --."),
        (["submit", "run.sh"], "write -- before it: muster submit -- bash run.sh"),
        (["submit", "--lr", "1", "python"], "To run a command, write -- before it."),
        (["submit", "job.yaml", "train.py"], "To run a command, write -- before it."),
    ],
)
def test_wrong_words_exit_with_2_and_a_hint(words: list[str], message: str) -> None:
    refused = muster(*words)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert message in refused.stderr


def test_version_is_json_on_request() -> None:
    assert set(json.loads(muster("version", "-o", "json").stdout)) == {"version"}


def fail(monkeypatch: pytest.MonkeyPatch, error: BaseException, *options: str) -> object:
    """Return the exit code of a command that raises this error."""

    @click.command()
    def version() -> None:
        raise error

    monkeypatch.setattr(main_module, "version", version)
    monkeypatch.setattr(sys, "argv", ["muster", *options, "version"])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (MusterError("it is so \x1b"), 1, "muster: it is so \\x1b\n"),
        (Unreachable("http://there"), 3, "muster: "),
        (KeyError("x"), 1, "muster: internal error: KeyError: 'x'; see the traceback with: "),
        (NotADirectoryError(20, "Not a directory", "/x/y"), 2, "muster: /x/y: Not a directory\n"),
        (OSError(28, "No space left", "/x"), 1, "muster: /x: No space left\n"),
        (
            FileNotFoundError(2, "Not there"),
            2,
            "muster: Not there: if the current directory was del",
        ),
        (OSError(28, "No space left"), 1, "muster: [Errno 28] No space left\n"),
        (UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogate"), 2, "muster: 'utf-8' codec"),
    ],
)
def test_error_is_one_line_and_an_exit_code(
    error: Exception,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fail(monkeypatch, error) == code
    errors = capsys.readouterr().err
    assert errors.startswith(message)
    assert errors.count("\n") == 1


def test_debug_prints_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fail(monkeypatch, KeyError("x"), "--debug") == 1
    errors = capsys.readouterr().err
    assert errors.startswith("Traceback (most recent call last):\n")
    assert errors.splitlines()[-1].startswith("muster: internal error: KeyError: 'x'; ")


@pytest.mark.parametrize(
    ("end", "code"),
    [(click.exceptions.Exit(7), 7), (KeyboardInterrupt(), 130), (click.Abort(), 130)],
)
def test_end_without_an_error_is_silent(
    end: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fail(monkeypatch, end, "--debug") == code
    assert capsys.readouterr().err == ""


def test_group_help_is_its_docstring() -> None:
    assert inspect.cleandoc(app.help or "") in muster("--help").output
