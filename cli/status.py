"""``muster status``: what runs, where, and whether everything is there that should be."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from cli.elsewhere import of_others
from cli.exit_codes import ExitCode
from cli.office import Holder
from cli.output import Output, show
from cli.own_up import own_up, way_to
from cli.waits import said_if_it_lasts
from muster.client import Busy, Client, NotAllowed, NotFound, Unreachable, Untrusted
from muster.client.progress import duration
from muster.client.views import Health, Version
from muster.contracts.job import OPEN, JobStatus

Value = TypeVar("Value")

ANSWER_SECONDS: Final = 5.0
"""One that stands still is not waited for."""

_CODES: Final = {
    "ok": ExitCode.OK,
    "degraded": ExitCode.FAILED,
    "down": ExitCode.UNREACHABLE,
}
_WITH_AGENT: Final = sorted(OPEN - {JobStatus.QUEUED})


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. What could not be asked is None."""

    status: str
    """ok, degraded or down."""
    url: str
    up: Holder | None
    """The `muster up` of this data directory; None where somebody else keeps the services."""
    health: Health | None
    version: Version | None
    agents: Mapping[str, int] | None
    """How many of those that jobs should have are running, stopped, gone or elsewhere."""
    jobs: Mapping[str, int] | None
    """How many there are, by status."""
    doubt: str | None
    """Why what answers for our own `muster up` is not believed to be it."""
    refusal: str | None
    """Why it tells us no more than its health."""


def tell(data_dir: Path, output: Output) -> ExitCode:
    """Show what runs, and return what the command is to exit with."""
    found = _look(own_up())
    show(output, msgspec.to_builtins(found), _lines(_facts(found, data_dir)), [found.url])
    return ExitCode.NOT_ALLOWED if found.refusal else _CODES[found.status]


def _look(up: Holder | None) -> Standing:
    url, ca_file = way_to(up)
    health = version = agents = jobs = doubt = refusal = None
    with (
        Client(url, timeout_seconds=ANSWER_SECONDS, retry_seconds=0, ca_file=ca_file) as client,
        said_if_it_lasts(f"asking {client.url} …"),
    ):
        try:
            health = _answer(client.health)
        except Untrusted as error:
            if up is None:
                raise
            doubt = str(error)
        try:
            version = _answer(client.version) if health else None
            agents = _answer(lambda: _agents(client)) if version else None
            jobs = _answer(lambda: _jobs(client)) if version else None
        except NotAllowed as error:
            refusal = str(error)
    return Standing(
        status=health.status if health and refusal else _status(up, health, agents),
        url=client.url,
        up=up,
        health=health,
        version=version,
        agents=agents,
        jobs=jobs,
        doubt=doubt,
        refusal=refusal,
    )


def _status(up: Holder | None, health: Health | None, agents: Mapping[str, int] | None) -> str:
    if health is None:
        return "degraded" if up else "down"
    if health.status != "ok" or agents is None or not set(agents) <= {"running", "elsewhere"}:
        return "degraded"
    return "ok"


def _answer(question: Callable[[], Value]) -> Value | None:
    """Return the answer; None where nobody gives one now."""
    try:
        return question()
    except (Unreachable, Busy):
        return None


def _agents(client: Client) -> Mapping[str, int]:
    found = Counter[str]()
    for job in client.jobs(_WITH_AGENT):
        with suppress(NotFound):  # it was deleted in this moment
            found.update(filter(None, [job.workers().agent]))
    return found


def _jobs(client: Client) -> Mapping[str, int]:
    counts = {word: client.count(word) for word in JobStatus}
    return {word.value: count for word, count in counts.items() if count}


def _lines(found: Iterator[tuple[str, Any]]) -> Iterator[str]:
    facts = list(found)
    width = max(len(name) for name, _ in facts)
    for name, text in facts:
        yield f"{name:<{width}}  {text}"


def _facts(found: Standing, data_dir: Path) -> Iterator[tuple[str, Any]]:
    yield "status", found.status
    yield "url", found.url if found.health or found.doubt else f"{found.url}, where nobody answers"
    yield "up", _keeper(found)
    if found.health is None:
        yield "data", data_dir
        if found.doubt:
            yield "note", found.doubt
        return
    if found.refusal:
        yield from [("data", data_dir)] if found.up else []
        yield "note", found.refusal
        return
    checks = found.health.checks
    yield "version", f"{found.health.version}, for {duration(found.health.uptime_seconds)}"
    yield "coordinator", checks.coordinator.detail
    yield "database", checks.database.detail
    yield "disk", checks.disk.detail
    if found.version is None:
        return
    yield "schema", f"{found.version.schema_revision}, {found.version.database}"
    yield "data", found.version.data_dir
    yield "checkpoints", found.version.checkpoint_dir
    yield "agents", _counted(found.agents)
    yield "jobs", _counted(found.jobs)
    if not os.environ.get("MUSTER_URL"):  # else they are meant
        others = of_others(found.url, found.version.data_dir, data_dir)
        yield from [("note", others)] if others else []


def _keeper(found: Standing) -> str:
    if found.up is None:
        return "not here: muster up" if found.health is None else "not here, or not for this data"
    state = "is ending" if found.up.is_ending else "runs"
    log = f", its log {found.up.log}" if found.up.log else ""
    return f"process {found.up.process.pid} {state}{log}"


def _counted(counts: Mapping[str, int] | None) -> str:
    if counts is None:
        return "not known"
    return ", ".join(f"{count} {word}" for word, count in counts.items()) or "none"
