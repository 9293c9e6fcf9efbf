"""``muster status``: what runs, where, and whether anything is missing."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import click
import msgspec

from cli.errors import ExitCode
from cli.output import Output, facts, notice_if_slow, output_option, show
from cli.service_record import ServiceRecord, address_of, find_own_services, service_settings
from muster.client.errors import Busy, NotAllowed, NotFound, Unreachable, Untrusted
from muster.client.progress import duration
from muster.contracts.job import OPEN, JobStatus, Reason
from muster.contracts.settings import LOOPBACK_NAMES
from muster.contracts.views import Health, Version

if TYPE_CHECKING:
    from muster.client import Client

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
    agents: Mapping[str, int] | None = None
    """Number of jobs whose agent is running, stopped, gone, elsewhere or unconnected."""
    jobs: Mapping[str, int] | None = None
    """Number of jobs by status."""
    doubt: str | None = None
    """Why the answer does not prove that it comes from our own `muster up`."""
    refusal: str | None = None
    """Why only the health could be read."""


@click.command()
@output_option
def status(*, output: Output) -> None:
    """Show what runs, and whether it is healthy.

    Services, agents, versions, the data directory, and jobs by status. Exit code 0 if
    all is well, 1 if something is missing, 3 if nothing runs, 4 if the service requires
    a token for more than its health.
    """
    found = _ask(find_own_services())
    data_dir = service_settings().data_dir
    show(output, msgspec.to_builtins(found), facts(_facts(found, data_dir)), [found.url])
    sys.exit(ExitCode.NOT_ALLOWED if found.refusal else _EXIT_CODES[found.status])


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
            found.version = client.version()
            found.agents = _agents(client)
            counts = {status.value: client.count(status) for status in JobStatus}
            found.jobs = {status: count for status, count in counts.items() if count}
        except (Unreachable, Busy):
            pass
        except NotAllowed as error:
            found.refusal = str(error)
        except Untrusted as error:
            if up is None:
                raise
            found.doubt = str(error)
    if found.health is None:
        found.status = "degraded" if up else "down"
    elif found.refusal:
        found.status = found.health.status
    else:
        has_agents = found.agents is not None and set(found.agents) <= {"running", "elsewhere"}
        found.status = "ok" if found.health.status == "ok" and has_agents else "degraded"
    return found


def _agents(client: Client) -> Mapping[str, int]:
    found = Counter[str]()
    for job in client.jobs(sorted(OPEN - {JobStatus.QUEUED})):
        with suppress(NotFound):  # deleted just now
            is_late = (job.status, job.view.reason) == (JobStatus.STARTING, Reason.AGENT_LOST)
            found.update(filter(None, ["unconnected" if is_late else job.workers().agent]))
    return found


def _facts(found: Status, data_dir: Path) -> Iterator[tuple[str, str | None]]:
    has_answered = found.health is not None or found.doubt
    yield "status", found.status
    yield "url", found.url if has_answered else f"{found.url}, no answer"
    yield "up", _describe_up(found)
    if found.health is None or found.refusal:
        yield "data", str(data_dir) if found.up or found.health is None else None
        yield "note", found.doubt or found.refusal
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
    yield "agents", _counts(found.agents)
    yield "jobs", _counts(found.jobs)
    is_local = urlsplit(found.url).hostname in LOOPBACK_NAMES
    if is_local and there not in {"", str(data_dir)} and not os.environ.get("MUSTER_URL"):
        yield (
            "note",
            f"not the data of {data_dir}; for these: export MUSTER_DATA_DIR={quote(there)}",
        )


def _describe_up(found: Status) -> str:
    if found.up is None:
        return "not here: muster up" if found.health is None else "not here, or for other data"
    state = "is ending" if found.up.is_ending else "runs"
    log = f", its log {found.up.log}" if found.up.log else ""
    return f"process {found.up.process.pid} {state}{log}"


def _counts(counts: Mapping[str, int] | None) -> str:
    if counts is None:
        return "unknown"
    return ", ".join(f"{count} {word}" for word, count in counts.items()) or "none"
