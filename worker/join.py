"""The parent of an agent that a scheduler has started: ``python -P -m muster worker.join``.

It reads a `JoinOrder` from its standard input, or from a variable, fetches the assignment from the
coordinator, and runs the agent in a directory of its own: the data directory may be one that all
nodes share. Nothing that the agent has started outlives this process. SIGTERM and SIGUSR1 announce
that the node is taken away.
"""

import math
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from secrets import token_bytes
from typing import Final

import msgspec
from msgspec.structs import replace

from muster.contracts.errors import AuthenticationFailed
from muster.contracts.interpreter import PROTOCOL
from muster.contracts.messages.agent import JoinRequest
from muster.contracts.messages.assignment import AgentAssignment
from muster.contracts.messages.attach import (
    JOIN_ORDER,
    JoinExit,
    JoinOrder,
    LaunchAgent,
    OrderFailed,
)
from muster.contracts.messages.rank import NONCE_BYTES
from muster.contracts.settings.paths import DataDir, JobFiles
from muster.host.limits import ShellLimits
from muster.host.processes import adopt_orphans
from muster.links.reconnect import LINK_ERRORS, Reconnect
from muster.runtime.agent_process import launch_agent
from muster.runtime.stderr_messages import print_stderr
from worker.attach import with_checkpoints
from worker.coordinator.link import ThreadLink
from worker.coordinator.log_sender import send_logs
from worker.helpers import SENDER_GRACE_SECONDS
from worker.ranks.containment import kill_descendants

ROUTE_SECONDS: Final = 120.0  # for the way to the coordinator, whose successor may have to open
RETRY_SECONDS: Final = 0.5

REFUSED_SECONDS: Final = 10.0
"""A coordinator that refuses each connection for so long expects no such agent."""

_DECODER: Final[msgspec.json.Decoder[LaunchAgent | OrderFailed]] = msgspec.json.Decoder(
    LaunchAgent | OrderFailed
)


def main() -> int:
    """Return the exit code: a `JoinExit`, or 0 once the agent was dismissed."""
    limits = ShellLimits.replaced()
    # A Pod has no standard input. Its ranks do not see the variable.
    content = os.environ.pop(JOIN_ORDER, None) or sys.stdin.buffer.readline()
    order = msgspec.json.decode(content, type=JoinOrder)
    launch = ask(order)
    if isinstance(launch, JoinExit):
        return launch
    adopt_orphans()
    return run_agent(launch, limits)


def ask(order: JoinOrder) -> LaunchAgent | JoinExit:
    """Return what the coordinator says: how to start the agent, or why not to."""
    request = JoinRequest(
        job_uid=order.job_uid,
        host=order.host,
        agent_number=order.agent_number,
        token=order.token,
        nonce=token_bytes(NONCE_BYTES),
        node=platform.node(),
        protocol=PROTOCOL,
    )
    refused_since = math.inf
    address, attempts = order.coordinator, Reconnect(RETRY_SECONDS, ROUTE_SECONDS, print_stderr)
    assert address is not None  # noqa: S101  our machine is not the coordinator's
    for _ in attempts:
        try:
            with closing(ThreadLink(order, request, address)) as link:
                answer = _DECODER.decode(link.receive())
                if isinstance(answer, OrderFailed):
                    print_stderr(answer.message)
                    return JoinExit.REFUSED
                # Looked at now: the coordinator removes the file when this connection ends.
                return with_checkpoints(answer)
        except LINK_ERRORS as error:
            # It has closed the connection, or has another token for the agent.
            is_refused = isinstance(error, ConnectionResetError | AuthenticationFailed)
            refused_since = min(refused_since, time.monotonic()) if is_refused else math.inf
            if time.monotonic() >= refused_since + REFUSED_SECONDS:
                return JoinExit.REFUSED
            attempts.failed(error, f"cannot join at {address.host}:{address.port}: ")
    return JoinExit.NO_ROUTE


def run_agent(launch: LaunchAgent, limits: ShellLimits) -> int:
    """Run an agent to its end, and see to it that nothing of it is left."""
    root = Path(tempfile.mkdtemp(prefix="muster-"))
    files, file = JobFiles(root / "job"), DataDir(root).coordinator_address
    assignment = replace(launch.assignment, job_root=str(files.root), address_file=str(file))
    agent = launch_agent(replace(launch, assignment=assignment), limits)
    for number in signal.SIGTERM, signal.SIGUSR1:
        signal.signal(number, lambda _number, _frame: agent.terminate())
    status = agent.wait()
    kill_descendants()
    if send_remaining_logs(assignment, files):
        shutil.rmtree(root, ignore_errors=True)
    return JoinExit.AGENT_DIED if status else 0


def send_remaining_logs(assignment: AgentAssignment, files: JobFiles) -> bool:
    """Send what an agent has left; return whether all logs are sent."""
    if not files.root.exists():
        return True  # the agent has removed it
    is_ending = threading.Event()
    is_ending.set()
    sending = threading.Thread(target=send_logs, args=[assignment, is_ending], daemon=True)
    sending.start()
    sending.join(SENDER_GRACE_SECONDS)
    return not sending.is_alive()


if __name__ == "__main__":
    sys.exit(main())
