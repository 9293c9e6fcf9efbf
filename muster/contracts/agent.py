"""The agent of a job on one host, as the coordinator sees it."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

LOCAL_HOST: Final = "local"
"""The name of the coordinator's own host, where a job runs unless its cluster has others."""

UNPLACED: Final = ""
"""In place of a host's name: a rank that waits for a free slot on any host."""

LOOPBACK: Final = "127.0.0.1"
"""The address at which ranks of one host reach each other."""


class AgentState(StrEnum):
    """The coordinator's relation to an agent, see `TRANSITIONS`."""

    ABSENT = "absent"  # no agent exists; one is started when there is work
    STARTING = "starting"  # started, not connected yet
    CONNECTED = "connected"  # takes requests
    UNREACHABLE = "unreachable"
    """The process lives, the connection broke; the agent reconnects by itself."""
    LEAVING = "leaving"  # dismissed while not connected; gone once its process has ended


TRANSITIONS: Final[Mapping[AgentState, frozenset[AgentState]]] = {
    AgentState.ABSENT: frozenset({AgentState.STARTING}),
    AgentState.STARTING: frozenset(
        # A connection may break before its hello was folded in.
        {AgentState.CONNECTED, AgentState.UNREACHABLE, AgentState.LEAVING, AgentState.ABSENT}
    ),
    AgentState.CONNECTED: frozenset({AgentState.UNREACHABLE, AgentState.ABSENT}),
    AgentState.UNREACHABLE: frozenset(
        {AgentState.CONNECTED, AgentState.LEAVING, AgentState.ABSENT}
    ),
    AgentState.LEAVING: frozenset({AgentState.ABSENT}),
}
