"""What an agent is told when it is started, on its standard input; and where it finds its master.

Not on the command line and not in the environment: both can be read by others of the same machine.
"""

import msgspec


class AgentAssignment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything one agent needs to know."""

    job_id: str
    job_uid: str
    generation: int
    token: str
    """Proves to the coordinator that this is the agent it started."""
    job_root: str
    """The job's directory, see `muster.contracts.layout.JobFiles`."""
    address_file: str
    """Holds a `CoordinatorAddress`; read anew at every attempt to connect."""
    orphan_timeout_seconds: float
    """Without a coordinator for this long, ranks are asked to save and exit."""
    stop_grace_seconds: float


class CoordinatorAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where the present coordinator listens for agents."""

    host: str
    port: int
    epoch: int
