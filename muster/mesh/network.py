"""The processes of a household that this one is linked to: a thread with an event loop.

It accepts and makes links, probes who is at their other ends, and hands what comes over them to its
parts: the group that forms here, and the node of this machine. Whether a peer is lost is decided in
`health`; this module only moves bytes and reads the clock.

Two processes may have two links, as each may call the other. Messages go over the one that was
open first at their sender, so their order is kept, and a peer that ends is gone with its last link.
A link that the network has cut is made again: whether the peer is gone, `health` decides.
"""

import asyncio
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import msgspec

from muster.contracts.errors import AuthenticationFailed, MusterError, WireError, printable
from muster.host.processes import since_boot
from muster.links.serving import LinkServer, ServedLink, Work, connect, duplicate, release
from muster.links.session import Answerer, Caller
from muster.mesh import bandwidth
from muster.mesh.calls import Address, Calls
from muster.mesh.health import Health, Preset
from muster.mesh.identity import Claim, Member, MeshIdentity, claim_of
from muster.mesh.messages import (
    Bulk,
    Hello,
    Leave,
    Message,
    Note,
    Probe,
    ProbeFor,
    decode,
    encode,
)

Result = TypeVar("Result")

LEAVE_SECONDS: Final = 0.05  # for the last words of this process
NAME_LIMIT: Final = 64  # of members of a group, and of refusals that are remembered


@dataclass(slots=True)
class Peer:
    """A process that has proved itself."""

    claim: Claim
    hello: Hello
    """What it has said of itself last."""
    links: list[ServedLink] = field(default_factory=list)
    has_left: bool = False

    @property
    def process_id(self) -> str:
        return self.claim.process_id

    @property
    def node_id(self) -> str:
        return self.claim.node_id

    @property
    def ends(self) -> frozenset[str]:
        """The addresses of both ends of the newest link; none while there is no link."""
        ends = ("sockname", "peername") if self.links else ()
        return frozenset(_host_of(self.links[-1], end) for end in ends)

    @property
    def own_host(self) -> str:
        """The address of this machine at the newest link, "" while there is none."""
        return _host_of(self.links[-1], "sockname") if self.links else ""

    @property
    def member(self) -> Member:
        return Member(
            process_id=self.process_id,
            node_id=self.node_id,
            host=printable(self.hello.host)[:NAME_LIMIT],
            # The newest link: older ones may be of an address that is gone.
            address=(_host_of(self.links[-1]) if self.links else "", self.hello.port),
        )


class Part(Protocol):
    """What decides by the messages of peers and by times. A network calls it in its own thread."""

    def receive(self, peer: Peer, message: Message) -> None:
        """Take a message, whatever it is about. The first of each link is a hello."""

    def renew(self, peer: Peer) -> None:
        """Say again what may have been lost with one of two links."""

    def lose(self, peer: Peer) -> None:
        """Take that a peer is gone."""

    def check(self) -> None:
        """Send what is due: at `wake_at`, and after anything has happened."""

    def wake_at(self) -> float:
        """Return when `check` is due; infinity if something has to happen before."""


class Network:
    """The links of this process. Public methods are for other threads; `close` ends it."""

    def __init__(self, identity: MeshIdentity, listening: socket.socket, preset: Preset) -> None:
        """Take over a listening socket that never blocks."""
        self.identity = identity
        self.own_id = identity.own.process_id
        self.node_id = identity.own.node_id
        self.port: int = listening.getsockname()[1]
        self.gone: set[str] = set()
        """Who was linked and is gone. Read by other threads, while calls wait."""
        self.cut: dict[tuple[str, str], float] = {}
        """By whose process and host the network has cut a link, and when. Read likewise."""
        self.warnings: dict[str, None] = {}
        """Why others were refused, each once."""
        self.readers: dict[str, Callable[[str, bytes], bytes | None]] = {}
        """What takes the notes of a topic, with the id of their sender, in the thread of the loop,
        and may answer."""
        self.servers: dict[type[Message], Callable[[ServedLink, Claim, Any], Work]] = {}
        """What serves the links of a first message of this type, in the thread of the loop."""
        self._counts = {"network.reconnects": 0, "peers.gone": 0}
        self._listening = listening
        self.health = Health(preset, random.SystemRandom())
        self.peers: dict[str, Peer] = {}
        """Who is linked, by process id. Of the thread of the loop."""
        self._calls = Calls(self._call)
        self.hello = Hello(host=socket.gethostname(), port=self.port)
        self._parts: list[Part] = []
        self._changed = asyncio.Event()
        self._planned_at = float("inf")
        """When parts and peers are judged next, if nothing happens before."""
        self._loop = asyncio.new_event_loop()
        self._server = LinkServer(lambda _: Answerer(lambda _: identity), self._serve, self.warn)
        self._checking = self._loop.create_task(self._check())
        self._thread = threading.Thread(target=self._run, name="muster mesh", daemon=True)
        self._thread.start()
        self.listen()

    # For its parts, in the thread of the loop

    @property
    def own_member(self) -> Member:
        return Member(self.own_id, self.node_id, self.hello.host, ("", self.port))

    def say(self, **fields: Any) -> None:  # noqa: ANN401  of a hello
        """Change what this process says of itself, and say it to all."""
        self.hello = msgspec.structs.replace(self.hello, **fields, turn=self.hello.turn + 1)
        for process_id in self.peers:
            self.send(process_id, self._current_hello())

    def act(self) -> None:
        """Send what follows from what has happened, and have the times judged anew."""
        self._check_parts()
        if self._wake_at() < self._planned_at:
            self._changed.set()

    def send(self, process_id: str, message: Message) -> None:
        if peer := self.peers.get(process_id):
            is_probe = isinstance(message, Probe)  # one of two links may be cut
            links = [link for link in peer.links if not link.writer.is_closing()]
            for link in links if is_probe else links[:1]:
                with suppress(OSError, WireError):  # the latter: of more than a hundred nodes
                    link.send(encode(message))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that ends with the network."""
        self._server.run(work)

    def warn(self, text: str) -> None:
        """Keep a warning for people, each once."""
        self.warnings[text] = None
        while len(self.warnings) > NAME_LIMIT:
            del self.warnings[next(iter(self.warnings))]

    # For other threads

    def do(self, work: Callable[[], Result]) -> Result:
        """Have the thread of the loop do something, and return its result."""

        async def run() -> Result:
            return work()

        if not self._thread.is_alive():
            raise MusterError(
                "the links to the household are closed, or of the parent of this process: call "
                "discover(peers=…) here"
            )
        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def attach(self, part: Part) -> None:
        """Have a part take what comes from now on, and who is linked already."""

        def begin() -> None:
            self._parts.append(part)
            for peer in self.peers.values():
                part.receive(peer, peer.hello)

        self.do(begin)

    def find(self, address: Address, process_id: str = "") -> None:
        """Call a process that was announced, again and again until it is linked."""
        self._loop.call_soon_threadsafe(self._find, address, process_id)

    def members(self) -> list[Member]:
        """Return who is linked now."""
        return self.do(lambda: [peer.member for peer in self.peers.values()])

    def hellos(self) -> list[tuple[Member, Hello]]:
        """Return who is linked now, and what each has said of itself last."""
        return self.do(lambda: [(peer.member, peer.hello) for peer in self.peers.values()])

    def counters(self) -> dict[str, float]:
        """Return what happened to links and peers."""
        latency_seconds = self.health.summary().latency_seconds or 0.0
        now = {"network.latency_ms": latency_seconds * 1e3, "peers.linked": len(self.peers)}
        return now | self._counts

    def send_note(self, process_id: str, topic: str, payload: bytes) -> None:
        """Send a note to a linked process; it is lost if the link breaks."""
        self.do(lambda: self.send(process_id, Note(topic=topic, payload=payload)))

    def lend_listener(self) -> socket.socket:
        """Return the socket that others connect to; this network accepts no more until `listen`."""

        def lend() -> socket.socket:
            self._accepting.cancel()
            return duplicate(self._listening)

        return self.do(lend)

    def listen(self) -> None:
        """Accept links, at first or again."""
        self._accepting = self.do(partial(self._server.accept, self._listening, is_remote=True))

    @property
    def is_alive(self) -> bool:
        """False once the thread has ended, which it does by itself after a fault alone."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Say that this process leaves, and end all links."""

        def leave() -> None:
            for process_id in self.peers:
                self.send(process_id, Leave())
            self._loop.call_later(LEAVE_SECONDS, self._checking.cancel)

        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(leave)
            self._thread.join()

    # The thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._checking)  # it ends by `close`, or by a fault
        finally:
            tasks = [self._checking, *self._calls.tasks.values()]
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(self._server.stop())
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()

    async def _check(self) -> None:
        while True:
            self._planned_at = self._wake_at()
            seconds = min(self._planned_at - since_boot(), 1.0)
            with suppress(TimeoutError):
                # Not `wait_for`, which may lose a cancellation before Python 3.12.
                async with asyncio.timeout(max(seconds, 0)):
                    await self._changed.wait()
            self._changed.clear()
            # What has come is read before anyone is judged.
            for _ in range(3):
                await asyncio.sleep(0)
            now = since_boot()
            due = self.health.check(now)
            for process_id in due.probed:
                self.send(process_id, Probe(sent_at=now))
            for helper, subject in due.indirect:
                self.send(helper, ProbeFor(subject=subject, asked_at=now))
            for process_id in due.lost:
                self._lose(process_id)
            self._check_parts()
            self.health.events.clear()

    def _wake_at(self) -> float:
        return min([self.health.wake_at(), *(part.wake_at() for part in self._parts)])

    # Links

    def _find(self, address: Address, process_id: str) -> None:
        peer = self.peers.get(process_id)
        # Under another address it has another link: one of them may go, with its network.
        is_linked = peer is not None and address[0] in map(_host_of, peer.links)
        if not is_linked and process_id != self.own_id:
            self._calls.add(address)

    async def _call(self, address: Address, timeout_seconds: float) -> bool:
        """Return whether there was a link, once it has ended."""
        is_linked = False
        try:
            async with asyncio.timeout(timeout_seconds) as limit:
                link = await connect(address, Caller(self.identity))
                with closing(link.writer):
                    link.send(encode(self._current_hello(link)))
                    payload = await link.receive_one()
                    is_linked = True
                    limit.reschedule(None)
                    await self._serve(link, payload)
        except AuthenticationFailed as error:
            self.warn(f"{address[0]} port {address[1]}: {error}")
        except (OSError, EOFError, WireError):
            pass
        return is_linked

    async def _serve(self, link: ServedLink, payload: bytes) -> None:
        """Do what the first message of a link asks for."""
        claim = claim_of(link.session.claim)
        match decode(payload):
            case Bulk():
                await bandwidth.take(link)
            case Hello() as hello:
                if warning := hello.relayed_by(_host_of(link)):
                    self.warn(warning)
                else:
                    await self._exchange(link, claim, hello)
            case first if serve := self.servers.get(type(first)):
                await serve(link, claim, first)
            case _:
                pass

    async def _exchange(self, link: ServedLink, claim: Claim, hello: Hello) -> None:
        """Exchange messages until the link ends."""
        has_ended = False
        peer = self._join(claim, hello, link)
        try:
            while (payloads := await link.receive()) is not None:
                for each in payloads:
                    self._receive(peer, decode(each), link)
            has_ended = True
        except ConnectionError:  # of the process; a time-out is of the network
            has_ended = True
        except OSError:
            self.cut[claim.process_id, _host_of(link)] = since_boot()
            raise
        finally:
            peer.links.remove(link)
            if self.peers.get(claim.process_id) is peer:
                if peer.links:
                    self._renew(peer)
                elif has_ended:
                    self._lose(claim.process_id)

    def _join(self, claim: Claim, hello: Hello, link: ServedLink) -> Peer:
        peer = self.peers.get(claim.process_id)
        if peer is None:
            peer = self.peers[claim.process_id] = Peer(claim=claim, hello=hello)
            self.health.add(claim.process_id, since_boot())
            self.gone.discard(claim.process_id)
        elif not peer.links:
            self._counts["network.reconnects"] += 1
        peer.links.append(link)
        link.send(encode(self._current_hello(link)))
        self._receive(peer, hello, link)
        return peer

    def _receive(self, peer: Peer, message: Message, link: ServedLink) -> None:
        process_id = peer.claim.process_id
        for to, reply in self.health.receive(process_id, message, since_boot()):
            if isinstance(reply, Probe) and reply.is_answer:  # over the link that is probed
                link.send(encode(reply))
            else:
                self.send(to, reply)
        match message:
            case Hello(turn=turn):
                if turn < peer.hello.turn:  # it was overtaken
                    return
                peer.hello = message
            case Leave():
                peer.has_left = True
            case Note(topic=topic, payload=payload) if topic in self.readers:
                answer = self.readers[topic](process_id, payload)
                if answer is not None:
                    self.send(process_id, Note(topic=topic, payload=answer))
        for part in self._parts:
            part.receive(peer, message)
        self.act()

    def _renew(self, peer: Peer) -> None:
        """Begin anew over another link: words may be lost with the old one."""
        self.send(peer.process_id, self._current_hello())
        for part in self._parts:
            part.renew(peer)
        self.act()

    def _lose(self, process_id: str) -> None:
        peer = self.peers.pop(process_id, None)
        if peer is None:
            return
        self.health.remove(process_id)
        if not peer.has_left:
            self.gone.add(process_id)
            self._counts["peers.gone"] += 1
        for link in peer.links:
            link.writer.transport.abort()  # what is not sent yet will never be
        for part in self._parts:
            part.lose(peer)
        self.act()

    def _current_hello(self, link: ServedLink | None = None) -> Hello:
        address = "" if link is None else _host_of(link, "sockname")
        return msgspec.structs.replace(self.hello, clock=time.time(), address=address)

    def _check_parts(self) -> None:
        for part in self._parts:
            part.check()


os.register_at_fork(after_in_child=release)


def _host_of(link: ServedLink, end: str = "peername") -> str:
    return str(link.writer.get_extra_info(end)[0])
