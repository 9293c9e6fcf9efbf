"""``muster validate``: what of this installation works, and how to mend what does not."""

import os
from collections.abc import Callable, Iterator
from itertools import starmap

import msgspec
import typer

from cli.exit_codes import ExitCode
from cli.findings import Finding, Verdict, lines, mending, problem, well
from cli.machine_checks import machine_checks
from cli.origins import placed
from cli.output import Output, show
from cli.own_settings import own_settings
from cli.place_checks import place_checks
from muster.contracts.environ import DoorSettings
from muster.contracts.errors import InvalidEnvironment, MusterError

USUAL_SLOTS = 1
"""Where the settings cannot be read."""


def examine(output: Output) -> ExitCode:
    """Show what was found, and return what the command is to exit with."""
    found = list(_findings())
    show(output, msgspec.to_builtins(found), lines(found), _wrong(found))
    problems = [finding for finding in found if finding.verdict is Verdict.PROBLEM]
    warnings = [finding for finding in found if finding.verdict is Verdict.WARNING]
    typer.echo(f"{_counted(problems, 'problem')}, {_counted(warnings, 'warning')}", err=True)
    return ExitCode.FAILED if problems else ExitCode.OK


def _findings() -> Iterator[Finding]:
    try:
        settings = own_settings()
        DoorSettings.read(os.environ)
    except InvalidEnvironment as error:
        yield from starmap(_performed, machine_checks(USUAL_SLOTS))
        said = str(placed(error, os.environ))
        yield problem("settings", said, "muster config show --origin lists them all")
        return
    yield from starmap(_performed, machine_checks(settings.slots))
    yield well("settings", "all can be read; see: muster config show")
    yield from starmap(_performed, place_checks(settings, os.environ))


def _performed(about: str, look: Callable[[], Finding]) -> Finding:
    """Return what a look finds; what it meets unprepared is found as well."""
    try:
        return look()
    except (MusterError, OSError) as error:
        return problem(about, str(error), mending(error, "see that this user may do that"))


def _wrong(found: list[Finding]) -> list[str]:
    return [finding.about for finding in found if finding.verdict is not Verdict.OK]


def _counted(findings: list[Finding], word: str) -> str:
    return f"{len(findings)} {word}{'s' * (len(findings) != 1)}"
