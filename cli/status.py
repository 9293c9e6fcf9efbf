"""``muster status``: what runs, where, and whether everything is there that should be.

Exit code 0: all is well; 1: something is missing; 3: there is nothing.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import typer

from cli.exit_codes import ExitCode
from cli.heavy import own_settings
from cli.office import Holder, holder_of
from cli.output import Output, OutputOption, show
from muster.client import Client, Unreachable
from muster.client.progress import duration
from muster.client.views import Health, Version
from muster.contracts.job import TERMINAL, JobStatus
from muster.contracts.layout import DataDirectory

_WITH_AGENT: Final = sorted(set(JobStatus) - TERMINAL - {JobStatus.QUEUED})


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. What could not be asked is None."""

    status: str
    """ok, degraded or down."""
    url: str
    up: Holder | None
    """The `muster up` of this data directory; None where somebody else keeps the services."""
    health: Health | None
    version: Version | None
    agents: Mapping[str, int]
    """How many of those that jobs should have are running, stopped, gone or elsewhere."""
    jobs: Mapping[str, int]
    """How many there are, by status."""


def status(output: OutputOption = Output.TABLE) -> None:
    """Show what runs: services, agents, versions, where the data is, and jobs by status.

    Exit code 0 if all is well, 1 if something is missing, 3 if there is nothing.
    """
    found = _look(holder_of(DataDirectory(own_settings().data_dir)))
    show(output, msgspec.to_builtins(found), _lines(found), [found.url])
    code = {"ok": ExitCode.OK, "degraded": ExitCode.FAILED, "down": ExitCode.UNREACHABLE}
    raise typer.Exit(code[found.status])


def _look(up: Holder | None) -> Standing:
    url = up.url if up and not os.environ.get("MUSTER_URL") else None
    with Client(url, retry_seconds=0) as client:
        try:
            health, version = client.health(), client.version()
            agents, jobs = _agents(client), _jobs(client)
        except Unreachable:
            there = "degraded" if up else "down"
            return Standing(
                status=there, url=client.url, up=up, health=None, version=None, agents={}, jobs={}
            )
    is_well = health.status == "ok" and set(agents) <= {"running", "elsewhere"}
    return Standing(
        status="ok" if is_well else "degraded",
        url=client.url,
        up=up,
        health=health,
        version=version,
        agents=agents,
        jobs=jobs,
    )


def _agents(client: Client) -> Mapping[str, int]:
    found = [job.workers().agent for job in client.jobs(_WITH_AGENT)]
    return Counter(state for state in found if state is not None)


def _jobs(client: Client) -> Mapping[str, int]:
    counts = {word: client.count(word) for word in JobStatus}
    return {word.value: count for word, count in counts.items() if count}


def _lines(found: Standing) -> Iterator[str]:
    facts = list(_facts(found))
    width = max(len(name) for name, _ in facts)
    for name, text in facts:
        yield f"{name:<{width}}  {text}"


def _facts(found: Standing) -> Iterator[tuple[str, Any]]:
    yield "status", found.status
    yield "url", found.url if found.health else f"{found.url}, where nobody answers"
    yield "up", _keeper(found)
    if found.health is None or found.version is None:
        return
    checks = found.health.checks
    yield "version", f"{found.health.version}, for {duration(found.health.uptime_seconds)}"
    yield "coordinator", checks.coordinator.detail
    kind = f"{found.version.database}, schema {found.version.schema_revision}"
    yield "database", f"{kind}: {checks.database.detail}"
    yield "data", f"{found.version.data_dir}: {checks.disk.detail}"
    yield "agents", _counted(found.agents)
    yield "jobs", _counted(found.jobs)


def _keeper(found: Standing) -> str:
    if found.up is None:
        return "not here: muster up" if found.health is None else "not here, or not for this data"
    state = "is ending" if found.up.is_ending else "runs"
    log = f", its log {found.up.log}" if found.up.log else ""
    return f"process {found.up.process.pid} {state}{log}"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {word}" for word, count in counts.items()) or "none"
