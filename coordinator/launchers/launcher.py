"""What every launcher promises; `tests/promises/test_launcher.py` checks it."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from muster.cluster.requests import with_secrets
from muster.contracts.errors import MusterError
from muster.contracts.job.secrets import Reference, SecretUnavailable
from muster.contracts.messages.assignment import AgentAssignment
from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.names import SERVICE_ONLY, STORE_KEYS
from muster.contracts.settings.services import shared_variables
from muster.contracts.settings.variables import SAME_ON_ALL_HOSTS
from muster.host.processes import ProcessorWait
from muster.runtime.secrets import SecretStore


class NotStarted(MusterError):
    """The host was not reached, or has refused: no agent was started there."""


@dataclass(slots=True, kw_only=True)
class AgentProcess:
    """An agent that runs, or whose host has not told yet whether it does."""

    job_uid: str
    record: ProcessRecord | None  # none if it ended, or its host went, before it was identified
    ended: "asyncio.Future[int | None] | asyncio.Future[str | None]"
    """Done on evidence only: its exit status or how it ended, None where that is not known."""
    is_evidence: bool = True
    """Whether the end was seen. A scheduler may be wrong: an agent that is still connected runs."""
    waits: str | None = None  # why it has not been started yet, and since when
    processor_wait: ProcessorWait | None = None  # while it is late with its heartbeat


class Launcher(Protocol):
    """Where agents run: one host.

    An agent outlives its launcher. No method waits for a host that does not answer, but `start`,
    for a limited time, and `sweep`, which promises something about it.
    """

    async def start(self, assignment: AgentAssignment) -> AgentProcess:
        """Start an agent. Raises `NotStarted`, or OSError if no process can be started here."""

    async def adopt(self, job_uid: str, record: ProcessRecord | None) -> AgentProcess | None:
        """Return a job's agent that another coordinator has started; None if it is gone.

        `record` identifies it; None if that was not recorded. While nothing is known of it, it
        counts as running: it may connect by itself. `ended` tells if it has been gone already.
        """

    async def kill(self, agent: AgentProcess) -> None:
        """Kill an agent, if its host can be reached; `ended` tells when it is gone."""

    async def sweep(self, job_uid: str, known: Sequence[ProcessRecord]) -> None:
        """End every process of a job, and the `known` ones, which may have lost their tag.

        Returns once none is left on the host but those that hang in its kernel.
        """

    def living(self, records: Collection[ProcessRecord]) -> frozenset[ProcessRecord]:
        """Return at once which of these processes may live: all of which nothing is known."""


class AgentValues:
    """What of the service's environment goes to agents, and how."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        shared = shared_variables(environ)
        self._shared = {name: environ[name] for name in shared if environ.get(name)}
        self._store_keys = {name: environ[name] for name in STORE_KEYS if environ.get(name)}
        self.environ: Final = {
            name: value for name, value in environ.items() if name not in SERVICE_ONLY | shared
        }
        """The environment without what the service keeps for itself."""
        self.given: Final = {
            name: value
            for name, value in self.environ.items()
            if name.startswith(SAME_ON_ALL_HOSTS)
        }
        """What of it agents on other hosts get."""

    def complete(
        self, assignment: AgentAssignment, secrets_dir: Path | None = None
    ) -> AgentAssignment:
        """Return the assignment with the values that the job's agent alone may have.

        With those of files, as far as they can be read, if `secrets_dir` holds them.
        """

        def value_of(reference: Reference) -> str | None:
            if reference.source == "env":
                return self._shared.get(reference.name)
            if secrets_dir is not None:
                with suppress(SecretUnavailable, OSError):  # the rank says so when it starts
                    return SecretStore(secrets_dir).read(reference.name)
            return None

        return with_secrets(assignment, value_of, self._store_keys)
