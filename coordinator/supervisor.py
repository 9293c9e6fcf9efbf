"""The coordinator's one loop: hear, fold, plan, commit, perform.

Everything that happens comes through one inbox and has one consumer. What a plan decides is taken
into the snapshot, made durable, and only then performed: a successor never meets an effect whose
cause it cannot read. When the database is away, nothing new is decided; ranks do not notice.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

import structlog

from coordinator import happenings
from coordinator.agents import AgentServer, token_fits
from coordinator.attendants import Attendants
from coordinator.charge import Charge, Draft
from coordinator.farewell import PATIENCE_SECONDS, Farewell
from coordinator.happenings import Happening
from coordinator.moment import Moment
from coordinator.performer import Performer
from coordinator.roster import Roster
from coordinator.rows import Haste
from coordinator.wakefulness import Wakefulness
from muster.contracts.job import JobUid
from muster.contracts.messages import AgentHello, AgentMessage, Beat, Pulse, RankSaid
from store.errors import StoreUnavailable
from store.tenure import Tenure

POLL_SECONDS: Final = 0.25
"""How often the database is asked whether anybody else has written, should a nudge be lost. The
asking costs microseconds; waking up an idle process twenty times a second does not."""

LONG_ROUND_SECONDS: Final = 0.05
"""Through all jobs, from the look at the rows to the last commit."""

RESTS: Final = 2
"""How often that time passes before a nudge is followed again. What agents say does not wait."""

COMMIT_AFTER_SECONDS: Final[Mapping[Haste, float]] = {
    Haste.AT_ONCE: 0.0,
    Haste.PROGRESS: 1.0,
    Haste.BEAT: 2.0,
    # Nothing to write but the lease, well within its length.
    Haste.NONE: 2.0,
}
"""How long after the last commit the next one follows; each renews the lease."""

RETRY_SECONDS: Final = 0.5
"""Between attempts to commit while the database is away."""

_LOG: Final = structlog.get_logger("coordinator")


class Supervisor:
    """Looks after every job of one database, for as long as its tenure lasts."""

    def __init__(
        self,
        *,
        tenure: Tenure,
        roster: Roster,
        attendants: Attendants,
        clock: Callable[[], float] = time.monotonic,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._tenure = tenure
        self._roster = roster
        self._attendants = attendants
        self._clock = clock
        self._wakefulness = Wakefulness(self._overslept, clock)
        self._inbox: deque[tuple[JobUid, Happening, Moment]] = deque()
        self._stirred = asyncio.Event()
        self._performer = Performer(attendants, self.hear)
        self._rests_until = 0.0
        self._is_nudged = False
        self._committed_at = 0.0
        self._retry_at = 0.0
        self._failing_since: float | None = None
        self._farewell = Farewell(clock, patience_seconds)

    def attach(self, agents: AgentServer) -> None:
        """Name the server through which agents are told; it names us as its listener."""
        self._performer.attach(agents)

    # What agents say, and who they are (coordinator.agents.Listener)

    def expects(self, hello: AgentHello) -> bool:
        charge = self._roster.charges.get(JobUid(hello.job_uid))
        return (
            charge is not None
            and charge.snapshot.has_agent
            and hello.generation == charge.snapshot.generation
            and token_fits(hello.token, charge.attachment.agent_token_sha256)
        )

    def joined(self, uid: JobUid, generation: int) -> None:
        self.hear(uid, happenings.AgentJoined(generation=generation))

    def dropped(self, uid: JobUid, generation: int) -> None:
        self.hear(uid, happenings.AgentDropped(generation=generation))

    def said(self, uid: JobUid, generation: int, message: AgentMessage) -> None:
        charge = self._roster.charges.get(uid)
        current = charge is not None and charge.snapshot.generation == generation
        if current and not isinstance(message, AgentHello):
            self.hear(uid, message)

    def stir(self) -> None:
        """Look at the rows now: somebody has written."""
        self._stirred.set()

    def nudge(self) -> None:
        """Look at the rows soon: at once, unless the last look has taken long.

        Among thousands of jobs it does, and whoever submits them needs the machine as well.
        """
        rest = self._rests_until - self._clock()
        if rest <= 0:
            self.stir()
        elif not self._is_nudged:
            self._is_nudged = True
            asyncio.get_running_loop().call_later(rest, self.stir)

    def hear(self, uid: JobUid, happening: Happening) -> None:
        """Put a happening into the inbox, with the time it came."""
        self._inbox.append((uid, happening, self._now()))
        if not _is_routine(happening):
            self.stir()

    def _now(self) -> Moment:
        return Moment(monotonic=self._clock(), wall=datetime.now(UTC))

    # The ends of a tenure

    def leave(self) -> None:
        """Hand over: end the loop after a last commit; agents and ranks go on."""
        self._farewell.leave()
        self.stir()

    def drain(self) -> None:
        """Shut down: let every job save and go back to the queue, then end the loop."""
        self._farewell.drain()
        self.stir()

    # The loop

    async def run(self) -> None:
        """Serve until `leave`, or until `drain` is through. Raises `LeaseLost`."""
        with self._wakefulness.watched():
            while not self._is_done():
                await self._wait()
                began = self._clock()
                self._fold_inbox()
                await self._look_around()
                await self._act()
                self._rest_from(began)
            await self._commit_at_last()

    async def take_over(self) -> None:
        """Load the jobs: agents that live are adopted, what nobody looks after is ended.

        To be done before any agent can come: whoever is not expected then is sent away.
        """
        for charge in await self._roster.load(
            self._attendants.find, self._attendants.sweep, self._now()
        ):
            await self._attendants.inherit(charge, self.hear)

    def _is_done(self) -> bool:
        if not self._farewell.is_draining:
            return self._farewell.is_leaving
        drained = not self._roster.admitted() and not self._inbox and self._attendants.are_gone
        return self._farewell.is_leaving or drained or self._is_blind_for_good()

    def _is_blind_for_good(self) -> bool:
        """Whether it has waited in vain to see what agents have left; wardens end what that is."""
        since = self._attendants.blind_since
        if since is None or not self._farewell.has_waited_long_enough(since):
            return False
        _LOG.warning("leaves without a look at what agents have left", action="left_unseen")
        return True

    async def _wait(self) -> None:
        """Sleep until something happens, a plan has to be asked again, or rows may have changed."""
        now = self._clock()
        moments = [charge.look_at for charge in self._roster.charges.values()]
        if now < self._retry_at:
            moments = []  # nothing is decided before the database is asked again
        patience = min([POLL_SECONDS, *(moment - now for moment in moments)])
        alarm = asyncio.get_running_loop().call_later(max(0.0, patience), self._stirred.set)
        await self._stirred.wait()
        alarm.cancel()
        self._stirred.clear()
        self._is_nudged = False

    def _rest_from(self, began: float) -> None:
        now = self._clock()
        took = now - began
        if took > LONG_ROUND_SECONDS:
            self._rests_until = now + RESTS * took

    def _overslept(self, seconds: float) -> None:
        """Let every job know that for so long nobody could be heard.

        Meanwhile another may have come into office: the next commit tells, and is made at once.
        """
        self._committed_at = 0.0
        for uid in self._roster.charges:
            self.hear(uid, happenings.Overslept(seconds=seconds))

    def _fold_inbox(self) -> None:
        self._wakefulness.look()  # else one that has just woken up might judge before it notices
        while self._inbox:
            self._learn(*self._inbox.popleft())

    def _learn(self, uid: JobUid, happening: Happening, at: Moment) -> None:
        charge = self._roster.charges.get(uid)
        if charge is None:
            return
        charge.learn(happening, at)
        charge.has_rejoined |= isinstance(happening, happenings.AgentJoined)

    async def _look_around(self) -> None:
        """Take up what the API has written, and let in whom there is room for."""
        if self._failing_since is None:  # else the next commit tells whether there are rows to see
            with suppress(StoreUnavailable):  # and so it does now
                await self._roster.look(self._now())
        if not self._farewell.is_draining:
            self._roster.admit(self._now())
            return
        for charge in self._roster.admitted():
            if not charge.snapshot.interrupting:
                charge.learn(happenings.Interrupted(), self._now())

    async def _act(self) -> None:
        """Plan, commit and perform until nothing is left to decide now."""
        while self._clock() >= self._retry_at:
            for charge in self._roster.charges.values():
                self._performer.repeat_orders(charge)
            self._plan()
            drafts = self._drafts()
            most = max((draft.haste for _, draft in drafts), default=Haste.NONE)
            if self._clock() < self._committed_at + COMMIT_AFTER_SECONDS[most]:
                return
            if not await self._commit(drafts):
                return
            self._perform()

    def _plan(self) -> None:
        # What came while we waited for the database is heard first: those who beat are not silent.
        self._fold_inbox()
        now = self._now()
        for charge in self._roster.charges.values():
            charge.plan(now)
            self._attendants.equip(charge)

    def _drafts(self) -> list[tuple[Charge, Draft]]:
        now = self._now()
        unwritten = [
            charge
            for charge in self._roster.charges.values()
            if charge.revision != charge.written_revision
        ]
        return [(charge, charge.draft(now)) for charge in unwritten]

    async def _commit(self, drafts: Sequence[tuple[Charge, Draft]]) -> bool:
        """Write everything in one transaction; return whether it is durable."""
        changed = [(charge, draft) for charge, draft in drafts if draft.haste is not Haste.NONE]
        try:
            await asyncio.to_thread(self._tenure.commit, [draft.write for _, draft in changed])
        except StoreUnavailable as error:
            self._commit_failed(error)
            return False
        self._failing_since = None
        self._committed_at = self._clock()
        for charge, draft in drafts:
            _tell(charge, draft)
            charge.written(draft)
        return True

    async def _commit_at_last(self) -> None:
        """Write what is known; of what has passed an agent tells a successor only the last."""
        while not await self._commit(self._drafts()):
            if self._is_out_of_patience():
                _LOG.warning("leaves without its last events", action="events_lost")
                return
            _LOG.warning("waits for the database before it leaves", action="handover_waits")
            await asyncio.sleep(RETRY_SECONDS)
            self._fold_inbox()

    def _commit_failed(self, error: StoreUnavailable) -> None:
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
            _LOG.warning("the database is away", action="commit_failed", error=str(error))
        self._retry_at = now + RETRY_SECONDS
        if self._farewell.is_draining and self._is_out_of_patience():
            # The person wants an end. The rows will say that it ran, which is what they say after
            # a crash, too.
            for charge in self._roster.admitted():
                self._performer.dismiss(charge)
            raise error

    def _is_out_of_patience(self) -> bool:
        since = self._failing_since
        return since is not None and self._farewell.has_waited_long_enough(since)

    def _perform(self) -> None:
        for charge in list(self._roster.charges.values()):
            self._performer.perform(charge)
            if charge.is_over:
                self._roster.release(charge)


def _is_routine(happening: Happening) -> bool:
    """Whether a happening may wait for the next look, at most `POLL_SECONDS` away.

    A thousand ranks beat at a thousand moments of a second, and none of that calls for a decision.
    It is folded in, with the time it came, before anybody is judged.
    """
    match happening:
        case Pulse() | RankSaid(message=Beat(stopping=False)):
            return True
        case _:
            return False


def _tell(charge: Charge, draft: Draft) -> None:
    """One log line for each event, once it is durable."""
    for event in draft.events:
        _LOG.info(event.message, action=event.kind, job_id=charge.snapshot.job_id, rank=event.rank)
