"""``muster version``."""

from importlib.metadata import version as installed_version

import typer


def version() -> None:
    """Show the version of this installation."""
    typer.echo(f"muster {installed_version('muster-train')}")
