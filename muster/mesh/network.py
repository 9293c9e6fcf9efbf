"""The processes of a household that this one is linked to: a thread with an event loop.

It accepts and makes links, probes who is at their other ends, and carries the messages by which
groups form. What follows from a message or a time is decided in `forming` and `health`; this
module only moves bytes and reads the clock.

Two processes may have two links, as each may call the other. Messages go over the one that was
open first at their sender, so their order is kept, and a peer that ends is gone with its last link.
A link that the network has cut is made again: whether the peer is gone, `health` decides.
"""

import asyncio
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

import msgspec

from muster.contracts.errors import AuthenticationFailed, MusterError, WireError, printable
from muster.links.serving import LinkServer, ServedLink, connect, duplicate, release
from muster.links.session import Answerer, Caller
from muster.mesh import messages
from muster.mesh.calls import Address, Calls
from muster.mesh.forming import Closed, Forming
from muster.mesh.health import Health, Preset
from muster.mesh.identity import Claim, Member, MeshIdentity, claim_of
from muster.mesh.messages import Hello, Leave, Message, Note, OfGroup, Probe, ProbeFor

Result = TypeVar("Result")

LEAVE_SECONDS: Final = 0.05  # for the last words of this process
TOKEN_BYTES: Final = 32
NAME_LIMIT: Final = 64  # of members of a group, and of refusals that are remembered


@dataclass(slots=True)
class _Peer:
    """A process that has proved itself."""

    claim: Claim
    hello: Hello
    links: list[ServedLink] = field(default_factory=list)
    has_left: bool = False

    @property
    def member(self) -> Member:
        return Member(
            process_id=self.claim.process_id,
            node_id=self.claim.node_id,
            host=printable(self.hello.host)[:NAME_LIMIT],
            # The newest link: older ones may be of an address that is gone.
            address=(_host_of(self.links[-1]) if self.links else "", self.hello.port),
        )


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
        self._counts = {"network.reconnects": 0, "peers.gone": 0}
        self._listening = listening
        self._health = Health(preset, random.SystemRandom())
        self._peers: dict[str, _Peer] = {}
        self._calls = Calls(self._call)
        self._hello = Hello(host=socket.gethostname(), port=self.port)
        self._forming: Forming | None = None
        self._formed: Future[Closed] = Future()
        self._left: dict[str, int] = {}
        """In which turn the members of an earlier group were in it."""
        self._unlinked: set[str] = set()
        """Those of them that this process has not met yet."""
        self._changed = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._server = LinkServer(lambda _: Answerer(lambda _: identity), self._serve, self._warn)
        self._thread = threading.Thread(target=self._run, name="muster mesh", daemon=True)
        self._thread.start()
        self.listen()

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

    def counters(self) -> dict[str, float]:
        """Return what happened to links and peers."""
        latency_seconds = self._health.summary().latency_seconds or 0.0
        now = {"network.latency_ms": latency_seconds * 1e3, "peers.linked": len(self._peers)}
        return now | self._counts

    def wait_for(self, group: str, size: int | None, after: Collection[str] = ()) -> Future[Closed]:
        """Begin to wait for a group, and return what becomes it.

        `after` are the members of an earlier group of this name.
        """

        def begin() -> Future[Closed]:
            self._formed = Future()
            self._unlinked.clear()
            living = [each for each in after if each in self._peers]
            make_token = partial(secrets.token_bytes, TOKEN_BYTES)
            self._forming = Forming(self.own_id, size, make_token, time.monotonic(), awaited=living)
            self._say(msgspec.structs.replace(self._hello, group=group, size=size))
            for peer in self._peers.values():
                self._compare(peer)
            self._act()
            return self._formed

        return self._do(begin)

    def members_of(self, closed: Closed) -> list[Member]:
        """Return the members in the order of their ranks. Raises KeyError if one is gone."""

        def order() -> list[Member]:
            own = Member(self.own_id, self.node_id, self._hello.host, ("", self.port))
            others = [each for each in closed.members if each != self.own_id]
            members = [own, *(self._peers[each].member for each in others)]
            return sorted(members, key=lambda member: (member.node_id, member.process_id))

        return self._do(order)

    def departed(self, closed: Closed) -> set[str]:
        """Return the other members that are not linked any more, or have begun to meet anew."""

        def look() -> set[str]:
            together = {each for each, peer in self._peers.items() if not self._waits_now(peer)}
            return {*closed.members} - together - {self.own_id}

        return self._do(look)

    def living_members(self) -> list[Member]:
        """Return the linked members of a group of the awaited name that lives already."""

        def look() -> list[Member]:
            full = self._forming.full if self._forming is not None else ()
            return [self._peers[one].member for one in full if one in self._peers]

        return self._do(look)

    def stop_waiting(self) -> None:
        """Wait for no group any more."""

        def end() -> None:
            self._forming = None
            self._say(msgspec.structs.replace(self._hello, group=None, size=None))

        self._do(end)

    def send_note(self, process_id: str, topic: str, payload: bytes) -> None:
        """Send a note to a linked process; it is lost if the link breaks."""
        self._do(lambda: self._send(process_id, Note(topic=topic, payload=payload)))

    def lend_listener(self) -> socket.socket:
        """Return the socket that others connect to; this network accepts no more until `listen`."""

        def lend() -> socket.socket:
            self._accepting.cancel()
            return duplicate(self._listening)

        return self._do(lend)

    def listen(self) -> None:
        """Accept links, at first or again."""
        self._accepting = self._do(partial(self._server.accept, self._listening, is_remote=True))

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

        async def run() -> Result:
            return work()

        if not self._thread.is_alive():
            raise MusterError(
                "the links to the household are closed, or of the parent of this process: call "
                "discover(peers=…) here"
            )
        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    # The thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        checking = self._loop.create_task(self._check())
        try:
            self._loop.run_forever()
        finally:
            tasks = [checking, *self._calls.tasks.values()]
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(self._server.stop())
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()

    async def _check(self) -> None:
        while True:
            seconds = min(self._wake_at() - time.monotonic(), 1.0)
            with suppress(TimeoutError):
                # Not `wait_for`, which may lose a cancellation before Python 3.12.
                async with asyncio.timeout(max(seconds, 0)):
                    await self._changed.wait()
            self._changed.clear()
            # What has come is read before anyone is judged.
            for _ in range(3):
                await asyncio.sleep(0)
            now = time.monotonic()
            due = self._health.check(now)
            for process_id in due.probed:
                self._send(process_id, Probe(sent_at=now))
            for helper, subject in due.indirect:
                self._send(helper, ProbeFor(subject=subject, asked_at=now))
            for process_id in due.lost:
                self._lose(process_id)
            self._health.events.clear()
            self._advance()

    def _wake_at(self) -> float:
        forming = float("inf") if self._forming is None else self._forming.wake_at()
        return min(self._health.wake_at(), forming)

    # Links

    def _warn(self, text: str) -> None:
        self.warnings[text] = None
        while len(self.warnings) > NAME_LIMIT:
            del self.warnings[next(iter(self.warnings))]

    def _find(self, address: Address, process_id: str) -> None:
        peer = self._peers.get(process_id)
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
                    link.send(messages.encode(self._current_hello(link)))
                    payload = await link.receive_one()
                    is_linked = True
                    limit.reschedule(None)
                    await self._serve(link, payload)
        except AuthenticationFailed as error:
            self._warn(f"{address[0]} port {address[1]}: {error}")
        except (OSError, EOFError, WireError):
            pass
        return is_linked

    async def _serve(self, link: ServedLink, payload: bytes) -> None:
        """Exchange messages until the link ends."""
        claim = claim_of(link.session.claim)
        hello = messages.decode(payload)
        if not isinstance(hello, Hello):
            return
        if warning := hello.relayed_by(_host_of(link)):
            self._warn(warning)
            return
        has_ended = False
        peer = self._join(claim, hello, link)
        try:
            while (payloads := await link.receive()) is not None:
                for each in payloads:
                    self._receive(peer, messages.decode(each))
            has_ended = True
        except ConnectionError:  # of the process; a time-out is of the network
            has_ended = True
        except OSError:
            self.cut[claim.process_id, _host_of(link)] = time.monotonic()
            raise
        finally:
            peer.links.remove(link)
            if self._peers.get(claim.process_id) is peer:
                if peer.links:
                    self._renew(peer)
                elif has_ended:
                    self._lose(claim.process_id)

    def _join(self, claim: Claim, hello: Hello, link: ServedLink) -> _Peer:
        peer = self._peers.get(claim.process_id)
        if peer is None:
            peer = self._peers[claim.process_id] = _Peer(claim=claim, hello=hello)
            self._health.add(claim.process_id, time.monotonic())
            self.gone.discard(claim.process_id)
            if claim.process_id in self._unlinked:
                self._unlinked.remove(claim.process_id)
                self._left[claim.process_id] = hello.turn
        elif not peer.links:
            self._counts["network.reconnects"] += 1
        peer.links.append(link)
        link.send(messages.encode(self._current_hello(link)))
        self._receive(peer, hello)
        return peer

    def _receive(self, peer: _Peer, message: Message) -> None:
        process_id = peer.claim.process_id
        for to, reply in self._health.receive(process_id, message, time.monotonic()):
            self._send(to, reply)
        match message:
            case Hello(turn=turn) if turn >= peer.hello.turn:  # else it was overtaken
                peer.hello = message
                self._compare(peer)
            case Leave():
                peer.has_left = True
            case OfGroup(group=group, message=said) if self._forming and group == self._hello.group:
                if self._waits_now(peer):  # not the last words of an earlier group
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
            if hello.group == self._hello.group:
                self._warn(
                    f"{peer.member} has asked for {hello.size} in the group {hello.group!r}, and "
                    f"this process for {self._hello.size}: give all the same number of peers"
                )
            self._forming.lose(process_id, now)
        elif self._waits_now(peer):
            self._forming.meet(process_id, now, is_after=hello.size is None)
        elif (closed := self._forming.closed) and process_id in closed.members:
            # Its link is new: the first word of this may be lost.
            self._send(process_id, OfGroup(group=hello.group or "", message=closed))

    def _waits_now(self, peer: _Peer) -> bool:
        return peer.hello.turn > self._left.get(peer.claim.process_id, 0)

    def _renew(self, peer: _Peer) -> None:
        """Begin anew over another link: words may be lost with the old one."""
        if self._forming is not None:
            self._forming.lose(peer.claim.process_id, time.monotonic(), is_renewed=True)
        self._send(peer.claim.process_id, self._current_hello())
        self._compare(peer)
        self._act()

    def _lose(self, process_id: str) -> None:
        peer = self._peers.pop(process_id, None)
        if peer is None:
            return
        self._health.remove(process_id)
        if not peer.has_left:
            self.gone.add(process_id)
            self._counts["peers.gone"] += 1
        for link in peer.links:
            link.writer.transport.abort()  # what is not sent yet will never be
        if self._forming is not None:
            self._forming.lose(process_id, time.monotonic())
            self._act()

    def _send(self, process_id: str, message: Message) -> None:
        if peer := self._peers.get(process_id):
            is_probe = isinstance(message, Probe)  # one of two links may be cut
            links = [link for link in peer.links if not link.writer.is_closing()]
            for link in links if is_probe else links[:1]:
                with suppress(OSError):
                    link.send(messages.encode(message))

    def _say(self, hello: Hello) -> None:
        self._hello = msgspec.structs.replace(hello, turn=hello.turn + 1)
        for process_id in self._peers:
            self._send(process_id, self._current_hello())

    def _current_hello(self, link: ServedLink | None = None) -> Hello:
        address = "" if link is None else _host_of(link, "sockname")
        return msgspec.structs.replace(self._hello, clock=time.time(), address=address)

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
            closed = self._forming.closed
            if closed is not None and not self._formed.done():
                # Now: a member may wait for the next one before this one's thread has seen it.
                turns = {each: peer.hello.turn for each, peer in self._peers.items()}
                self._left |= {each: turns[each] for each in closed.members if each in turns}
                self._unlinked = {*closed.members} - {*turns, self.own_id}
                self._formed.set_result(closed)


os.register_at_fork(after_in_child=release)


def _host_of(link: ServedLink, end: str = "peername") -> str:
    return str(link.writer.get_extra_info(end)[0])
