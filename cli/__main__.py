"""``muster``: from the words that a person says to a verb, and from an error to an exit code."""

import os
import shlex
import sys
from typing import Annotated, NoReturn

import typer

from cli import completion, streams
from cli.vocabulary import Vocabulary
from muster.contracts.errors import MusterError
from muster.contracts.printable import spelt_out
from muster.remarks import finish, remark

app = typer.Typer(
    name="muster",
    cls=Vocabulary,
    no_args_is_help=True,
    epilog="To begin with: muster up -d, then muster submit -n 2 -- python train.py",
    add_completion=False,
    pretty_exceptions_enable=False,
    # Rich takes longer to import than everything else that help needs.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _show_version(wanted: bool) -> None:  # noqa: FBT001  Typer's way
    if wanted:
        from cli.version import version  # noqa: PLC0415  --help

        version()
        raise typer.Exit


@app.callback()
def muster(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Before VERB: show where an error came from.")
    ] = False,
) -> None:
    """A fault-tolerant, elastic runtime for distributed training."""


def main() -> None:
    """Run a command; an error is a sentence and an exit code."""
    streams.stand_in_for_closed()
    streams.spell_out_unknown()
    # httpx has a command line of its own, of click and Rich, and goes without if it is not there.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
    completion.prepare(os.environ)
    try:
        app()
    except KeyboardInterrupt:
        from cli.exit_codes import ExitCode  # noqa: PLC0415  --help

        sys.exit(ExitCode.INTERRUPTED)
    except MusterError as error:
        _end(error)
    except Exception as error:  # noqa: BLE001  a bug of ours is a sentence as well
        from cli.plain_errors import as_sentence  # noqa: PLC0415  --help

        if plain := as_sentence(error):
            _end(plain)
        again = shlex.join(["muster", "--debug", *sys.argv[1:]])
        remark(
            f"muster: an error of its own, {type(error).__name__}: {error}; see where with: {again}"
        )
        sys.exit(1)


def _end(error: MusterError) -> NoReturn:
    """Say it and exit. What is not written yet is lost if the disk is full, and the code is not."""
    from cli.exit_codes import code_of_error  # noqa: PLC0415  --help

    remark(spelt_out(f"muster: {error}"))
    finish()
    sys.exit(code_of_error(error))


if __name__ == "__main__":
    main()
