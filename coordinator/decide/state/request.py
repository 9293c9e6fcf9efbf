"""A request of the coordinator that an agent, or a process beside it, has to answer.

There are two: to list the checkpoints of a gang, and to send the last logs of a host. All other
requests are drawn as what they change: that to start a rank as the state of its process, those to
end it as the intent of its attempt, a group as its round, a dismissal as the state of the agent.

Pure. Times are seconds on the coordinator's monotonic clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from coordinator.decide.state.rank import NEVER


class RequestState(Enum):
    """How far a request is."""

    NONE = auto()  # not made, or gone with its agent or its occasion
    ASKED = auto()  # decided; it is repeated to an agent or sender that connects
    ANSWERED = auto()


TRANSITIONS: Final[Mapping[RequestState, frozenset[RequestState]]] = {
    RequestState.NONE: frozenset({RequestState.ASKED}),
    RequestState.ASKED: frozenset({RequestState.ANSWERED, RequestState.NONE}),
    RequestState.ANSWERED: frozenset({RequestState.ASKED, RequestState.NONE}),
}


@dataclass(frozen=True, slots=True)
class Request:
    """One request, and since when an answer is missing."""

    state: RequestState = RequestState.NONE
    since: float = NEVER  # when it was made; NEVER unless an answer is missing

    @property
    def is_open(self) -> bool:
        """True if an answer is missing."""
        return self.state is RequestState.ASKED

    def move(self, target: RequestState, since: float = NEVER) -> "Request":
        """Return the request in another state, or this one if the table does not allow the move.

        An answer may come twice, or after its request is gone.
        """
        return Request(target, since) if target in TRANSITIONS[self.state] else self


NOT_ASKED: Final = Request()
