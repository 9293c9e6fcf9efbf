"""``muster secret``: keep what jobs refer to as ``file:NAME``, on the machine of the service.

It needs no service: whoever may write to the data directory may keep secrets there. No command
shows one again.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.misuse import Misuse
from cli.output import Output, OutputOption, show

if TYPE_CHECKING:
    from muster.safe import Safe

app = typer.Typer(
    help="Secrets, which jobs refer to and nobody sees. They are files of the data directory.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(help="What jobs call it: file:NAME.", metavar="NAME")]


@app.command("set")
def keep(name: Name) -> None:
    """Keep a secret, typed or from standard input.

    For example: muster secret set hf-token < token.txt
    """
    text = _typed(name) if sys.stdin.isatty() else _read()
    safe = _safe()
    with _said_plainly():
        safe.put(name, text)
    typer.echo(f"kept in {safe.directory}; in a job: --secret VARIABLE=file:{name}", err=True)
    _tell_of_others()


@app.command("ls")
def show_names(output: OutputOption = Output.TABLE) -> None:
    """Show the names of all secrets."""
    safe = _safe()
    names = safe.names()
    show(output, names, names, names)
    typer.echo(f"these are in {safe.directory}", err=True)
    _tell_of_others()


@app.command("rm")
def remove(name: Name) -> None:
    """Remove a secret.

    Ranks that run have it; one that starts again does not, and ends its job.
    """
    with _said_plainly():
        _safe().remove(name)
    typer.echo(f"{name} is kept no longer", err=True)


@contextmanager
def _said_plainly() -> Iterator[None]:
    """What is no secret, or no name of one, are words that have to be others."""
    from muster.safe import InvalidSecret  # noqa: PLC0415  --help

    try:
        yield
    except InvalidSecret as error:
        raise Misuse(str(error)) from error


def _safe() -> "Safe":
    from muster.contracts.layout import DataDirectory  # noqa: PLC0415  --help
    from muster.safe import Safe  # noqa: PLC0415  --help

    return Safe(DataDirectory(_data_dir()).secrets)


def _tell_of_others() -> None:
    """Warn whoever may have meant the services that answer, and has named no or other data."""
    from cli.elsewhere import others_than  # noqa: PLC0415  --help

    others = others_than(_data_dir())
    if others:
        typer.echo(f"note: {others}", err=True)


def _data_dir() -> Path:
    from cli.own_settings import own_settings  # noqa: PLC0415  --help

    return own_settings().data_dir


def _typed(name: str) -> str:
    question = f"value of {name} (it is not shown)"
    return str(
        typer.prompt(question, hide_input=True, confirmation_prompt="the same again", err=True)
    )


def _read() -> str:
    """Return standard input, as it is: `Safe` says what of it is no secret."""
    return sys.stdin.buffer.read().decode(errors="surrogateescape")
