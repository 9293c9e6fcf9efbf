"""``muster status``: what runs, where, and whether anything is missing; ``muster open``."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Final
from urllib.parse import urlsplit

import click
import msgspec

from cli.connection import complete_jobs, connected
from cli.errors import ExitCode
from cli.output import Output, facts, notice_if_slow, output_option, show
from cli.services.record import ServiceRecord, address_of, find_own_services, service_settings
from muster.client.errors import Busy, NotAllowed, Unreachable
from muster.client.progress import duration
from muster.contracts.job.status import JobStatus
from muster.contracts.settings.services import LOOPBACK_NAMES
from muster.contracts.views.service import Health, Version

ANSWER_SECONDS: Final = 5.0

_EXIT_CODES: Final = {"ok": ExitCode.OK, "degraded": ExitCode.FAILED, "down": ExitCode.UNREACHABLE}


class Status(msgspec.Struct, kw_only=True):
    """What was found; None for what could not be asked."""

    status: str = "down"
    """ok, degraded or down."""
    url: str
    up: ServiceRecord | None
    """The `muster up` of this data directory; None if others run the services."""
    health: Health | None = None
    version: Version | None = None
    jobs: Mapping[str, int] | None = None
    """Number of jobs by status."""
    refusal: str | None = None
    """Why only the health could be read."""


@click.command()
@output_option
def status(*, output: Output) -> None:
    """Show what runs, and whether it is healthy.

    Services, versions, the data directory, and jobs by status. Exit code 0 if all is
    well, 1 if something is missing, 3 if nothing runs, 4 if the service requires a token
    for more than its health.
    """
    found = _ask(find_own_services())
    data_dir = service_settings().data_dir
    show(output, msgspec.to_builtins(found), facts(_facts(found, data_dir)), [found.url])
    sys.exit(ExitCode.NOT_ALLOWED if found.refusal else _EXIT_CODES[found.status])


@click.command("open")
@click.argument(
    "job",
    required=False,
    shell_complete=complete_jobs,
    help="Id, prefix, name, or @latest. Default: the list of jobs.",
)
def open_page(job: str | None) -> None:
    """Print the address of the web page, and open it.

    A browser is started where there is a display.
    """
    with connected() as client:
        url = f"{client.url}/ui/" + ("" if job is None else f"jobs/{client.job(job).id}")
    click.echo(url)
    if sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY"))):
        webbrowser.open(url)


def _ask(up: ServiceRecord | None) -> Status:
    from muster.client import Client  # noqa: PLC0415  imports httpx

    url, ca_file = address_of(up)
    with (
        Client(url, timeout_seconds=ANSWER_SECONDS, retry_seconds=0, ca_file=ca_file) as client,
        notice_if_slow(f"asking {client.url} …"),
    ):
        found = Status(url=client.url, up=up)
        try:
            found.health = client.health()
            counts = {status.value: client.count(status) for status in JobStatus}
            found.jobs = {status: count for status, count in counts.items() if count}
            found.version = client.version()
        except (Unreachable, Busy):
            pass
        except NotAllowed as error:
            found.refusal = str(error)
    if found.health is not None:
        found.status = found.health.status
    elif up is not None:
        found.status = "degraded"
    return found


def _facts(found: Status, data_dir: Path) -> Iterator[tuple[str, str | None]]:
    yield "status", found.status
    yield "url", found.url if found.health else f"{found.url}, no answer"
    yield "up", _describe_up(found)
    if found.health is None or found.refusal:
        yield "data", str(data_dir) if found.up or found.health is None else None
        yield "note", found.refusal
        return
    checks = found.health.checks
    yield "version", f"{found.health.version}, for {duration(found.health.uptime_seconds)}"
    yield "coordinator", checks.coordinator.detail
    yield "database", checks.database.detail
    yield "disk", checks.disk.detail
    if found.version is None:
        return
    there = found.version.data_dir
    yield "schema", f"{found.version.schema_revision}, {found.version.database}"
    yield "data", there
    yield "checkpoints", found.version.checkpoint_dir
    jobs = [f"{count} {word}" for word, count in (found.jobs or {}).items()]
    yield "jobs", ", ".join(jobs) or "none"
    is_local = urlsplit(found.url).hostname in LOOPBACK_NAMES
    if is_local and there not in {"", str(data_dir)} and not os.environ.get("MUSTER_URL"):
        way = f"export MUSTER_DATA_DIR={quote(there)}"
        yield "note", f"not the data of {data_dir}; for these: {way}"


def _describe_up(found: Status) -> str:
    if found.up is None:
        return (
            "not here: muster up, or muster node at home"
            if found.health is None
            else "not here, or for other data"
        )
    state = "is ending" if found.up.is_ending else "runs"
    log = f", its log {found.up.log}" if found.up.log else ""
    return f"process {found.up.process.pid} {state}{log}"
