"""Does the process that looks after a job's ranks do its part? On this host that is known."""

from api.pool_schemas import AgentState
from muster.contracts.process import ProcessRecord
from muster.processes import is_provably_gone, is_running, stands_still
from store.records import Job


def agent_state(job: Job) -> AgentState | None:
    """Return what can be seen of a job's agent from here; None if it has none.

    A job that is over needs none, whatever its row remembers of the last one.
    """
    return None if job.agent is None or job.is_terminal else _seen(job.agent)


def _seen(agent: ProcessRecord) -> AgentState:
    if is_running(agent):
        return "stopped" if stands_still(agent.pid) else "running"
    return "gone" if is_provably_gone(agent) else "elsewhere"
