"""``muster``: the words a person can say. Each command imports what it needs when it is called."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from cli import dataset, pool
from cli.chaos import chaos
from cli.incarnations import incarnations
from cli.run import run
from muster.contracts.environ import ServiceSettings
from muster.contracts.errors import MusterError

app = typer.Typer(
    name="muster",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(dataset.app, name="dataset")


def _show_version(wanted: bool) -> None:  # noqa: FBT001  Typer's way
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415

        typer.echo(f"muster {version('muster-train')}")
        raise typer.Exit


@app.callback()
def muster(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """A fault-tolerant, elastic runtime for distributed training."""


@app.command()
def up() -> None:
    """Run the API and the coordinator here, until Ctrl-C. Either is restarted whenever it dies."""
    from cli.up import serve  # noqa: PLC0415

    raise typer.Exit(serve(_settings(), os.environ))


@app.command()
def demo() -> None:
    """Train one model while ranks come, die and go; compare the bits with a run of one rank."""
    from cli.demo import show  # noqa: PLC0415

    raise typer.Exit(show(_settings(), os.environ))


@app.command()
def digest(
    job: Annotated[
        Path,
        typer.Argument(help="A job's checkpoints, for example ./checkpoints/my-job", metavar="DIR"),
    ],
) -> None:
    """Verify the newest checkpoint of every rank and print the sha256 of its state.

    Equal digests mean equal bits: weights, optimizer state and position in the data.
    """
    from cli.digest import digests  # noqa: PLC0415

    for whose, step, sha256 in digests(job):
        typer.echo(f"{whose}  step {step}  sha256 {sha256}")


for verb in (pool.scale, pool.pause, pool.resume, pool.workers, pool.audit, incarnations, chaos):
    app.command()(verb)

# What comes after the script is the script's.
app.command(context_settings={"allow_interspersed_args": False})(run)


def _settings() -> ServiceSettings:
    return ServiceSettings.read(os.environ, cores=os.cpu_count() or 1)


def main() -> None:
    """Run a command; an error of ours is a sentence and exit code 1."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except MusterError as error:
        typer.echo(f"muster: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
