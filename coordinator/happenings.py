"""What can happen to a job beside the messages of its agent: a closed union of values."""

from dataclasses import dataclass
from typing import TypeAlias

from coordinator.actions import Action
from coordinator.snapshot import Verdict
from muster.contracts.job import StopRequest
from muster.contracts.messages import Pulse, RankExited, RankSaid, RankSpawned


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """An action of the plan was taken."""

    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentJoined:
    """The agent said hello and its token was right."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentDropped:
    """The connection to the agent broke; its process lives."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLost:
    """The agent's process has ended, and what it had started with it, but for these ranks."""

    generation: int
    message: str
    living: frozenset[int] = frozenset()
    newest: int = 0
    """The highest number that a socket in the job's directory bears, be it an agent's or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """A person wants the job to end."""

    request: StopRequest
    grace_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A person wants another number of ranks."""

    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseAsked:
    """A person wants no step to be taken, or steps again."""

    paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAsked:
    """A person wants a worker to leave."""

    worker_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """The service was told to shut down: save, end, and wait in the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overslept:
    """The coordinator itself stood still for so long; its deadlines for others did, too."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Condemned:
    """Something outside the ranks makes the job impossible."""

    verdict: Verdict


Happening: TypeAlias = (
    Taken
    | AgentJoined
    | AgentDropped
    | AgentLost
    | StopAsked
    | Scaled
    | PauseAsked
    | LeaveAsked
    | Interrupted
    | Overslept
    | Condemned
    | Pulse
    | RankSpawned
    | RankSaid
    | RankExited
)
