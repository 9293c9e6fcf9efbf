"""The hosts on which ranks may run."""

from collections import Counter
from http import HTTPStatus
from typing import Annotated, get_args

from fastapi import APIRouter, Response

from api.dependencies import ADMIN, READ, State
from api.errors import Problem
from api.schema import SweepBody, body, operation, reply
from api.submission import NEEDED
from database.records import HostRecord
from muster.contracts.agent import AgentState
from muster.contracts.job.engine import SCHEDULERS, Engine, engine_row
from muster.contracts.views.service import (
    EngineList,
    EngineSweep,
    EngineView,
    HostList,
    HostView,
    LinkView,
)

router = APIRouter(tags=["service"])


@router.get("/engines", **operation("What may start agents", READ, EngineList))
def list_engines(state: State) -> Response:
    """Return every engine: whether jobs may use it, and what is missing."""
    jobs, settings = state.jobs.unfinished(), state.submitter.settings
    agents = state.history.agents_by_job([job.job_id for job in jobs])
    cluster, known = state.submitter.cluster, state.hosts.all()
    transports = {node.name: node.transport for node in cluster.nodes}
    states: dict[str, Counter[AgentState]] = {engine: Counter() for engine in get_args(Engine)}
    for job in jobs:
        for agent in agents[job.job_id]:
            engine = job.spec.engine or transports.get(agent.host, "local")
            states[engine][agent.state] += 1
    views = []
    for engine in get_args(Engine):
        said = [known.get(engine_row(engine), HostRecord(host=engine))]
        if engine not in SCHEDULERS:
            said = [host for host in known.values() if transports.get(host.host) == engine]
        problems = [host.problem for host in said if host.problem]
        if engine in NEEDED and engine not in transports.values():
            problems = [f"no other machine is known: {engine} needs {NEEDED[engine]}"]
        if engine not in settings.engines:
            problems = [f"add {engine} to MUSTER_ENGINES of the services"]
        seen = [host.seen_at for host in said if host.seen_at is not None]
        views.append(
            EngineView(
                engine=engine,
                is_allowed=engine in settings.engines,
                problem="; ".join(problems) or None,
                seen_at=max(seen, default=None),
                agents=states[engine],
                hosts=len(said) if engine in NEEDED and said else None,
                hosts_ready=sum(not host.problem and host.seen_at is not None for host in said),
                sweep=said[0].sweep if engine in SCHEDULERS else None,
            )
        )
    return reply(EngineList(engines=views))


@router.post(
    "/engines/{engine}/sweep",
    **operation("Look for leftovers on a scheduler", ADMIN, EngineSweep, 404, status=202),
)
def request_sweep(
    engine: str, state: State, asked: Annotated[SweepBody, body(SweepBody)]
) -> Response:
    """Have the coordinator look for what is there in our name for no job of this service."""
    if engine not in SCHEDULERS.keys() & state.submitter.settings.engines:
        ours = " or ".join(SCHEDULERS)
        detail = f"{engine[:32]!r} cannot be swept: name {ours}, and add it to MUSTER_ENGINES."
        raise Problem(HTTPStatus.NOT_FOUND, "engine-not-found", detail)
    return reply(state.hosts.request_sweep(engine_row(engine), asked.cancel), HTTPStatus.ACCEPTED)


@router.get("/hosts", **operation("The hosts on which ranks may run", READ, HostList))
def list_hosts(state: State) -> Response:
    """Return every host of the cluster file, or this one alone, with what runs there."""
    ids = [job.job_id for job in state.jobs.unfinished()]
    running = {job_id: ranks.running for job_id, ranks in state.history.ranks_on_hosts(ids).items()}
    agents = [agent for rows in state.history.agents_by_job(ids).values() for agent in rows]
    known, members = state.hosts.all(), state.submitter.read_members()
    linked = {node.node_id: node.is_linked for node in members.nodes}
    views = [
        HostView(
            host=state.host_name(node.name),
            address=node.host,
            transport=node.transport,
            slots=node.rank_slots,
            slots_in_use=sum(ranks[node.name] for ranks in running.values()),
            jobs=[job_id for job_id, ranks in running.items() if ranks[node.name]],
            gpu_count=len(node.gpus),
            usable_vram_mb=sum(gpu.usable_vram_mb for gpu in node.gpus),
            agents=Counter(agent.state for agent in agents if agent.host == node.name),
            facts=said.facts,
            seen_at=said.seen_at,
            problem=said.problem,
            shared_dir=said.shared_dir,
            is_linked=linked.get(node.name),
        )
        for node in state.submitter.cluster.nodes
        for said in [known.get(node.name, HostRecord(host=node.name))]
    ]
    links = [
        LinkView(
            hosts=[*map(state.host_name, link.nodes)],
            megabytes_per_second=round(link.bytes_per_second / 1e6, 1),
        )
        for link in members.links
        if {*link.nodes} <= linked.keys()  # else it was measured before one of them went
    ]
    ring = [*map(state.host_name, members.ring)]
    leader = state.host_name(state.node) if members.nodes else None
    return reply(HostList(hosts=views, leader=leader, ring=ring, links=links))
