"""A sealed connection to the coordinator for a process that has a thread for it.

The agent has none; see `worker.coordinator_link`.
"""

import select
import socket
from secrets import token_bytes
from typing import Protocol

from muster.contracts.messages import NONCE_BYTES, CoordinatorAddress, KeyRequest
from muster.contracts.sealing import agent_cipher
from muster.contracts.token import sha256_of
from muster.contracts.wire import PREFIX_BYTES, decode_key_answer, encode, frame, frame_length
from muster.host.peers import SEND_TIMEOUT_SECONDS, keep_alive


class Identity(Protocol):
    """What proves to the coordinator that it started an agent."""

    @property
    def job_uid(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def generation(self) -> int: ...
    @property
    def token(self) -> str: ...


class HomeLine:
    """Sends and receives payloads.

    Its methods raise OSError, `WireError` and `AuthenticationFailed`.
    """

    def __init__(self, own: Identity, address: CoordinatorAddress, limit_bytes: int) -> None:
        """Connect, and agree on the keys. No payload that comes is longer than `limit_bytes`."""
        self._limit_bytes = limit_bytes
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(SEND_TIMEOUT_SECONDS)
            self._socket.connect((address.host, address.port))
            request = encode(
                KeyRequest(
                    job_uid=own.job_uid,
                    host=own.host,
                    generation=own.generation,
                    nonce=token_bytes(NONCE_BYTES),
                )
            )
            self._socket.sendall(frame(request))
            answer = self._payload()
            decode_key_answer(answer)
            self._cipher = agent_cipher(sha256_of(own.token), request, answer, is_agent=True)
            self._socket.settimeout(None)  # a full disk at home may hold us up for any time
            keep_alive(self._socket, SEND_TIMEOUT_SECONDS)
        except BaseException:
            self._socket.close()
            raise

    def send(self, payload: bytes) -> None:
        self._socket.sendall(frame(self._cipher.seal(payload)))

    def receive(self) -> bytes:
        return self._cipher.open(self._payload())

    def has_news(self, seconds: float) -> bool:
        """Wait, at most until something has come; return whether it has."""
        return bool(select.select([self._socket], [], [], seconds)[0])

    def close(self) -> None:
        self._socket.close()

    def _payload(self) -> bytes:
        return self._read(frame_length(self._read(PREFIX_BYTES), self._limit_bytes))

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._socket.recv(count - len(data))
            if not more:
                raise ConnectionResetError("the coordinator has closed the connection")
            data += more
        return data
