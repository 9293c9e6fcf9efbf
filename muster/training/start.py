"""What ranks with a managed program and scripts with `muster.torch` do alike at their start."""

import ctypes
import os
from dataclasses import replace
from typing import Final

import msgspec

from muster.collectives.reduction.compressed import KINDS
from muster.contracts.messages.rank import SPARE_READY, Ready
from muster.contracts.messages.wire import encode
from muster.contracts.settings.environ import RankSettings
from muster.contracts.settings.names import PROCESS_TAG, SPARE
from muster.host.containment import retag
from muster.host.trace import stamp
from muster.runtime.agent_client import AgentClient
from muster.runtime.exit_report import exit_process
from muster.runtime.fingerprint import ANY_BITS, Fingerprint
from muster.training.blocks import Computer
from muster.training.groups.group import group_factory
from muster.training.groups.replay import Replay
from muster.training.groups.state_sync import Replica
from muster.training.groups.updates import AgentGroupUpdates, GroupUpdates, SingleRankUpdates
from muster.training.reporter import Reporter
from muster.training.trainer import Trainer

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
"""Parameters of mallopt(3), from malloc.h of the GNU C library."""

_TRIM_BYTES: Final = (1 << 31) - 1
"""The most free memory that the process can be told to keep."""

_MMAP_BYTES: Final = 32 << 20
"""The largest threshold that glibc allows. numpy requests huge pages for larger blocks, so those
cause few page faults."""

SPARE_POLL_SECONDS: Final = 60.0
"""How long a spare process sleeps at most; an order and the agent's end wake it at once."""


def wait_for_order(client: AgentClient) -> None:
    """Wait until this spare process becomes an attempt, and take over its environment.

    Ends the process when the agent is gone.
    """
    client.report_code()  # as it is now: the files may be edited before there is an order
    agent = client.socket
    agent.send(encode(SPARE_READY))
    while (order := agent.receive()) is None:
        if agent.is_broken:
            exit_process(0)
        agent.wait_for_packet(SPARE_POLL_SECONDS)
    content, _ = order
    del os.environ[SPARE]
    os.environ.update(msgspec.msgpack.decode(content, type=dict[str, str]))
    retag(os.environ[PROCESS_TAG])
    stamp("rank began")


def ready_trainer(
    settings: RankSettings,
    agent: AgentClient,
    reporter: Reporter,
    computer: Computer,
    replica: Replica,
    arithmetic: Fingerprint,
) -> Trainer:
    """Return the trainer of a rank, and report that the rank is ready for its first group."""
    supervision = reporter.supervision
    if settings.bits == "any":
        arithmetic = replace(arithmetic, digest=ANY_BITS)
    else:
        reporter.checkpointer.arithmetic = arithmetic
    updates: GroupUpdates
    if settings.agent_fd is None:
        updates = SingleRankUpdates(settings.rank, lambda: supervision.is_stopping)
    else:
        updates = AgentGroupUpdates(agent.socket, lambda: supervision.is_stopping)
    if settings.compression is not None:
        kind, _, ratio = settings.compression.partition(":")
        computer.compression = KINDS[kind](
            settings.virtual_shards,
            settings.compression_groups or 1,
            computer.compressed_elements,
            settings.seed,
            float(ratio or 1),
        )
    groups = group_factory(
        settings, settings.virtual_shards, computer.elements, updates, computer.compression
    )
    supervision.report_code()
    supervision.send(Ready(port=groups.port))
    stamp("rank ready")
    return Trainer(
        computer=computer,
        replay=Replay(computer, settings.replay_every),
        replica=replica,
        updates=updates,
        groups=groups,
        callbacks=reporter,
        arithmetic=arithmetic,
    )


def keep_freed_memory() -> None:
    """Keep memory that a step frees for the next step, which needs the same amount.

    The C library returns large blocks to the system as soon as they are free, and the next step
    faults in and clears every page again: in a step that computes little, more than half of all
    processor time. Has no effect with another C library than glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # Setting either of them also ends the adjustment of both by glibc.
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
