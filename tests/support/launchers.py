"""Launchers of this machine and of hosts that a test makes, and the agents that they start."""

import asyncio
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Self

from coordinator.launchers.launcher import AgentProcess
from coordinator.launchers.local import LocalLauncher
from coordinator.launchers.remote import CommandLauncher
from muster.contracts.job.secrets import SHARED_VARIABLES
from muster.contracts.messages.assignment import AgentAssignment
from muster.contracts.settings.paths import JobFiles
from muster.host.containment import tagged_processes
from muster.host.limits import ShellLimits
from muster.runtime.agent_process import agent_tag
from tests.support.installation import await_value

ENVIRON = {"PATH": os.environ["PATH"], "API_KEY": "shared", SHARED_VARIABLES: "API_KEY"}

AnyLauncher = LocalLauncher | CommandLauncher
Make = Callable[[], AnyLauncher]


def local() -> LocalLauncher:
    return LocalLauncher(ENVIRON, ShellLimits(1024, 1024))


def forking() -> LocalLauncher:
    launcher = local()
    launcher.start_fork_server()
    return launcher


def by_command(*command: str) -> Make:
    return lambda: CommandLauncher("elsewhere", command, ENVIRON)


class Scene:
    """Launchers of one host, and the agents that they start, each of a job of its own."""

    def __init__(self, root: Path, make: Make = forking) -> None:
        self._root = root
        self._make = make
        self._uids: list[str] = []
        self._launchers: list[AnyLauncher] = []
        self._agents: list[AgentProcess] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        by = local()
        await asyncio.gather(*(by.sweep(uid, ()) for uid in self._uids))
        ended = [agent.ended for agent in self._agents if not agent.ended.cancelled()]
        await asyncio.gather(*ended, return_exceptions=True)
        for each in self._launchers:
            each.close()

    def launcher(self, make: Make | None = None) -> AnyLauncher:
        self._launchers.append((make or self._make)())
        return self._launchers[-1]

    def assignment(self) -> AgentAssignment:
        """Return the assignment of an agent that waits for a coordinator."""
        uid = uuid.uuid4().hex
        self._uids.append(uid)
        return AgentAssignment(
            job_uid=uid,
            host="local",
            agent_number=1,
            token="a token",  # noqa: S106  no secret
            job_root=str(self._root / uid[:8]),
            address_file=str(self._root / "coordinator.json"),
            is_managed=True,
            orphan_timeout_seconds=600.0,
            stop_grace_seconds=1.0,
            agent_heartbeat_seconds=1.0,
            max_log_bytes=1 << 20,
        )

    async def start(self, by: AnyLauncher, assignment: AgentAssignment) -> AgentProcess:
        """Return the agent once it serves."""
        agent = await by.start(assignment)
        self._agents.append(agent)
        path = JobFiles(Path(assignment.job_root)).agent_socket(1)
        await asyncio.to_thread(await_value, path.is_socket, lambda: f"no {path}")
        return agent


def agents_of(job_uid: str) -> list[int]:
    """Return the pids of a job's agents on all hosts of a test, as they are seen here."""
    return [record.pid for record in tagged_processes(agent_tag(job_uid))]
