"""The agent of a job on one host, as the coordinator sees it."""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

LOCAL_HOST: Final = "local"
"""What views call the own host of a service without a cluster file. Rows have its node id: this
word would be another host once a coordinator there takes over."""

UNPLACED: Final = ""
"""In place of a host's name: a rank that waits for a free slot on any host."""

LOOPBACK: Final = "127.0.0.1"
"""The address at which ranks of one host reach each other."""

_NODE_ID: Final = re.compile(r"n-[0-9a-f]{12}")


def is_node_id(host: str) -> bool:
    """True for the id of a node (`muster.cluster.identity`), False for a name of the user's."""
    return _NODE_ID.fullmatch(host) is not None


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
