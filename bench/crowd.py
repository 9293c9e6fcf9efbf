"""CPU time of a coordinator with thousands of ranks: ``python bench/crowd.py [seconds]``.

A real coordinator over real SQLite takes over 125 jobs of eight ranks on one host each, then 20
jobs on 25 hosts each. This script simulates their agents, each over its own connection: every rank
takes a step and sends a heartbeat once a second, each at a different moment, and every agent sends
heartbeats too. A script stands in for the ssh that watches an agent on another host. What the
connections of other hosts cost beyond that, their encryption, is left out.
"""

import asyncio
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from _services import Services, cpu_seconds

from database.engine import Database
from database.fenced_writer import FencedWriter
from database.history import History
from database.jobs import Jobs, NewJob
from database.leases import Leases
from database.records import AgentRecord, JobChange, JobWrite, RankRecord
from muster.cluster.identity import node_id
from muster.contracts.interpreter import VERSION
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import JobId, JobStatus, JobUid
from muster.contracts.messages.agent import (
    AgentClaim,
    AgentHeartbeat,
    AgentHello,
    AgentMessage,
    RankSaid,
    RankSpawned,
)
from muster.contracts.messages.assignment import CoordinatorAddress
from muster.contracts.messages.attach import REPEAT_SECONDS, AgentRuns, HostReady
from muster.contracts.messages.rank import Heartbeat, Hello, RankMessage
from muster.contracts.messages.wire import encode
from muster.contracts.rank import ProcessRecord, ProcessState, RankProgress
from muster.contracts.settings.paths import DataDir
from muster.contracts.token import sha256_of
from muster.host.processes import identify, this_process
from muster.links.frames import frame
from muster.links.identity import job_identity
from muster.links.session import Caller

CROWDS = (125, 1), (20, 25)
"""Jobs, and hosts of each."""
RANKS = 8
"""Of each agent."""

SECONDS = 30.0
SETTLING_SECONDS = 5.0
BEAT_SECONDS = 1.0
AGENT_NUMBER = 1
TOKEN = "of all agents here"  # noqa: S105  no secret: the installation is temporary

Agent = tuple[JobUid, str, int]
"""A job, a host, and the first of the ranks that the job has there."""


def main(seconds: float) -> None:
    # One process stands for all agents and ranks, so a kill harms no other process.
    stand_in = subprocess.Popen(["/bin/sleep", "86400"])
    process = identify(stand_in.pid)
    if process is None:
        raise RuntimeError("the stand-in process for all agents has already ended")
    try:
        for jobs, hosts in CROWDS:
            show(jobs, hosts, process, seconds)
    finally:
        stand_in.kill()
        stand_in.wait()


def show(count: int, hosts: int, process: ProcessRecord, seconds: float) -> None:
    """Measure so many jobs on so many hosts each, and print the figure."""
    names = [f"host-{number:03}" for number in range(count * hosts)]
    with tempfile.TemporaryDirectory() as directory:
        environ = {} if hosts == 1 else write_cluster(Path(directory), names, process)
        with Services(slots=count * RANKS, environ=environ) as services:
            services.stop_coordinator()
            names = [node_id(DataDir(services.root).node_key)] if hosts == 1 else names
            jobs = write_jobs(services, process, count, hosts, names)
            agents = [
                (uid, names[0] if hosts == 1 else names[number * hosts + place], place * RANKS)
                for number, (_, uid) in enumerate(jobs)
                for place in range(hosts)
            ]
            services.start_coordinator()
            address, pid = wait_for_address(services), services.coordinator.pid
            share = asyncio.run(measure(address, pid, agents, process, seconds))
            check(services, jobs, seconds, len(agents) * RANKS)
            services.stop_coordinator()
    what = f"coordinator with {len(agents) * RANKS} ranks on {len(agents)} agents, % of a core"
    print(f"{what:<62} {100 * share:>10.3f}   <= 50", flush=True)


def write_cluster(directory: Path, names: Sequence[str], process: ProcessRecord) -> dict[str, str]:
    """Describe the hosts, and how to watch their agents; return the variables for services."""
    cluster, ssh = directory / "cluster.yaml", directory / "ssh"
    nodes = (f"{{name: {it}, host: {it}, transport: ssh, slots: {RANKS}}}" for it in names)
    cluster.write_text("nodes:\n" + "".join(f"  - {it}\n" for it in nodes))
    ready, runs = (
        msgspec.json.encode(it).decode()
        for it in (HostReady(version=VERSION), AgentRuns(process=process))
    )
    loop = f"while echo '{runs}'; do sleep {REPEAT_SECONDS}; done"
    ssh.write_text(f"#!/bin/sh\necho '{ready}'\nread order\n{loop}\n")
    ssh.chmod(0o755)
    return {
        "MUSTER_CLUSTER": str(cluster),
        "MUSTER_AGENT_ADDRESS": f"{own_address()}:7433",  # nothing connects there
        "PATH": f"{directory}:{os.environ['PATH']}",
    }


def own_address() -> str:
    """Return an address of this host that is not its loopback; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


def write_jobs(
    services: Services, process: ProcessRecord, count: int, hosts: int, names: Sequence[str]
) -> list[tuple[JobId, JobUid]]:
    """Write the rows of an earlier coordinator; return the jobs."""
    jobs = [(JobId(f"crowd-{n:03}"), JobUid(uuid.uuid4().hex)) for n in range(count)]
    spec = JobSpec(mode="independent", world_size=hosts * RANKS, command=("sleep", "3600"))
    places = [names if hosts == 1 else names[n * hosts : (n + 1) * hosts] for n in range(count)]
    with_rows = [
        JobWrite(
            change=JobChange(
                job_id=job_id,
                uid=uid,
                status=JobStatus.STARTING,
                reason=None,
                message=None,
                started_at=datetime.now(UTC),
                finished_at=None,
                exit_code=None,
            ),
            agents=[
                AgentRecord(
                    host=host,
                    agent_number=AGENT_NUMBER,
                    process=process,
                    token_sha256=sha256_of(TOKEN),
                )
                for host in place
            ],
            ranks=[
                RankRecord(
                    rank=rank,
                    host=place[rank // RANKS],
                    attempt=0,
                    state=ProcessState.LIVE,
                    process=process,
                )
                for rank in range(hosts * RANKS)
            ],
        )
        for (job_id, uid), place in zip(jobs, places, strict=True)
    ]
    database = Database.open(services.database_url)
    try:
        for job_id, uid in jobs:
            Jobs(database).create([NewJob(job_id, uid, spec)])
        leases = Leases(database)
        lease = leases.take("bench", this_process(), "", displacing=None)
        FencedWriter(database, lease).commit(with_rows)
        leases.release(lease)
    finally:
        database.close()
    return jobs


async def measure(
    address: CoordinatorAddress,
    pid: int,
    simulated: Sequence[Agent],
    process: ProcessRecord,
    seconds: float,
) -> float:
    """Simulate all agents for `seconds`; return the coordinator's CPU seconds per second."""
    chance = random.Random(0)  # noqa: S311  repeatable on purpose, no secret
    agents = [
        asyncio.ensure_future(play(address, agent, process, chance.random())) for agent in simulated
    ]
    await wait(agents, SETTLING_SECONDS)
    began, before = time.monotonic(), cpu_seconds(pid, with_children=False)
    await wait(agents, seconds)
    share = (cpu_seconds(pid, with_children=False) - before) / (time.monotonic() - began)
    for agent in agents:
        agent.cancel()
    await asyncio.gather(*agents, return_exceptions=True)
    return share


async def wait(agents: Sequence["asyncio.Future[None]"], seconds: float) -> None:
    """Wait; raises RuntimeError if an agent ends."""
    ended, _ = await asyncio.wait(agents, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for agent in ended:
        raise RuntimeError("the coordinator disconnected an agent") from agent.exception()


def wait_for_address(services: Services) -> CoordinatorAddress:
    """Wait for the coordinator's address and return it."""
    file = DataDir(services.root).coordinator_address
    while not file.exists():
        time.sleep(0.05)
    return msgspec.json.decode(file.read_bytes(), type=CoordinatorAddress)


async def play(
    address: CoordinatorAddress, agent: Agent, process: ProcessRecord, phase: float
) -> None:
    """Simulate an agent whose ranks send heartbeats in turn, until the connection closes."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    claim = AgentClaim(job_uid=agent[0], host=agent[1], agent_number=AGENT_NUMBER)
    session = Caller(job_identity(encode(claim), sha256_of(TOKEN)), is_sealed=False)
    for message in introduction(agent, process):
        session.send(encode(message))
    while not session.is_open:
        writer.write(session.take())
        session.receive(await reader.readexactly(session.frames.missing_bytes))
    writer.write(session.take())
    await asyncio.sleep(phase * BEAT_SECONDS)
    beating = asyncio.ensure_future(beat(writer, agent[2]))
    try:
        while await reader.read(1 << 16):
            pass  # welcome, and what it repeats after joining
    finally:
        beating.cancel()
        writer.close()


async def beat(writer: asyncio.StreamWriter, first: int) -> None:
    loop = asyncio.get_running_loop()
    due = loop.time()
    step = 0
    while True:
        step += 1
        for rank in range(first, first + RANKS):
            writer.write(frame(encode(said(rank, at_step(step)))))
            due += BEAT_SECONDS / RANKS
            await asyncio.sleep(due - loop.time())
        writer.write(frame(encode(AgentHeartbeat(stopped=()))))


def introduction(agent: Agent, process: ProcessRecord) -> list[AgentMessage]:
    uid, host, first = agent
    ranks = range(first, first + RANKS)
    hello = AgentHello(job_uid=uid, host=host, agent_number=AGENT_NUMBER, token=TOKEN)
    spawned = [
        RankSpawned(
            rank=rank,
            attempt=0,
            pid=process.pid,
            start_ticks=process.start_ticks,
            boot_id=process.boot_id,
            node=process.node,
            pid_namespace=process.pid_namespace,
        )
        for rank in ranks
    ]
    return [hello, *spawned, *(said(rank, Hello()) for rank in ranks)]


def said(rank: int, message: RankMessage) -> RankSaid:
    return RankSaid(rank=rank, attempt=0, message=message)


def at_step(step: int) -> Heartbeat:
    return Heartbeat(
        progress=RankProgress(
            step=step,
            total_steps=1_000_000,
            epoch=0,
            shard_idx=step // 100,
            line_idx=16 * step,
            loss=1 / step,
            metrics={"accuracy": 0.5},
            last_checkpoint_step=step // 5 * 5,
            last_checkpoint_bytes=1 << 20,
            last_checkpoint_at=datetime.now(UTC),
        ),
        checkpoints_saved=step // 5,
        stopping=False,
        waiting=False,
    )


def check(
    services: Services, jobs: Sequence[tuple[JobId, JobUid]], seconds: float, ranks: int
) -> None:
    """Check that every heartbeat was recorded and no rank was restarted."""
    database = Database.open(services.database_url)
    try:
        rows = History(database).ranks_by_job([job_id for job_id, _ in jobs])
    finally:
        database.close()
    workers = [worker for of_job in rows.values() for worker in of_job]
    if len(workers) != ranks or any(w.attempt or w.restarts for w in workers):
        raise RuntimeError("a rank was restarted although all ranks sent heartbeats")
    least = min(worker.progress.step for worker in workers)
    if least < seconds / BEAT_SECONDS:
        raise RuntimeError(f"only {least} heartbeats recorded; is the machine overloaded?")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS)
