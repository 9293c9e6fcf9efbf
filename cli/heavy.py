"""Verbs whose work lies in a module that brings in much: here is only what they take.

So ``muster VERB --help`` answers at once.
"""

import os
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from muster.contracts.environ import ServiceSettings


def up(
    *,
    detach: Annotated[
        bool,
        typer.Option("--detach", "-d", help="Return once they serve; muster down ends them."),
    ] = False,
) -> None:
    """Run the API and the coordinator here, until Ctrl-C. Either is restarted whenever it dies."""
    from cli.detached import serve_detached  # noqa: PLC0415
    from cli.household import serve  # noqa: PLC0415

    begin = serve_detached if detach else serve
    raise typer.Exit(begin(own_settings(), os.environ))


def demo() -> None:
    """Train one model while ranks come, die and go; compare the bits with a run of one rank."""
    from cli.demo import show  # noqa: PLC0415

    raise typer.Exit(show(own_settings(), os.environ))


def own_settings() -> "ServiceSettings":
    """Return the settings of the services that this environment means."""
    from muster.contracts.environ import ServiceSettings  # noqa: PLC0415

    return ServiceSettings.read(os.environ, cores=os.cpu_count() or 1)
