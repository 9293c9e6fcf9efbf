"""A sealed connection to the coordinator for a process that has a thread for it.

The agent has none; see `worker.coordinator_link`.
"""

import socket
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

from muster.contracts.attach import JoinOrder
from muster.contracts.messages import AgentAssignment, CoordinatorAddress
from muster.contracts.sealing import agent_cipher
from muster.contracts.token import sha256_of
from muster.contracts.wire import decode_key_answer, frame
from muster.host.files import read_coordinator_address
from muster.host.peers import SEND_TIMEOUT_SECONDS, keep_alive
from muster.host.sealed_line import SealedLine, read_frame
from worker.coordinator_link import key_request


def home_line(
    own: AgentAssignment | JoinOrder, address: CoordinatorAddress, limit_bytes: int
) -> SealedLine:
    """Connect, and agree on the keys. No payload that comes is longer than `limit_bytes`.

    Raises OSError, `WireError` and `AuthenticationFailed`.
    """
    channel = socket.create_connection((address.host, address.port), SEND_TIMEOUT_SECONDS)
    try:
        request = key_request(own)
        channel.sendall(frame(request))
        answer = bytes(read_frame(channel, limit_bytes))
        decode_key_answer(answer)
        cipher = agent_cipher(sha256_of(own.token), request, answer, is_agent=True)
        # The coordinator may take its time. If it reads nothing for `SEND_TIMEOUT_SECONDS`, the
        # kernel ends the connection, and what was being sent is sent again.
        channel.settimeout(None)
        keep_alive(channel, SEND_TIMEOUT_SECONDS)
    except BaseException:
        channel.close()
        raise
    return SealedLine(channel, cipher, limit_bytes)


def coordinator_addresses(own: AgentAssignment) -> Iterator[CoordinatorAddress | None]:
    """Yield without end where the coordinator may be; None while nothing is known."""
    yield from cycle(own.coordinators)
    while True:  # a file names one only where none is given
        yield read_coordinator_address(Path(own.address_file))
