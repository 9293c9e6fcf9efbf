"""``muster node``: this machine as a member of its household."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

import click
import msgspec

from cli.output import Group, say
from cli.services.record import (
    ServiceRecord,
    read_record,
    service_lock,
    service_settings,
    write_record,
)
from cli.services.signals import interrupt_at_signals
from cli.services.up import end_detached
from muster.cluster.identity import node_id
from muster.cluster.members import read_members
from muster.contracts.errors import MusterError
from muster.contracts.settings.paths import DataDir
from muster.contracts.settings.services import (
    DEFAULT_HOST,
    TLS_CERTFILE,
    ServiceSettings,
    local_url,
)
from muster.host.extras import require_server
from muster.host.processes import module_command, this_process
from muster.mesh.secret import KEY_VARIABLE

if TYPE_CHECKING:
    from muster.mesh.founding import EarlierJobs
    from muster.mesh.group import Mesh
    from muster.mesh.node import Status

LISTEN_SECONDS: Final = 3.0
"""Processes that start at once have all heard each other after 1.3 s."""

LEADER_SECONDS: Final = 10.0
"""For the link to a node of another machine, and its answer."""

POLL_SECONDS: Final = 0.05


@click.group(cls=Group, invoke_without_command=True)
@click.option("--found", is_flag=True, help="Found the cluster here, if no machine has yet.")
@click.pass_context
def node(ctx: click.Context, *, found: bool) -> None:
    """Make this machine a node of its household, until Ctrl-C.

    The nodes find each other and elect a master, which runs the jobs of all of them. muster submit
    works on each node. `muster mesh` shows what they know. See docs/home.md.
    """
    if ctx.invoked_subcommand is not None:
        return
    require_server("node")
    settings = service_settings()
    files = DataDir(settings.data_dir)
    interrupt_at_signals()
    advice = "end it first, with muster down, or set MUSTER_DATA_DIR for another one"
    with suppress(KeyboardInterrupt), service_lock(files, advice), joining() as own:
        if found:
            files.founder_mark.touch(mode=0o600)
        asyncio.run(_serve(own, settings, files))
    say("down")


async def _serve(own: Mesh, settings: ServiceSettings, files: DataDir) -> None:
    from cli.services.copies import RowCopy  # noqa: PLC0415  as `Mesh`
    from cli.services.node_services import (  # noqa: PLC0415  as `Mesh`
        NodeServices,
        drain,
        hand_over,
        has_successor,
        node_environment,
        take_part,
    )
    from muster.mesh.founding import Founding  # noqa: PLC0415

    network = own.network
    url = local_url({**os.environ, "MUSTER_HOST": DEFAULT_HOST, TLS_CERTFILE: ""})
    listening = _listen(settings.port)
    founding = Founding(
        files.cluster_record,
        has_mark=files.founder_mark.exists(),
        has_secret_file=not os.environ.get(KEY_VARIABLE),
        earlier=_earlier_jobs(files),
    )
    own_files = files if settings.database_url is None else None  # a server needs no copies
    services = NodeServices(node_environment(os.environ, files), url, files=own_files)
    part = take_part(network, files, founding, services, listening, settings.slots)
    copy = RowCopy(network, part, files.database, services)
    copying = asyncio.create_task(copy.run() if own_files else asyncio.sleep(0))
    write_record(files, ServiceRecord(url=url, process=this_process(), node_port=network.port))
    name = f"{network.hello.host} is node {network.node_id}"
    say(f"{name}; see the others with muster mesh, end it with Ctrl-C")
    await services.run(lambda: not network.is_alive or bool(own_files and copying.done()))
    if own_files and copying.done():
        copying.result()  # raises: a node without a copy would be counted as one that has it
    if network.is_alive and part.cluster and (not part.leads or has_successor(network)):
        await drain(network, files)
        if part.leads:
            await hand_over(network, part, services, files)
    await services.end()
    await copy.end(copying)
    if network.is_alive and part.master not in (None, network.node_id):
        files.nodes.unlink(missing_ok=True)  # it says goodbye now, and has to come back
    if part.leads:
        say("unfinished jobs of the cluster go on at the next: muster node")
    if not network.is_alive:
        raise MusterError("this node has ended by a fault, see above: start it again")


def _listen(port: int) -> socket.socket:
    """Return a socket for the people of this machine."""
    from muster.links.serving import listen  # noqa: PLC0415

    try:
        return listen(DEFAULT_HOST, port)
    except OSError as error:
        raise MusterError(
            f"port {port} is taken: stop what listens there, or choose another with MUSTER_PORT"
        ) from error


@node.command()
def leave() -> None:
    """Have this machine leave its cluster: its ranks save, and the node ends.

    Its jobs go on elsewhere, and another machine leads. The last one leaves with the jobs.
    """
    files = DataDir(service_settings().data_dir)
    record = read_record(files)
    if record is not None and record.node_port is not None:  # else it is a `muster up`
        say("the node of this machine ends …")
        end_detached(record)
    own = files.node_key.exists() and node_id(files.node_key)
    members = read_members(files.nodes)  # none once it has said goodbye
    others = [each.name for each in (members.nodes if members else ()) if each.node_id != own]
    if others:
        raise MusterError(
            f"no other machine has all jobs of the cluster now, or none leads: start muster node "
            f"here and on {', '.join(others)}, or type muster node forget NAME for one that is "
            "gone; then again"
        )
    for file in (files.cluster_record, files.founder_mark, files.nodes):
        file.unlink(missing_ok=True)
    say("this machine belongs to no cluster now; its secret and its jobs stay")


@node.command()
@click.argument("name", metavar="NAME")
def forget(*, name: str) -> None:
    """Forget a machine that has gone for good; NAME is that of its host, or its node id."""
    from muster.mesh.roster import FORGET  # noqa: PLC0415  as `Mesh`

    if answer := ask_leader(FORGET, name.encode()):
        raise MusterError(f"{name} stays a member: {answer.decode()}")
    say(f"{name} is forgotten; it belongs to the cluster again when its node is started")


def _earlier_jobs(files: DataDir) -> EarlierJobs | None:
    """Return what a database holds from before this machine belonged to a cluster."""
    from muster.mesh.founding import EarlierJobs  # noqa: PLC0415  as `Mesh`

    if files.cluster_record.exists() or not files.database.exists():
        return None
    command = module_command("api", "--count")
    counted = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if counted.returncode:
        raise MusterError(f"{files.database} cannot be read, see above")
    unfinished, jobs = msgspec.json.decode(counted.stdout, type=tuple[int, int])
    return EarlierJobs(files.database, unfinished, jobs)


@contextmanager
def joining(environ: Mapping[str, str] = os.environ) -> Iterator[Mesh]:
    """Yield a process of the household."""
    try:
        from muster.mesh.group import Mesh  # noqa: PLC0415  needs zeroconf
    except ModuleNotFoundError as error:
        raise MusterError(str(error)) from error
    with closing(Mesh("default", environ)) as own:
        yield own


def ask_node(own: Mesh, seconds: float) -> Status | None:
    """Return what a node knows, first that of this machine; None if none answers in time."""
    from muster.mesh.node import STATUS, Status  # noqa: PLC0415  as `Mesh`

    record = read_record(DataDir(service_settings().data_dir))
    port = record.node_port if record else None
    if port is not None:
        own.network.find((DEFAULT_HOST, port))
    until = time.monotonic() + seconds
    while True:
        nodes = [each.node_id for each, hello in own.network.hellos() if hello.machine is not None]
        left_seconds = until - time.monotonic()
        # That of this machine may be linked a little later than others.
        is_late = port is None or left_seconds <= 0
        asked = [own.network.node_id] if own.network.node_id in nodes else nodes * is_late
        for each in asked:
            if answer := ask(own, each, STATUS, b"", max(left_seconds, POLL_SECONDS)):
                return msgspec.json.decode(answer, type=Status)
        if left_seconds <= 0:
            return None
        time.sleep(POLL_SECONDS)


def ask_leader(topic: str, payload: bytes) -> bytes:
    """Return what the node that leads answers to a note. Raises `MusterError` if none does."""
    with joining() as own:
        status = ask_node(own, LISTEN_SECONDS)
        if status is None or status.master is None:
            raise MusterError("no node leads here: see muster mesh")
        answer = ask(own, status.master, topic, payload, LEADER_SECONDS)
    if answer is None:
        raise MusterError("the node that leads does not answer: see muster mesh")
    return answer


def ask(own: Mesh, node: str, topic: str, payload: bytes, seconds: float) -> bytes | None:
    """Return what a node answers to a note; None if it is not linked or silent until then."""
    answers: SimpleQueue[bytes] = SimpleQueue()
    own.network.readers[topic] = lambda _, answer: answers.put(answer)
    until = time.monotonic() + seconds
    while (left_seconds := until - time.monotonic()) > 0:
        for each, hello in own.network.hellos():
            if each.node_id == node and hello.machine is not None:
                own.network.send_note(each.process_id, topic, payload)
                with suppress(Empty):
                    return answers.get(timeout=left_seconds)
        time.sleep(POLL_SECONDS)  # a node of another machine is linked later than our own
    return None
