"""The names of the variables that processes of Muster give each other, and what ranks get."""

from collections.abc import Mapping
from typing import Final

ORPHAN_TIMEOUT: Final = "MUSTER_ORPHAN_TIMEOUT"
PROCESS_TAG_WIDTH: Final = 64
"""A prefork server overwrites process tags in place, so each has this width: a uid of 32 digits,
a rank of 4, an attempt, and room to spare."""

PROCESS_TAG: Final = "MUSTER_PROCESS_TAG"
"""Holds job uid, rank and attempt in every process that a rank starts, so that Muster recognizes
the processes that a rank leaves behind."""
SPARE: Final = "MUSTER_SPARE"
"""Set for a process that loads the program and then waits to become a rank."""
SPARE_RANK: Final = 4095
"""The rank in the process tag of a spare process. No synchronous job has so many ranks."""
CHECK: Final = "MUSTER_CHECK"
"""Set to 1 for scripts that `muster check` runs, whose hooks may have files to leave alone."""
CHECK_STEPS: Final = "MUSTER_CHECK_STEPS"
CHECK_KILLS: Final = "MUSTER_CHECK_KILLS"
RESTORE_FROM: Final = "MUSTER_RESTORE_FROM"
AGENT_FD: Final = "MUSTER_AGENT_FD"
AGENT_SOCKET: Final = "MUSTER_AGENT_SOCKET"
HAS_JOINED: Final = "MUSTER_HAS_JOINED"
"""Set by a process that has joined for those that it starts: they are not the rank."""
STORAGE_SOCKET: Final = "MUSTER_STORAGE_SOCKET"
SENDS_CHECKPOINTS: Final = "MUSTER_SENDS_CHECKPOINTS"
PREFORK_FD: Final = "MUSTER_PREFORK_FD"
"""The descriptor of a prefork server's channel to its agent."""
LIFELINE_FD: Final = "MUSTER_LIFELINE_FD"
"""The descriptor of a pipe that closes when `muster up` ends, which ends its services."""
STANDBY: Final = "MUSTER_STANDBY"
"""Set for a service that loads its modules, and opens nothing before it reads a byte from its
standard input."""
ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
"""Where a program may write its error, as torch's `@record` does."""
STORE_KEYS: Final = (
    "S3_ACCESS_KEY",
    "S3_SECRET_KEY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
)
"""The keys of an object store. Of a job's processes only its storage process gets them."""
SERVICE_ONLY: Final = frozenset(
    {
        "MUSTER_DATABASE_URL",
        "MUSTER_TOKEN",
        "MUSTER_CLUSTER_KEY",
        LIFELINE_FD,
        STANDBY,
        *STORE_KEYS,
        # Of the service's own Slurm allocation; Lightning would take them for those of the rank.
        "SLURM_NTASKS",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
    }
)
"""Variables of the service that no rank inherits."""

HOST_COUNT: Final = "MUSTER_HOST_COUNT"
ATTEMPT_VARIABLES: Final = frozenset(
    {
        *("RANK", "LOCAL_RANK", "ROLE_RANK", "TORCHELASTIC_RESTART_COUNT", "MUSTER_GENERATION"),
        *(PROCESS_TAG, ERROR_FILE, "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", HOST_COUNT),
    }
)
"""Variables that differ between the attempts of a job. A spare process gets them last."""

SINGLE_THREADED: Final[Mapping[str, str]] = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""One thread per rank: ranks are the parallelism, and the number of BLAS threads changes the bits
of a product. Set before numpy is imported; a user's own values win."""

RANK_DEFAULTS: Final[Mapping[str, str]] = {
    **SINGLE_THREADED,
    "PYTHONHASHSEED": "0",  # the order of a set of names is the same in all attempts
    "PYTHONUNBUFFERED": "1",  # live logs
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # a group that lost a rank fails instead of hanging
}
"""Variables of a rank unless the user has set them."""

ONE_HOST_DEFAULTS: Final[Mapping[str, str]] = {
    "GLOO_SOCKET_IFNAME": "lo",  # the name of the host need not resolve
}
"""Further ones, of a rank whose job has one host."""
