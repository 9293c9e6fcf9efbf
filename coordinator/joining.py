"""Answers the parents of agents that a scheduler has started: what to do, or why nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from coordinator.launchers.launcher import AgentValues
from coordinator.launchers.remote import probe_file
from muster.contracts.attach import LaunchAgent, OrderFailed
from muster.contracts.interpreter import VERSION, is_compatible
from muster.contracts.messages import AgentAssignment, JoinRequest


class Joins:
    """Keeps which process has used which token: each is good for one.

    A scheduler that has lost its memory may start a job twice.
    """

    def __init__(self, values: AgentValues) -> None:
        self._values = values
        self._nonces: dict[tuple[str, str, int], bytes] = {}

    @asynccontextmanager
    async def answer(
        self,
        request: JoinRequest,
        assignment: AgentAssignment | None,
        note: Callable[[str], None] | None,
    ) -> AsyncIterator[LaunchAgent | OrderFailed]:
        """Yield the answer; `assignment` is None if no such agent is expected.

        `note` writes an event of the job. A probe file lies in its directory of checkpoints until
        the caller is done.
        """
        if assignment is None or note is None:
            yield OrderFailed(message="no such agent is expected: its job has ended, or moved on")
            return
        if why := self._refusal(request):
            note(f"{why}; it was turned away")
            yield OrderFailed(message=why)
            return
        joined = msgspec.structs.replace(assignment, token=request.token, is_joined=True)
        secrets_dir = Path(assignment.secrets_dir)
        complete = await asyncio.to_thread(self._values.complete, joined, secrets_dir)
        async with probe_file(assignment.checkpoint_dir) as probe:
            yield LaunchAgent(assignment=complete, environment=self._values.given, probe=probe)

    def _refusal(self, request: JoinRequest) -> str:
        """Return why the process is turned away, "" if it is not."""
        if not is_compatible(request.version):
            theirs = f"{request.node} has Muster {request.version}"
            return f"{theirs}, and the coordinator {VERSION}: install that there"
        key = request.job_uid, request.host, request.generation
        if self._nonces.setdefault(key, request.nonce) != request.nonce:
            return f"{request.node} has shown the token of {request.host}, which was used before"
        return ""
