"""A stranger on the network of test hosts, with everything but the secret; run on one of them.

It records what all send, and forges announcements: of names that are none, and as if it had each
name that a process asks for. After each line that it reads it repeats what it has heard, in
connections that it never ends, at each address of its arguments. It needs a hub.
"""

import json
import socket
import sys
import time
from contextlib import suppress
from itertools import product
from pathlib import Path
from select import select
from typing import TypeAlias

from zeroconf import DNSIncoming, DNSOutgoing, DNSPointer

from muster.mesh.announce import SERVICE

Stream: TypeAlias = tuple[bytes, int, bytes, int]
"""Address and port of the sender, and of the receiver."""

GROUP, PORT = "224.0.0.251", 5353
RESPONSE, PTR, IN, LIFE_SECONDS = 0x8400, 12, 1, 4500
EVERY_PROTOCOL = 3
IPV4, TCP, UDP, SYN = b"\x08\x00", 6, 17, 2
NAMES = "x", "x._http._tcp.local.", SERVICE, f"x.{SERVICE}".upper()
PAUSE_SECONDS = 0.2
CONNECT_SECONDS = 1.0
GARBAGE = (1 << 63).to_bytes(8, "little") * 8


class Intruder:
    def __init__(self, own: str, record: Path) -> None:
        self._frames = socket.socket(
            socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PROTOCOL)
        )
        self._frames.bind(("eth0", 0))
        self._forging = socket.socket(type=socket.SOCK_DGRAM)
        self._forging.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(own))
        self._forging.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._forging.bind((own, PORT))  # others take no announcement from another port
        self._record = record.open("wb")
        self._streams: dict[Stream, dict[int, bytes]] = {}
        self._called: set[int] = set()
        self._kept: list[socket.socket] = []

    def listen(self) -> None:
        """Return once there is a line to read."""
        at = time.monotonic()
        while sys.stdin not in select([sys.stdin, self._frames], [], [], PAUSE_SECONDS)[0]:
            if time.monotonic() >= at:
                self._forge(*NAMES)
                at = time.monotonic() + PAUSE_SECONDS
            if select([self._frames], [], [], 0)[0]:
                self._take(self._frames.recv(1 << 16))
        self._record.flush()

    def repeat(self, addresses: list[str]) -> int:
        """Return how many connections were made."""
        said = {b"".join(parts[at] for at in sorted(parts)) for parts in self._streams.values()}
        before = len(self._kept)
        for place in product(addresses, self._called):
            for content in [*said, GARBAGE, b""]:
                with suppress(OSError):  # nothing listens there
                    self._kept.append(socket.create_connection(place, CONNECT_SECONDS))
                    self._kept[-1].sendall(content)
        return len(self._kept) - before

    def _take(self, frame: bytes) -> None:
        if frame[12:14] != IPV4:
            return
        self._record.write(frame)
        packet = frame[14:]
        packet = packet[: int.from_bytes(packet[2:4], "big")]
        behind = packet[(packet[0] & 15) * 4 :]
        ports = int.from_bytes(behind[:2], "big"), int.from_bytes(behind[2:4], "big")
        if packet[9] == TCP:
            stream = (packet[12:16], ports[0], packet[16:20], ports[1])
            if behind[13] == SYN:
                self._called.add(ports[1])
            if content := behind[(behind[12] >> 4) * 4 :]:
                number = int.from_bytes(behind[4:8], "big")
                self._streams.setdefault(stream, {}).setdefault(number, content)
        elif packet[9] == UDP and ports[1] == PORT:
            heard = DNSIncoming(behind[8:])
            if heard.is_query():
                self._forge(*{each.alias for each in heard.answers() if hasattr(each, "alias")})

    def _forge(self, *names: str) -> None:
        for name in names:
            said = DNSOutgoing(RESPONSE)
            said.add_answer_at_time(DNSPointer(SERVICE, PTR, IN, LIFE_SECONDS, name), 0)
            for packet in said.packets():
                self._forging.sendto(packet, (GROUP, PORT))


if __name__ == "__main__":
    intruder = Intruder(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    while True:
        intruder.listen()
        if not sys.stdin.readline():
            break
        said = {"connections": intruder.repeat(sys.argv[3:])}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
