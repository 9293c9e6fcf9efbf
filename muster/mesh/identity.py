"""Who a process of a household is, and by what it proves that: a secret, and keys of its own.

Each process makes an Ed25519 key for its life, and has its id from that. The key of its node
signs it, so others know which machine it is on; the node's key itself stays in its file.

Both ends say in clear: the name of the cluster, which tells another household from a wrong secret;
the key of the process, that of the node, and the signature of one by the other.
"""

import hmac
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from muster.cluster.identity import id_of, node_key
from muster.contracts.errors import AuthenticationFailed, printable
from muster.links.identity import PROOF_BYTES, Identity, Kind

_SIGNATURE_BYTES: Final = 64
_VOUCHES: Final = b"muster: a process of this node"


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """What a process says of itself in clear."""

    cluster: str
    key: bytes
    """Public, made anew by each process."""
    node_key: bytes
    """Public."""
    signature: bytes
    """Of `key`, by the key of the node."""

    @property
    def node_id(self) -> str:
        return id_of(self.node_key)

    @property
    def process_id(self) -> str:
        return f"p-{sha256(self.key).hexdigest()[:16]}"


class Member(msgspec.Struct, frozen=True):
    """One process of a group, as this one reaches it."""

    process_id: str
    node_id: str
    host: str
    address: tuple[str, int]
    """Host and port."""

    def __str__(self) -> str:
        return f"{self.host} ({self.process_id})"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshIdentity(Identity):
    """Proves the secret by a digest, and the process by a signature of the same words."""

    own: Claim
    """The same as `claim`, decoded."""
    private: Ed25519PrivateKey = field(repr=False)
    """Of `own.key`."""

    @property
    def proof_bytes(self) -> int:
        return PROOF_BYTES + _SIGNATURE_BYTES

    def prove(self, role: bytes, said: bytes) -> bytes:
        return Identity.prove(self, role, said) + self.private.sign(role + said)

    def check(self, role: bytes, said: bytes, proof: bytes, claim: bytes) -> None:
        other = claim_of(claim)
        if other.cluster != self.own.cluster:
            raise AuthenticationFailed(
                f"the other end is of the cluster {printable(other.cluster)!r}, this process of "
                f"{self.own.cluster!r}: set MUSTER_CLUSTER_NAME to the same name on both"
            )
        if other.key == self.own.key:
            raise AuthenticationFailed("this process has called itself")
        digest, signature = proof[:PROOF_BYTES], proof[PROOF_BYTES:]
        if not hmac.compare_digest(Identity.prove(self, role, said), digest):
            raise AuthenticationFailed(
                "the other end has another secret: remove cluster.key where it is wrong, "
                "then type muster mesh join there"
            )
        try:
            Ed25519PublicKey.from_public_bytes(other.key).verify(signature, role + said)
            node = Ed25519PublicKey.from_public_bytes(other.node_key)
            node.verify(other.signature, _VOUCHES + other.key)
        except (InvalidSignature, ValueError) as error:
            raise AuthenticationFailed(
                "the other end does not have the key that it names"
            ) from error


def mesh_identity(cluster: str, node_file: Path, secret: bytes) -> MeshIdentity:
    """Return the identity of this process at either end of a link, with a key made now.

    The key of the node, in `node_file`, signs it. `secret` is that of `secret.shared_key`. Raises
    `UnusableDirectory`.
    """
    private, node = Ed25519PrivateKey.generate(), node_key(node_file)
    public = private.public_key().public_bytes_raw()
    signature = node.sign(_VOUCHES + public)
    own = Claim(cluster, public, node.public_key().public_bytes_raw(), signature)
    said = msgspec.msgpack.encode(own)
    return MeshIdentity(Kind.MESH, said, secret, answer=said, own=own, private=private)


def claim_of(said: bytes) -> Claim:
    """Return what another process has said. Raises `AuthenticationFailed`."""
    try:
        return msgspec.msgpack.decode(said, type=Claim)
    except msgspec.MsgspecError as error:
        raise AuthenticationFailed("this is not a process of a household") from error
