"""What processes of a household say to each other over their links."""

from typing import Final, TypeAlias

import msgspec

from muster.cluster.members import MemberNode
from muster.contracts.errors import WireError
from muster.mesh.election import ElectionMessage, Rank
from muster.mesh.forming import FormingMessage
from muster.mesh.topology import Link, Machine


class ClusterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster of a node."""

    cluster_id: str
    founder: str
    """The id of the node that has its rows."""
    name: str
    """Of the founder's machine."""


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """The copy of the cluster's rows that a node has, by the rows written last.

    Each is an epoch and a number; that of a node that leads is above all others.
    """

    majority: tuple[int, int] = (0, 0)
    """Of the last row that was written while its leader had a majority of the members."""
    newest: tuple[int, int] = (0, 0)
    is_live: bool = False
    """Rows still come from a node that leads, and this copy has all."""

    @property
    def rank(self) -> Rank:
        """The greatest one is the base of what follows."""
        return self.majority, self.newest


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """What a process is and waits for; sent first, and whenever it changes."""

    host: str
    """The name of the machine, for people."""
    port: int
    group: str | None = None
    """For which group it waits; None while it waits for none."""
    size: int | None = None
    clock: float = 0.0
    """Seconds since 1970 when it was sent."""
    turn: int = 0
    """Counts what it has waited for: an earlier group of the same name is over for it. Of two
    links each has an order of its own, so an older hello may come later."""
    address: str = ""
    """Of this end of the link, in its first hello."""
    machine: Machine | None = None
    """What a node has; None for a script."""
    cluster: ClusterRecord | None = None
    """Of a node; None while it belongs to none."""
    script: str | None = None
    """The digest of what a `muster run --peers` runs; None for any other process."""
    is_leaving: bool = False
    """No rank is to be started on this node any more."""
    copy: Copy | None = None
    """Of a node; None while it has no rows, or those of another release."""

    def relayed_by(self, seen: str) -> str:
        """Return a warning if its sender is seen elsewhere: a stranger may announce a relay."""
        if self.address in ("", seen):
            return ""
        way = f"a link with {self.address} comes by way of {seen}, where it can be held up"
        return f"{way}: connect the machines directly"


class Probe(msgspec.Struct, frozen=True, kw_only=True, tag="probe"):
    """A question whether the other end lives; anything is an answer."""

    sent_at: float = 0.0
    """By the monotonic clock of its sender; the answer repeats it."""
    is_answer: bool = False


class ProbeFor(msgspec.Struct, frozen=True, kw_only=True, tag="probe_for"):
    """A request to probe another process: its sender has got no answer from it."""

    subject: str
    asked_at: float
    """By the monotonic clock of the sender; `Reached` repeats it."""


class Reached(msgspec.Struct, frozen=True, kw_only=True, tag="reached"):
    """The subject has sent something after the receiver had asked for it."""

    subject: str
    asked_at: float


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """The process ends by itself: its calls are over, so it is not gone for others."""


class OfGroup(msgspec.Struct, frozen=True, kw_only=True, tag="of_group"):
    group: str
    message: FormingMessage


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag="measured"):
    """Links between nodes."""

    links: tuple[Link, ...]


class Bulk(msgspec.Struct, frozen=True, kw_only=True, tag="bulk"):
    """The first message of a link that is measured.

    Its other end says the same, at first and once it has all.
    """


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag="attach"):
    """The first message of a link whose bytes are those of a `worker.attach` at its other end.

    Paths of its orders that are below a directory of the sender are below its own there.
    """

    data_dir: str
    home: str
    epoch: int = 0
    """Of the lease of the coordinator that sends them."""


class Relay(msgspec.Struct, frozen=True, kw_only=True, tag="relay"):
    """The first message of a link whose bytes are those of a connection to the API."""

    user: str | None
    """The user of the sender's node who connects, such as ``uid:1000``; None for any other."""
    home: str = ""
    """The home directory of that user."""


class Rows(msgspec.Struct, frozen=True, kw_only=True, tag="rows"):
    """The first message of a link over which a node gets the rows of the one that leads."""


class Roll(msgspec.Struct, frozen=True, kw_only=True, tag="roll"):
    """All members of a cluster, as the node that leads has them."""

    nodes: tuple[MemberNode, ...]
    has_majority: bool


class Ring(msgspec.Struct, frozen=True, kw_only=True, tag="ring"):
    """The nodes of the household in the order in which a ring of them is fastest.

    A node says it to the processes of its machine.
    """

    nodes: tuple[str, ...]


class Note(msgspec.Struct, frozen=True, kw_only=True, tag="note"):
    """Of a part of the program above this package, such as the store of a torch group."""

    topic: str
    payload: bytes


HealthMessage: TypeAlias = Probe | ProbeFor | Reached
NodeMessage: TypeAlias = ElectionMessage | Measured | Ring | Roll
FirstMessage: TypeAlias = Hello | Bulk | Attach | Relay | Rows
Message: TypeAlias = FirstMessage | HealthMessage | Leave | OfGroup | NodeMessage | Note

_decoder: Final = msgspec.msgpack.Decoder(Message)
encode: Final = msgspec.msgpack.Encoder().encode


def decode(payload: bytes) -> Message:
    """Return a message; raises `WireError`."""
    try:
        message: Message = _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise WireError(f"a process of the household sent an invalid message: {error}") from error
    return message
