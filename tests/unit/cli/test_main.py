"""How an error ends a command: a sentence, an exit code, and where it came from on demand."""

import sys

import pytest
import typer

import cli.version
from cli.__main__ import main
from muster.client.errors import Unreachable
from muster.contracts.errors import MusterError


def ended(monkeypatch: pytest.MonkeyPatch, error: BaseException, *options: str) -> object:
    """Return the exit code of a command that this error ends."""

    def version() -> None:
        raise error

    monkeypatch.setattr(cli.version, "version", version)
    monkeypatch.setattr(sys, "argv", ["muster", *options, "version"])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (MusterError("it is so"), 1, "muster: it is so\n"),
        (Unreachable("http://there"), 3, "muster: nobody answers at http://there: "),
        (KeyError("x"), 1, "muster: an error of its own, KeyError: 'x'; "),
        (OSError(20, "Not a directory", "/dev/null/x"), 2, "muster: '/dev/null/x' cannot be used:"),
        (OSError(28, "No space left on device", "/x"), 1, "muster: '/x' cannot be used: No space"),
        (OSError(28, "No space left on device"), 1, "muster: what this writes or reads cannot be:"),
        (OSError(2, "No such file or directory"), 2, "muster: the working directory is no more"),
        (UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogate"), 2, "muster: this is no text in"),
    ],
)
def test_an_error_is_a_sentence_and_a_code(
    error: Exception,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ended(monkeypatch, error) == code
    errors = capsys.readouterr().err
    assert errors.startswith(said)
    assert errors.count("\n") == 1


def test_where_an_error_came_from_is_shown_to_whoever_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, KeyError("x"), "--debug") == 1
    errors = capsys.readouterr().err
    assert errors.startswith("Traceback (most recent call last):\n")
    assert errors.splitlines()[-1].startswith("muster: an error of its own, KeyError: 'x'; ")


@pytest.mark.parametrize("end", [typer.Exit(7), KeyboardInterrupt()])
def test_an_end_that_is_no_error_has_its_code_and_no_traceback(
    end: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = 7 if isinstance(end, typer.Exit) else 130
    assert ended(monkeypatch, end, "--debug") == code
    assert capsys.readouterr().err == ""
