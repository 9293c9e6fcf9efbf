"""``muster mesh``: the secret of a household, who answers, and what stands between machines."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from cli.checks.doctor import Finding, Verdict, finding_lines
from cli.config import origin_of, read_config_file
from cli.errors import ExitCode
from cli.output import Column, Group, Output, columns, output_option, say, show
from cli.services.record import service_settings
from muster.contracts.errors import MusterError
from muster.contracts.settings.paths import DataDir
from muster.host.private import make_private
from muster.mesh.secret import KEY_VARIABLE, keep_secret, make_secret

if TYPE_CHECKING:
    from muster.mesh.group import Mesh

LISTEN_SECONDS: Final = 3.0
"""Processes that start at once have all heard each other after 1.3 s."""

_PROCESSES: Final[Mapping[str, Column]] = {
    "HOST": "host",
    "NODE": "node_id",
    "PROCESS": "process_id",
    "ADDRESS": lambda row: ":".join(map(str, row["address"])),
    "GROUP": "group",
    "SIZE": "size",
}


@click.group(cls=Group, invoke_without_command=True)
@click.option("--for", "seconds", type=click.FloatRange(0), metavar="SECONDS", help="Default: 3.")
@output_option
@click.pass_context
def mesh(ctx: click.Context, *, seconds: float | None, output: Output) -> None:
    """List the processes of this household that answer.

    It listens for 3 seconds, and joins no group. GROUP is what a process waits for, or is a member
    of. See docs/home.md.
    """
    if ctx.invoked_subcommand is not None:
        return
    with _listening(LISTEN_SECONDS if seconds is None else seconds) as own:
        found = sorted(own.network.hellos(), key=lambda one: (one[0].node_id, one[0].process_id))
        warnings = list(own.network.warnings)
    rows: list[dict[str, Any]] = []
    for member, hello in found:
        rows.append(msgspec.to_builtins(member) | {"group": hello.group, "size": hello.size})
    show(output, rows, columns(rows, _PROCESSES), (row["process_id"] for row in rows))
    for warning in warnings:
        say(warning)
    if not rows:
        say("no other process answers: start one there, or see what is wrong: muster mesh doctor")


@mesh.command()
def secret() -> None:
    """Make the secret of this household; it is printed only once."""
    text = make_secret()
    _keep(text)
    click.echo(text)
    say("on each other machine type it after: muster mesh join")


@mesh.command()
def join() -> None:
    """Keep the secret of this household, typed or from standard input."""
    if sys.stdin.isatty():
        text = click.prompt("the secret (it is not shown)", hide_input=True, err=True)
    else:
        text = sys.stdin.buffer.read().decode(errors="replace")
    _keep(text)
    say("to see which other processes answer: muster mesh")


@mesh.command()
@click.argument("names", nargs=-1, metavar="[NAME or ADDRESS]...", help="Default: all announced.")
@output_option
def doctor(*, names: tuple[str, ...], output: Output) -> None:
    """Check what stands between this machine and others.

    A name is that of a host, a node or a process. Exit code 1 if there is a problem.
    """
    with _listening(LISTEN_SECONDS) as own:
        from muster.mesh.doctor import examine  # noqa: PLC0415  needs zeroconf

        checks = asyncio.run(examine(own.network, [*own.announcer.heard.values()], names))
    findings = []
    for about, seen, fix, is_warning in checks:
        bad = Verdict.WARNING if is_warning else Verdict.PROBLEM
        findings.append(Finding(about, bad if fix else Verdict.OK, seen, fix))
    faulty = [one.about for one in findings if one.fix]
    show(output, msgspec.to_builtins(findings), finding_lines(findings), faulty)
    if any(one.verdict is Verdict.PROBLEM for one in findings):
        sys.exit(ExitCode.FAILED)


def _keep(text: str) -> None:
    files = DataDir(service_settings().data_dir)
    make_private(files.root)
    keep_secret(files.cluster_key, text)
    say(f"kept in {files.cluster_key}")
    if origin_of("MUSTER_DATA_DIR", os.environ, read_config_file(os.environ)) == "file":
        say(f"scripts do not read your config.toml: export MUSTER_DATA_DIR={files.root}")
    if os.environ.get(KEY_VARIABLE):
        say(f"{KEY_VARIABLE} is set, and used instead of it")


@contextmanager
def _listening(seconds: float) -> Iterator[Mesh]:
    """Yield a process of the household that has listened for so long."""
    try:
        from muster.mesh.group import Mesh  # noqa: PLC0415  needs zeroconf
    except ModuleNotFoundError as error:
        raise MusterError(str(error)) from error
    with closing(Mesh("default")) as own:
        time.sleep(seconds)
        yield own
