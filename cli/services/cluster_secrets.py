"""The secrets of jobs: the node that leads keeps them, and has copies on those that may lead."""

from math import inf
from typing import Final

import msgspec

from muster.contracts.errors import MusterError
from muster.mesh.messages import Hello, Message, Note
from muster.mesh.network import Network, Peer
from muster.mesh.node import Node
from muster.runtime.secrets import SecretStore

SECRETS: Final = "secrets"
"""The topic of notes to the node that leads; their answers have the same."""

COPIES: Final = "copies of secrets"
"""The topic of notes to nodes that may lead later."""


class SecretCall(msgspec.Struct, frozen=True, kw_only=True):
    """Keep a secret, remove it if it has no text, or list all if there is no name either."""

    name: str | None = None
    text: bytes | None = None


class SecretAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The names of all secrets, or why what was asked is not done."""

    names: tuple[str, ...] = ()
    problem: str = ""


class SecretCopy(msgspec.Struct, frozen=True, kw_only=True):
    """One secret, if any, for a node that may lead later; it has no others than `names`."""

    names: tuple[str, ...]
    name: str = ""
    text: bytes = b""


class ClusterSecrets:
    """A part of the network of a node: other nodes ask the one that leads, and have copies."""

    def __init__(self, network: Network, node: Node, store: SecretStore) -> None:
        self._network = network
        self._node = node
        self._store = store
        network.readers[SECRETS] = self._answer
        network.readers[COPIES] = self._take
        network.attach(self)

    def receive(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Hello):
            self.renew(peer)

    def renew(self, peer: Peer) -> None:
        copy = peer.hello.copy
        if self._node.leads and copy is not None and copy.is_live:
            try:
                self._send(peer.process_id)
            except (MusterError, OSError) as error:
                self._network.warn(f"secrets of jobs cannot be copied to other nodes: {error}")

    def lose(self, peer: Peer) -> None: ...

    def check(self) -> None: ...

    def wake_at(self) -> float:
        return inf

    def _answer(self, _: str, payload: bytes) -> bytes:
        if not self._node.leads:
            return msgspec.json.encode(SecretAnswer(problem="this node does not lead: try again"))
        call = SecretCall()
        try:
            call = msgspec.json.decode(payload, type=SecretCall)
            if call.name is not None and call.text is not None:
                self._store.put(call.name, call.text.decode(errors="surrogateescape"))
            elif call.name is not None:
                self._store.remove(call.name)
            answer = SecretAnswer(names=tuple(self._store.names()))
        except (MusterError, OSError, msgspec.MsgspecError) as error:
            answer = SecretAnswer(problem=str(error))
        if call.name is not None:
            for peer in self._network.peers.values():
                self.renew(peer)
        return msgspec.json.encode(answer)

    def _send(self, process_id: str) -> None:
        names = tuple(self._store.names())
        copies = [
            SecretCopy(
                names=names,
                name=name,
                text=self._store.read(name).encode(errors="surrogateescape"),
            )
            for name in names
        ]
        for copy in copies or [SecretCopy(names=())]:
            self._network.send(process_id, Note(topic=COPIES, payload=msgspec.json.encode(copy)))

    def _take(self, process_id: str, payload: bytes) -> None:
        if process_id != self._node.process_of(self._node.master or ""):
            return
        try:
            copy = msgspec.json.decode(payload, type=SecretCopy)
            for name in {*self._store.names()} - {*copy.names}:
                self._store.remove(name)
            if copy.name:
                self._store.put(copy.name, copy.text.decode(errors="surrogateescape"))
        except (MusterError, OSError, msgspec.MsgspecError) as error:
            self._network.warn(f"a secret of the cluster cannot be kept: {error}")
