"""``muster cluster`` and ``muster plan``: the cluster file, and where ranks would go."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from cli.connection import connected
from cli.errors import ExitCode, WrongState
from cli.jobs.submit import JobDescription, read_job_file, refuse
from cli.output import (
    Cell,
    Group,
    Output,
    ShellPath,
    notice_if_slow,
    output_option,
    plural,
    say,
    show,
    table,
)
from cli.services.record import find_own_services
from muster.client.progress import duration
from muster.cluster.description import Cluster
from muster.cluster.placement import Placement, RankRequest, place
from muster.cluster.reading import read_cluster
from muster.cluster.speed import GpuCost, is_gpu_worth
from muster.contracts.agent import AgentState
from muster.contracts.errors import MusterError
from muster.contracts.job.engine import SCHEDULERS
from muster.contracts.job.problems import checked, field_errors
from muster.contracts.job.spec import JobRequest, JobSpec
from muster.contracts.settings.services import CLUSTER
from muster.contracts.views.service import EngineSweep, EngineView, HostView

if TYPE_CHECKING:
    from muster import Client

SWEEP_SECONDS: Final = 120.0  # a scheduler has half of that to answer
POLL_SECONDS: Final = 0.2
UNKNOWN_UID: Final = "unknown: no job here has this uid; it may be of another installation"

_file = ShellPath(path_type=Path)


@click.group(cls=Group)
def cluster() -> None:
    """Check a cluster file."""


@cluster.command()
@click.argument("file", type=_file, metavar="FILE", help="A cluster file; see docs/cluster.md.")
@output_option
def check(*, file: Path, output: Output) -> None:
    """Check a cluster file and show its nodes.

    While `muster up` runs, the lines that `muster hosts` has below its table follow.

    Exit code 2 if it is refused; the sentence names the line and says what to write instead.
    """
    found, problems = read_cluster(file), list[str]()
    names = {node.name for node in found.nodes}
    if find_own_services() is not None:
        with suppress(MusterError), connected() as client:  # the file can be checked without them
            problems = [*_problems(host for host in client.hosts().hosts if host.host in names)]
    body = msgspec.to_builtins(found) | {"capacity": found.capacity}
    lines = [*str(found).splitlines(), *problems]
    show(output, body | {"problems": problems}, lines, (node.name for node in found.nodes))


@click.group(cls=Group, invoke_without_command=True)
@output_option
@click.pass_context
def engines(ctx: click.Context, *, output: Output) -> None:
    """Show what may start ranks, and what is missing.

    A job names one with --engine; MUSTER_ENGINES of the services says which it may.
    """
    if ctx.invoked_subcommand is not None:
        return
    with connected() as client:
        found = client.engines()
    rows = [
        (engine.engine, _readiness(engine), _ago(engine.seen_at), _counts(engine.agents))
        for engine in found.engines
    ]
    problems = [f"{engine.engine}: {engine.problem}" for engine in found.engines if engine.problem]
    for engine in found.engines:
        if engine.sweep is not None and engine.sweep.leftovers:
            count = plural(len(engine.sweep.leftovers), "job")
            problems.append(f"{engine.engine} has {count} of no job here: muster engines sweep")
    body, names = msgspec.to_builtins(found), (engine.engine for engine in found.engines)
    show(output, body, [*table(("ENGINE", "READY", "SEEN", "AGENTS"), rows), *problems], names)


def _ago(seen_at: datetime | None) -> str | None:
    return f"{duration((datetime.now(UTC) - seen_at).total_seconds())} ago" if seen_at else None


def _counts(agents: Mapping[AgentState, int]) -> str | None:
    return ", ".join(f"{count} {state}" for state, count in agents.items()) or None


def _shares(host: HostView) -> str | None:
    is_known = host.facts is not None and host.transport != "local"
    return None if not is_known else "yes" if host.shared_dir else "no"


_HOST_CELLS: Final[Mapping[str, Callable[[HostView], Cell]]] = {
    "HOST": lambda host: host.host,
    "ADDRESS": lambda host: host.address,
    "SLOTS": lambda host: f"{host.slots_in_use}/{host.slots or 'auto'}",
    "GPUS": lambda host: host.gpu_count,
    "MUSTER": lambda host: host.facts.version if host.facts else None,
    "PROCESSOR": lambda host: host.facts.processor if host.facts else None,
    "SEEN": lambda host: "now" if host.is_linked else _ago(host.seen_at) or "never",
    "SHARES": _shares,
    "AGENTS": lambda host: _counts(host.agents),
    "JOBS": lambda host: ", ".join(host.jobs) or None,
}


def _readiness(engine: EngineView) -> str:
    if engine.hosts is not None and engine.is_allowed:
        return f"{engine.hosts_ready} of {plural(engine.hosts, 'host')}"
    return "no" if engine.problem else "yes"


@engines.command()
@click.argument(
    "engine",
    type=click.Choice([*SCHEDULERS]),
    required=False,
    metavar="[ENGINE]",
    help=f"{' or '.join(SCHEDULERS)}. Default: those of MUSTER_ENGINES.",
)
@click.option("-y", "--yes", is_flag=True, help="Cancel what is listed without a question.")
@output_option
def sweep(*, engine: str | None, yes: bool, output: Output) -> None:
    """List what a scheduler runs in Muster's name for no job here, and cancel it.

    A crash or a deleted database left it, or it belongs to another installation of the same
    user: then leave it. At a terminal you are asked first. Exit code 1 if a scheduler does not
    answer, or did not cancel all.
    """
    with connected() as client:
        known = [view.engine for view in client.engines().engines if view.is_allowed]
        asked = [engine] if engine else [name for name in known if name in SCHEDULERS]
        if not asked:
            raise WrongState("the services use no scheduler: add one to their MUSTER_ENGINES")
        listed = {name: _sweep(client, name) for name in asked}
        found = [(name, job) for name, of in listed.items() for job in of.leftovers]
        rows = [(name, job.name, job.job_id or "unknown", job.state) for name, job in found]
        lines = [*table(("ENGINE", "NAME", "JOB", "STATE"), rows)]
        lines += [UNKNOWN_UID] * any(job.job_id is None for _, job in found)
        lines = lines if found else [f"nothing is left on {' and '.join(asked)}"]
        show(output, msgspec.to_builtins(listed), lines, (job.name for _, job in found))
        is_asked = not yes and output is Output.TABLE and sys.stdin.isatty()
        if not found or not (yes or (is_asked and click.confirm("Cancel them?", err=True))):
            return
        for name, of in listed.items():
            names = {job.name for job in of.leftovers}
            after = _sweep(client, name, names).leftovers if names else []
            if left := names.intersection(job.name for job in after):
                raise MusterError(f"{name} did not cancel {', '.join(sorted(left))}: try again")
    say(f"cancelled: {plural(len(found), 'job')}")


def _sweep(client: Client, engine: str, cancel: Collection[str] = ()) -> EngineSweep:
    """Return what the coordinator finds on a scheduler now, without what it has cancelled."""
    path, body = f"/engines/{engine}/sweep", {"cancel": list(cancel)}
    number = client.connection.ask("POST", path, body=body).read_as(EngineSweep).number
    until = time.monotonic() + SWEEP_SECONDS
    with notice_if_slow(f"waiting for the answer of {engine} …"):
        while time.monotonic() < until:
            (seen,) = (view for view in client.engines().engines if view.engine == engine)
            if seen.sweep is not None and seen.sweep.number >= number:
                if seen.problem is not None:
                    raise MusterError(f"{engine} does not answer: {seen.problem}")
                return seen.sweep
            time.sleep(POLL_SECONDS)
    raise MusterError(f"{engine} was not asked for {SWEEP_SECONDS:g} s: see muster status")


@click.command()
@output_option
def hosts(*, output: Output) -> None:
    """Show the hosts on which ranks may run, and what runs there."""
    with connected() as client:
        found = client.hosts()
    rows = [[cell(host) for cell in _HOST_CELLS.values()] for host in found.hosts]
    names, problems = (host.host for host in found.hosts), _problems(found.hosts)
    show(output, msgspec.to_builtins(found), [*table([*_HOST_CELLS], rows), *problems], names)


def _problems(found: Iterable[HostView]) -> Iterator[str]:
    """Yield why hosts cannot be used, and what a person should correct there."""
    for host in found:
        if host.problem:
            is_named = host.problem.startswith(f"{host.host} ")
            yield host.problem if is_named else f"{host.host}: {host.problem}"
        elif host.is_linked is False:
            yield f"{host.host} is not linked: is it on? See muster mesh"
        if host.facts is not None:
            yield from (f"{host.host}: {warning}" for warning in host.facts.warnings())


@click.command()
@click.argument("file", type=_file, metavar="FILE", help="A job in YAML or JSON.")
@click.option(
    "--cluster",
    "description",
    type=_file,
    envvar=CLUSTER,
    required=True,
    help="The cluster file. Default: MUSTER_CLUSTER.",
)
@click.option("--transfer-mb", type=click.FloatRange(0), help="MB a step moves to the GPU.")
@click.option("--compute-mflop", type=click.FloatRange(0), help="MFLOP a step computes.")
@output_option
def plan(
    *,
    file: Path,
    description: Path,
    transfer_mb: float | None,
    compute_mflop: float | None,
    output: Output,
) -> None:
    """Show on which nodes the ranks of a job would run.

    Nothing is started, and every node counts as free. With the MB and MFLOP of a step it says
    whether a GPU is worth it. Exit code 1 if a rank does not fit.
    """
    if (transfer_mb is None) != (compute_mflop is None):
        raise click.UsageError("Give both of --transfer-mb and --compute-mflop, or none.")
    machines = read_cluster(description)
    request = RankRequest(*_job(file, machines))
    placements = place(machines, [request] * request.spec.world_size)
    body: dict[str, Any] = {"ranks": msgspec.to_builtins(placements)}
    lines = list(_lines(placements))
    if transfer_mb is not None and compute_mflop is not None:
        cost = GpuCost()
        body["is_gpu_worth"] = is_worth = is_gpu_worth(transfer_mb, compute_mflop, cost)
        computing = f"{compute_mflop * cost.compute_us_per_mflop:g} us of computing"
        transfer = f"{cost.min_ratio:g} x {transfer_mb * cost.transfer_us_per_mb:g} us of transfer"
        verdict = f"yes, {computing} > {transfer}" if is_worth else f"no, {computing} <= {transfer}"
        lines.append(f"worth a GPU: {verdict}")
    show(output, body, lines, (one.chosen.node for one in placements if one.chosen))
    if not all(one.chosen for one in placements):
        sys.exit(ExitCode.FAILED)


def _job(file: Path, machines: Cluster) -> tuple[str, JobSpec]:
    """Return the id and the description of the job in a file, or print what is wrong and exit."""
    described = JobDescription(file=read_job_file(file), typed={}, mappings={})
    body = described.body(Path.cwd())
    if errors := list(field_errors(body, JobRequest)):
        refuse(described.error_lines(errors))
    request = msgspec.convert(body, JobRequest)
    spec = checked(request.spec())
    for name in spec.hosts or ():
        machines.node(name)
    return request.job_id or file.stem, spec


def _lines(placements: list[Placement]) -> Iterator[str]:
    for rank, placement in enumerate(placements):
        chosen = placement.chosen
        gpus = f" ({', '.join(chosen.gpus)})" if chosen and chosen.gpus else ""
        yield f"rank {rank}: {chosen.node}{gpus}" if chosen else f"rank {rank}: does not fit"
        width = max(len(verdict.node) for verdict in placement.verdicts)
        for verdict in placement.verdicts:
            score = "no" if verdict.score is None else f"{verdict.score:.4g}"
            yield f"  {verdict.node:<{width}}  {score:<8}  {verdict.reason}"
