"""One attendant per agent: prepares the job, starts the agent, waits for its end, cleans up.

An attendant's last word is `AgentLost`, and it is true when it is said: the agent's process is
over, and nothing that it started is left but the ranks that wait for the next one.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

import structlog

from coordinator import happenings
from coordinator.actions import StartAgent
from coordinator.agents import token_digest
from coordinator.charge import Charge
from coordinator.exit_records import unheard_ends
from coordinator.happenings import Happening
from coordinator.launcher import AgentProcess, Launcher
from coordinator.preparation import Places, Unprepared, prepare
from coordinator.snapshot import JobSnapshot
from muster.attic import claim
from muster.contracts.agent import AdoptedRank, AgentAssignment
from muster.contracts.endings import describe_status
from muster.contracts.environ import ServiceSettings, mark, pulse_seconds
from muster.contracts.job import JobUid
from muster.contracts.layout import DataDirectory
from muster.contracts.process import ProcessRecord
from muster.ports import another_port
from muster.processes import is_running
from muster.sight import require_descriptors
from muster.succession import newest_generation
from store.records import Job

FAREWELL_SECONDS: Final = 5.0
"""A dismissed agent has nothing left to do; one that stays longer is ended."""

BLIND_PAUSE_SECONDS: Final = 0.5

_LOG: Final = structlog.get_logger("coordinator")

Hear = Callable[[JobUid, Happening], None]


class Attendants:
    """The agents that this coordinator has started."""

    def __init__(
        self,
        launcher: Launcher,
        settings: ServiceSettings,
        is_in_office: Callable[[], Awaitable[bool]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_in_office` says whether the lease is still ours, once it can be said."""
        self._clock = clock
        self._blind: dict[JobUid, float] = {}
        self._launcher = launcher
        self._is_in_office = is_in_office
        self._settings = settings
        self._data = DataDirectory(settings.data_dir)
        self._tasks: set[asyncio.Task[None]] = set()
        self._preparing: dict[JobUid, asyncio.Task[Places]] = {}

    @property
    def are_gone(self) -> bool:
        """Whether no agent of ours is left."""
        return not self._tasks

    @property
    def blind_since(self) -> float | None:
        """Since when no agent is left but those that are over, and nobody can see what they left.

        None while there is another one, or none at all.
        """
        if len(self._blind) < len(self._tasks):
            return None
        return max(self._blind.values(), default=None)

    def equip(self, charge: Charge) -> None:
        """Give an agent that is to start a token of its own, and ranks a port nobody else uses.

        It is durable together with what was decided, so that no two ranks hear of different ports.
        """
        if StartAgent() in charge.decided:
            charge.token = secrets.token_urlsafe(32)
            charge.attach(agent=None, agent_token_sha256=token_digest(charge.token))
        if charge.is_to_meet:
            charge.attach(master_port=another_port(charge.attachment.master_port))

    def start(self, charge: Charge, hear: Hear) -> None:
        self._run(self._attend(charge, hear, self._bring_up))

    async def find(self, job: Job) -> AgentProcess | None:
        """Return the agent that a predecessor has started for a job, if it runs."""
        return await self._launcher.adopt(job.uid, job.agent)

    async def inherit(self, charge: Charge, hear: Hear) -> None:
        """Attend to an agent that was found, as soon as what its ranks need is there."""
        try:
            charge.places = await self._prepare(charge)
        except Unprepared as error:
            hear(charge.snapshot.uid, happenings.Condemned(verdict=error.verdict))
        self._run(self._attend(charge, hear, self._await_end))

    def kill(self, charge: Charge) -> None:
        """End the agent; its attendant does the rest."""
        if charge.agent is not None:
            self._run(self._launcher.kill(charge.agent))

    def see_off(self, charge: Charge) -> None:
        """Make sure that a dismissed agent goes, or that there never is one.

        One that has not been heard yet is told when it comes. To kill it at once would save the
        time of its imports, and might leave what it is just starting.
        """
        preparing = self._preparing.get(charge.snapshot.uid)
        if preparing is not None:
            preparing.cancel()
        elif charge.agent is not None:  # else whoever is about to start it looks first
            self._run(self._see_off(charge.agent))

    async def sweep(self, leftovers: Mapping[JobUid, Sequence[ProcessRecord]]) -> None:
        """End whatever runs of these jobs, the processes that are known of each included."""
        await asyncio.gather(
            *(self._launcher.sweep(uid, known) for uid, known in leftovers.items())
        )

    async def abandon(self) -> None:
        """Stop attending; the agents go on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _attend(
        self, charge: Charge, hear: Hear, serve: Callable[[Charge], Awaitable[str]]
    ) -> None:
        """`serve` returns when the agent has ended, and says how."""
        uid, generation = charge.snapshot.uid, charge.snapshot.generation
        try:
            message = await serve(charge)
        except Unprepared as error:
            hear(uid, happenings.Condemned(verdict=error.verdict))
            if charge.snapshot.any_alive:
                await self._launcher.sweep(uid, charge.known_processes())
                self._tell_unheard(charge, hear)
            message = "the job's agent was not started again, and its ranks were ended"
            hear(uid, happenings.AgentLost(generation=generation, message=message))
            return
        except Exception as error:  # noqa: BLE001  whatever it is, nobody else would hear of it
            message = f"the job's agent could not be started: {error!r}"
        while True:
            try:
                await self._part(charge, hear, generation, message)
            except Exception:  # noqa: BLE001  without descriptors nobody can look; the job waits for `AgentLost`
                if uid not in self._blind:
                    _LOG.exception(
                        "cannot see what an agent has left: trying again",
                        action="agent_left_unseen",
                        job_id=charge.snapshot.job_id,
                    )
                    self._blind[uid] = self._clock()
                await asyncio.sleep(BLIND_PAUSE_SECONDS)
            else:
                self._blind.pop(uid, None)
                return

    async def _part(self, charge: Charge, hear: Hear, generation: int, message: str) -> None:
        """Say that the agent is lost, once it is known what is left of it."""
        if not await self._is_in_office():
            return  # what runs of the job now is our successor's
        require_descriptors()  # else everybody would seem to be gone
        uid = charge.snapshot.uid
        charge.agent = None
        charge.attach(agent=None)
        # First: what has ended since that look is the next agent's to find.
        living = _waiting_for_another(charge.snapshot)
        if not living:
            await self._launcher.sweep(uid, charge.known_processes())
        # Now nothing is left of those that are told to have ended.
        self._tell_unheard(charge, hear, living)
        files = self._data.job(charge.snapshot.job_id)
        newest = newest_generation(files.agent_socket(generation))
        hear(
            uid,
            happenings.AgentLost(
                generation=generation, message=message, living=living, newest=newest
            ),
        )

    def _tell_unheard(self, charge: Charge, hear: Hear, living: Collection[int] = ()) -> None:
        snapshot = charge.snapshot
        for unheard in unheard_ends(snapshot, self._data.job(snapshot.job_id), living):
            hear(snapshot.uid, unheard)

    async def _bring_up(self, charge: Charge) -> str:
        """Prepare the job, start the agent, and return how it ended.

        An agent may be dismissed at any time, also before there is one: then there never is.
        """
        if charge.places is None or not charge.snapshot.any_alive:  # who lives has all it needs
            await self._prepare_unless_dismissed(charge)
        if _is_wanted(charge):
            files = self._data.job(charge.snapshot.job_id)
            await asyncio.to_thread(claim, files, charge.snapshot.uid)
        if not _is_wanted(charge):
            return "the job's agent was dismissed before it was started"
        agent = await self._launcher.start(self._assignment(charge))
        charge.agent = agent
        charge.attach(agent=agent.record)
        if not _is_wanted(charge):  # dismissed while it was being started
            self.see_off(charge)
        return await self._await_end(charge)

    async def _prepare_unless_dismissed(self, charge: Charge) -> None:
        """Prepare the job; a disk that is far away keeps nobody from dismissing its agent."""
        uid = charge.snapshot.uid
        self._preparing[uid] = preparing = asyncio.create_task(self._prepare(charge))
        try:
            await asyncio.wait([preparing])
        finally:
            del self._preparing[uid]
            preparing.cancel()
        if not preparing.cancelled():
            charge.places = preparing.result()

    async def _await_end(self, charge: Charge) -> str:
        status = None if charge.agent is None else await charge.agent.ended
        ending = "ended" if status is None else describe_status(status)
        return f"the job's agent {ending}; another one is started"

    async def _prepare(self, charge: Charge) -> Places:
        return await asyncio.to_thread(prepare, charge.snapshot.spec, self._settings)

    async def _see_off(self, agent: AgentProcess) -> None:
        """Wait until it has gone; one that stays is ended, however often that has to be tried."""
        while not (await asyncio.wait([agent.ended], timeout=FAREWELL_SECONDS))[0]:
            with suppress(OSError):  # without descriptors nobody can be ended
                await self._launcher.kill(agent)

    def _assignment(self, charge: Charge) -> AgentAssignment:
        snapshot = charge.snapshot
        return AgentAssignment(
            job_uid=snapshot.uid,
            generation=snapshot.generation,
            token=charge.token,
            job_root=str(self._data.job(snapshot.job_id).root),
            address_file=str(self._data.coordinator_address),
            # Variables of the person's own may change how Python or numpy start: then exec. And
            # of a fork the kernel does not show what secrets it has to an agent that takes over.
            is_managed=snapshot.spec.command is None
            and not snapshot.spec.env
            and not snapshot.spec.secrets,
            orphan_timeout_seconds=self._settings.orphan_timeout_seconds,
            stop_grace_seconds=snapshot.spec.stop_grace_seconds,
            pulse_seconds=pulse_seconds(snapshot.spec),
            secrets=snapshot.spec.secrets,
            safe=str(self._data.secrets),
            adopted=tuple(_adopted(snapshot)),
        )

    def _run(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _is_wanted(charge: Charge) -> bool:
    """Whether the agent that is being started has not been dismissed meanwhile."""
    return charge.snapshot.has_agent


def _waiting_for_another(snapshot: JobSnapshot) -> frozenset[int]:
    """Return the ranks that live on without their agent, if anybody is to look after them."""
    if not (snapshot.has_agent and snapshot.is_left_to_agents):
        return frozenset()
    return frozenset(
        rank.rank
        for rank in snapshot.ranks
        # One that was to be killed is not waited for: what its agent did not do the next one does.
        if rank.kill is None and rank.identity is not None and is_running(rank.identity)
    )


def _adopted(snapshot: JobSnapshot) -> Iterator[AdoptedRank]:
    for rank in snapshot.ranks:
        if rank.is_alive and rank.identity is not None:
            yield AdoptedRank(
                rank=rank.rank,
                incarnation=rank.incarnation,
                process=rank.identity,
                mark=mark(snapshot.uid, rank.rank, rank.incarnation),
            )
