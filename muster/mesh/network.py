"""The processes of a household that this one is linked to: a thread with an event loop.

It accepts and makes links, probes who is at their other ends, and carries the messages by which
groups form. What follows from a message or a time is decided in `forming` and `health`; this
module only moves bytes and reads the clock.

Two processes may have two links, as each may call the other. Messages go over the one that was
open first at their sender, so their order is kept, and a peer that ends is gone with its last link.
A link that the network has cut is made again: whether the peer is gone, `health` decides.
"""

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias, TypeVar

import msgspec

from muster.contracts.errors import AuthenticationFailed, WireError, printable
from muster.links.serving import LinkServer, ServedLink, connect
from muster.links.session import Answerer, Caller, Session
from muster.mesh.forming import Closed, Forming, FormingMessage
from muster.mesh.health import Health, Preset
from muster.mesh.identity import Claim, MeshIdentity, claim_of

Address: TypeAlias = tuple[str, int]
Result = TypeVar("Result")

REDIAL_SECONDS: Final = 0.5
CONNECT_SECONDS: Final = 5.0
LEAVE_SECONDS: Final = 0.05
"""For the last words of this process."""

TOKEN_BYTES: Final = 32
NAME_LIMIT: Final = 64
"""Addresses that are called, and members that are remembered: strangers may announce any number."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """What a process is and waits for; sent first, and whenever it changes."""

    host: str
    """The name of the machine, for people."""
    port: int
    group: str | None = None
    """For which group it waits; None while it waits for none."""
    size: int | None = None
    known: tuple[str, ...] = ()
    """The ids of others that wait for the group."""
    clock: float = 0.0
    """Seconds since 1970 when it was sent."""
    turn: int = 0
    """Counts how often it has waited: an earlier group of the same name is over for it."""


class Probe(msgspec.Struct, frozen=True, kw_only=True, tag="probe"):
    """A question whether the other end lives; anything is an answer."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """To a probe."""


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """The process ends by itself: its calls are over, so it is not gone for others."""


class OfGroup(msgspec.Struct, frozen=True, kw_only=True, tag="of_group"):
    group: str
    message: FormingMessage


class Note(msgspec.Struct, frozen=True, kw_only=True, tag="note"):
    """Of a part of the program above this module, such as the store of a torch group."""

    topic: str
    payload: bytes


Message: TypeAlias = Hello | Probe | Answer | Leave | OfGroup | Note

_decoder: Final = msgspec.msgpack.Decoder(Message)
_encode: Final = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process of a group, as this one reaches it."""

    process_id: str
    node_id: str
    host: str
    address: Address

    def __str__(self) -> str:
        return f"{self.host} ({self.process_id})"


@dataclass(slots=True)
class _Peer:
    """A process that has proved itself."""

    claim: Claim
    hello: Hello
    links: list[ServedLink] = field(default_factory=list)
    host: str = ""
    """The address of its machine, as this one reaches it."""
    has_left: bool = False

    @property
    def member(self) -> Member:
        return Member(
            process_id=self.claim.process_id,
            node_id=self.claim.node_id,
            host=printable(self.hello.host)[:NAME_LIMIT],
            address=(self.host, self.hello.port),
        )


class Network:
    """The links of this process. Public methods are for other threads; `close` ends it."""

    def __init__(self, identity: MeshIdentity, listening: socket.socket, preset: Preset) -> None:
        """Take over a listening socket that never blocks."""
        self.own_id = identity.own.claim.process_id
        self.node_id = identity.own.claim.node_id
        self.port: int = listening.getsockname()[1]
        self.gone: dict[str, Member] = {}
        """Who was linked and is gone. Read by other threads, while calls wait."""
        self.warnings: dict[str, None] = {}
        """Why others were refused, each once."""
        self.readers: dict[str, Callable[[str, bytes], bytes | None]] = {}
        """What takes the notes of a topic, with the id of their sender, in the thread of the loop,
        and may answer."""
        self._identity = identity
        self._listening = listening
        self._health = Health(preset)
        self._peers: dict[str, _Peer] = {}
        self._addresses: dict[Address, str] = {}
        """Where processes were announced, and their ids as far as they are known."""
        self._calls: dict[Address, asyncio.Task[None]] = {}
        self._hello = Hello(host=socket.gethostname(), port=self.port)
        self._forming: Forming | None = None
        self._left: dict[str, int] = {}
        """In which turn the members of an earlier group were in it."""
        self._changed = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._server = LinkServer(self._answer, self._serve, self._warn)
        self._accepting: asyncio.Task[None] | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="muster mesh", daemon=True)
        self._thread.start()
        self._is_ready.wait()

    # For other threads

    def find(self, address: Address, process_id: str = "") -> None:
        """Call a process that was announced, again and again until it is linked."""
        self._loop.call_soon_threadsafe(self._find, address, process_id)

    def members(self) -> list[Member]:
        """Return who is linked now."""
        return self._do(lambda: [peer.member for peer in self._peers.values()])

    def hellos(self) -> list[tuple[Member, Hello]]:
        """Return who is linked now, and what each has said of itself last."""
        return self._do(lambda: [(peer.member, peer.hello) for peer in self._peers.values()])

    @property
    def identity(self) -> MeshIdentity:
        return self._identity

    def wait_for(self, group: str, size: int | None, after: Collection[str] = ()) -> None:
        """Begin to wait for a group; `formed` tells when it has come about.

        `after` are the members of an earlier group of this name.
        """

        def begin() -> None:
            living = [each for each in after if each in self._peers]
            make_token = partial(secrets.token_bytes, TOKEN_BYTES)
            self._forming = Forming(self.own_id, size, make_token, time.monotonic(), awaited=living)
            turn = self._hello.turn + 1
            self._say(msgspec.structs.replace(self._hello, group=group, size=size, turn=turn))
            for peer in self._peers.values():
                self._compare(peer)
            self._act()

        self._do(begin)

    def formed(self) -> Closed | None:
        return self._forming.closed if self._forming is not None else None

    def members_of(self, closed: Closed) -> list[Member]:
        """Return the members in the order of their ranks. Raises KeyError if one is gone."""

        def order() -> list[Member]:
            own = Member(
                process_id=self.own_id,
                node_id=self.node_id,
                host=self._hello.host,
                address=("", self.port),
            )
            others = [each for each in closed.members if each != self.own_id]
            members = [own, *(self._peers[each].member for each in others)]
            self._left = {each: self._peers[each].hello.turn for each in others}
            return sorted(members, key=lambda member: (member.node_id, member.process_id))

        return self._do(order)

    def waits_with(self) -> list[Member]:
        """Return who waits for the same group, and who is in one of that name."""
        full = self._forming.full if self._forming is not None else ()
        return self._do(lambda: [self._peers[one].member for one in full if one in self._peers])

    def stop_waiting(self) -> None:
        """Wait for no group any more."""

        def end() -> None:
            self._forming = None
            self._say(msgspec.structs.replace(self._hello, group=None, size=None, known=()))

        self._do(end)

    def send_note(self, process_id: str, topic: str, payload: bytes) -> None:
        """Send a note to a linked process; it is lost if the link breaks."""
        self._do(lambda: self._send(process_id, Note(topic=topic, payload=payload)))

    def lend_listener(self) -> socket.socket:
        """Return the socket that others connect to; this network accepts no more until `listen`."""

        def lend() -> socket.socket:
            if self._accepting is not None:
                self._accepting.cancel()
            return self._listening.dup()

        return self._do(lend)

    def listen(self) -> None:
        """Accept links again."""
        self._do(self._accept)

    def close(self) -> None:
        """Say that this process leaves, and end all links."""

        def leave() -> None:
            for process_id in self._peers:
                self._send(process_id, Leave())
            self._loop.call_later(LEAVE_SECONDS, self._loop.stop)

        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(leave)
            self._thread.join()

    def _do(self, work: Callable[[], Result]) -> Result:
        """Have the thread of the loop do something, and return its result."""
        done: Future[Result] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001  raised where it is waited for
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return done.result()

    # The thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._accept)
        self._loop.call_soon(self._is_ready.set)
        checking = self._loop.create_task(self._check())
        try:
            self._loop.run_forever()
        finally:
            tasks = [checking, *self._calls.values()]
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(self._server.stop())
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()

    def _accept(self) -> None:
        self._accepting = self._server.accept(self._listening, is_remote=True)

    async def _check(self) -> None:
        while True:
            seconds = min(self._wake_at() - time.monotonic(), 1.0)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), max(seconds, 0))
            self._changed.clear()
            # What has come is read before anyone is judged.
            for _ in range(3):
                await asyncio.sleep(0)
            probed, lost = self._health.check(time.monotonic())
            for process_id in probed:
                self._send(process_id, Probe())
            for process_id in lost:
                self._lose(process_id)
            self._advance()

    def _wake_at(self) -> float:
        forming = float("inf") if self._forming is None else self._forming.wake_at()
        return min(self._health.wake_at(), forming)

    # Links

    def _answer(self, _is_remote: bool) -> Session:  # noqa: FBT001  the server's signature
        return Answerer(lambda _: self._identity)

    def _warn(self, text: str) -> None:
        self.warnings[text] = None

    def _find(self, address: Address, process_id: str) -> None:
        is_linked = process_id in self._peers or process_id == self.own_id
        if not is_linked and address not in self._calls and len(self._calls) < NAME_LIMIT:
            self._calls[address] = self._loop.create_task(self._call(address))

    async def _call(self, address: Address) -> None:
        """Call until a link has ended by itself, or this process was called itself."""
        while True:
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    session = Caller(self._identity)
                    link = await connect(address, session)
                    link.send(_encode(self._current_hello()))
                    payload = await link.receive_one()
                await self._serve(link, payload)
            except AuthenticationFailed as error:
                self._warn(f"{address[0]} port {address[1]}: {error}")
            except (OSError, EOFError, WireError):
                pass
            await asyncio.sleep(REDIAL_SECONDS)

    async def _serve(self, link: ServedLink, payload: bytes) -> None:
        """Exchange messages until the link ends."""
        claim = claim_of(link.session.claim)
        hello = decode(payload)
        if not isinstance(hello, Hello) or claim.process_id == self.own_id:
            return
        has_ended = False
        with closing(link.writer):
            peer = self._join(claim, hello, link)
            try:
                while (payloads := await link.receive()) is not None:
                    for each in payloads:
                        self._receive(peer, decode(each))
                has_ended = True
            except ConnectionError:  # of the process; a time-out is of the network
                has_ended = True
            finally:
                peer.links.remove(link)
                if has_ended and not peer.links:
                    self._lose(claim.process_id)

    def _join(self, claim: Claim, hello: Hello, link: ServedLink) -> _Peer:
        peer = self._peers.get(claim.process_id)
        if peer is None:
            peer = self._peers[claim.process_id] = _Peer(claim=claim, hello=hello)
            self._health.add(claim.process_id, time.monotonic())
            self.gone.pop(claim.process_id, None)
        peer.host = link.writer.get_extra_info("peername")[0]
        peer.links.append(link)
        link.send(_encode(self._current_hello()))
        self._receive(peer, hello)
        return peer

    def _receive(self, peer: _Peer, message: Message) -> None:
        process_id = peer.claim.process_id
        self._health.answered(process_id)
        match message:
            case Hello():
                peer.hello = message
                self._compare(peer)
            case Probe():
                self._send(process_id, Answer())
            case Leave():
                peer.has_left = True
            case OfGroup(group=group, message=said) if self._forming and group == self._hello.group:
                self._forming.receive(process_id, said, time.monotonic())
            case Note(topic=topic, payload=payload) if topic in self.readers:
                if answer := self.readers[topic](process_id, payload):
                    self._send(process_id, Note(topic=topic, payload=answer))
        self._act()

    def _compare(self, peer: _Peer) -> None:
        """Meet a peer that waits for the same group, or lose one that does no more."""
        if self._forming is None:
            return
        now, process_id, hello = time.monotonic(), peer.claim.process_id, peer.hello
        sizes = {hello.size, self._hello.size} - {None}
        if hello.group != self._hello.group or len(sizes) > 1:
            self._forming.lose(process_id, now)
        elif hello.turn > self._left.get(process_id, 0):
            self._forming.meet(process_id, now, is_after=hello.size is None)
            for other in peer.hello.known:
                self._forming.mention(other, now)

    def _lose(self, process_id: str) -> None:
        peer = self._peers.pop(process_id, None)
        if peer is None:
            return
        self._health.remove(process_id)
        if not peer.has_left:
            self.gone[process_id] = peer.member
        while len(self.gone) > NAME_LIMIT:
            del self.gone[next(iter(self.gone))]
        for link in peer.links:
            link.writer.close()
        if self._forming is not None:
            self._forming.lose(process_id, time.monotonic())
            self._act()

    def _send(self, process_id: str, message: Message) -> None:
        if (peer := self._peers.get(process_id)) and peer.links:
            with suppress(OSError):
                peer.links[0].send(_encode(message))

    def _say(self, hello: Hello) -> None:
        self._hello = hello
        for process_id in self._peers:
            self._send(process_id, self._current_hello())

    def _current_hello(self) -> Hello:
        known = () if self._forming is None else tuple(sorted(self._forming.waiting))
        now = time.time()
        return msgspec.structs.replace(self._hello, known=known[:NAME_LIMIT], clock=now)

    def _act(self) -> None:
        """Send what follows from what has happened, and have the times judged anew."""
        self._advance()
        self._changed.set()

    def _advance(self) -> None:
        if self._forming is not None and self._hello.group is not None:
            self._forming.check(time.monotonic())
            due, self._forming.due = self._forming.due, []
            for process_id, message in due:
                self._send(process_id, OfGroup(group=self._hello.group, message=message))


def decode(payload: bytes) -> Message:
    """Return a message; raises `WireError`."""
    try:
        message: Message = _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise WireError(f"a process of the household sent an invalid message: {error}") from error
    return message
