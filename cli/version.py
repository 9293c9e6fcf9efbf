"""``muster version``."""

from importlib.metadata import version as installed_version

from cli.output import Output, OutputOption, show


def version(output: OutputOption = Output.TABLE) -> None:
    """Show the version of this installation."""
    number = installed_version("muster-train")
    show(output, {"version": number}, [f"muster {number}"], [number])
