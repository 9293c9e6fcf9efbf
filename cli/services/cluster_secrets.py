"""The secrets of jobs, which the node that leads keeps for all machines of its cluster."""

from collections.abc import Callable
from typing import Final

import msgspec

from muster.contracts.errors import MusterError
from muster.mesh.network import Network
from muster.runtime.secrets import SecretStore

SECRETS: Final = "secrets"
"""The topic of notes to the node that leads; their answers have the same."""


class SecretCall(msgspec.Struct, frozen=True, kw_only=True):
    """Keep a secret, remove it if it has no text, or list all if there is no name either."""

    name: str | None = None
    text: bytes | None = None


class SecretAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The names of all secrets, or why what was asked is not done."""

    names: tuple[str, ...] = ()
    problem: str = ""


def serve_secrets(network: Network, leads: Callable[[], bool], store: SecretStore) -> None:
    """Answer others for as long as this node `leads`. Links are sealed."""

    def answer(_: str, payload: bytes) -> bytes:
        if not leads():
            return msgspec.json.encode(SecretAnswer(problem="this node does not lead: try again"))
        try:
            return msgspec.json.encode(_perform(msgspec.json.decode(payload, type=SecretCall)))
        except (MusterError, OSError, msgspec.MsgspecError) as error:
            return msgspec.json.encode(SecretAnswer(problem=str(error)))

    def _perform(call: SecretCall) -> SecretAnswer:
        if call.name is not None and call.text is not None:
            store.put(call.name, call.text.decode(errors="surrogateescape"))
        elif call.name is not None:
            store.remove(call.name)
        return SecretAnswer(names=tuple(store.names()))

    network.readers[SECRETS] = answer
