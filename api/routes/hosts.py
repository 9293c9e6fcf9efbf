"""The hosts on which ranks may run."""

from collections import Counter

from fastapi import APIRouter, Response

from api.dependencies import READ, State
from api.schema import operation, reply
from database.records import HostRecord
from muster.cluster.description import one_host
from muster.contracts.views import HostList, HostView

router = APIRouter(tags=["service"])


@router.get("/hosts", **operation("The hosts on which ranks may run", READ, HostList))
def list_hosts(state: State) -> Response:
    """Return every host of the cluster, or this one alone, with what runs there."""
    ids = [job.job_id for job in state.jobs.unfinished()]
    running = {it: ranks.running for it, ranks in state.history.ranks_on_hosts(ids).items()}
    agents = [it for rows in state.history.agents_by_job(ids).values() for it in rows]
    cluster = state.submitter.cluster or one_host(state.submitter.settings.slots)
    known = state.hosts.all()
    views = [
        HostView(
            host=node.name,
            address=node.host,
            transport=node.transport,
            slots=node.rank_slots,
            slots_in_use=sum(ranks[node.name] for ranks in running.values()),
            jobs=[job_id for job_id, ranks in running.items() if ranks[node.name]],
            gpu_count=len(node.gpus),
            usable_vram_mb=sum(gpu.usable_vram_mb for gpu in node.gpus),
            agents=Counter(it.state for it in agents if it.host == node.name),
            facts=said.facts,
            seen_at=said.seen_at,
            problem=said.problem,
            shared_dir=said.shared_dir,
        )
        for node in cluster.nodes
        for said in [known.get(node.name, HostRecord(host=node.name))]
    ]
    return reply(HostList(hosts=views))
