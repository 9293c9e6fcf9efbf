"""Verbs whose work lies in a module that brings in much: here is only what they take.

So ``muster VERB --help`` answers at once.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from cli.output import Output, OutputOption


def up(
    *,
    detach: Annotated[
        bool,
        typer.Option("--detach", "-d", help="Return once they serve; muster down ends them."),
    ] = False,
) -> None:
    """Run the API and the coordinator here, until Ctrl-C. Either is restarted whenever it dies.

    MUSTER_PORT, MUSTER_HOST and MUSTER_DATA_DIR in the environment choose the port, the
    address and the directory of the data; muster config show has them all.
    """
    from cli.detached import serve_detached  # noqa: PLC0415
    from cli.elsewhere import unlike_here  # noqa: PLC0415
    from cli.household import serve  # noqa: PLC0415
    from cli.own_settings import own_settings  # noqa: PLC0415

    another = unlike_here(os.environ, Path.cwd())
    if another:
        typer.echo(f"muster: {another}", err=True)
    begin = serve_detached if detach else serve
    raise typer.Exit(begin(own_settings(), os.environ))


def down() -> None:
    """End the services that `muster up` keeps for this data directory.

    As with Ctrl-C there: every rank saves and exits, and the jobs go on at the next start.
    """
    from cli.down import end_services  # noqa: PLC0415
    from cli.own_settings import own_settings  # noqa: PLC0415

    end_services(own_settings().data_dir)


def status(output: OutputOption = Output.TABLE) -> None:
    """Show what runs: services, agents, versions, where the data is, and jobs by status.

    Exit code 0 if all is well, 1 if something is missing, 3 if there is nothing,
    4 if the service wants a token for more than its health.
    """
    from cli.own_settings import own_settings  # noqa: PLC0415
    from cli.status import tell  # noqa: PLC0415

    raise typer.Exit(tell(own_settings().data_dir, output))


def validate(output: OutputOption = Output.TABLE) -> None:
    """Check this installation: each thing one line, and what to do where something is wrong.

    Exit code 1 if there is a problem. Nothing is changed, and services need not run.
    """
    from cli.validate import examine  # noqa: PLC0415

    raise typer.Exit(examine(output))


def demo() -> None:
    """Train one model while ranks come, die and go; compare the bits with a run of one rank."""
    from cli.demo import show  # noqa: PLC0415
    from cli.own_settings import own_settings  # noqa: PLC0415

    raise typer.Exit(show(own_settings(), os.environ))
