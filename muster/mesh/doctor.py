"""What stands between this process and another machine of the household.

Each address is called as any process calls it, so a check that passes is one that a group passes.
"""

import asyncio
import os
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, suppress
from typing import Final, NamedTuple

import psutil

from muster.contracts.errors import AuthenticationFailed, WireError
from muster.links.serving import connect
from muster.links.session import Caller, ProtocolDiffers
from muster.mesh.announce import Announced, own_addresses
from muster.mesh.calls import Address
from muster.mesh.group import PORTS
from muster.mesh.messages import Hello, Leave, decode, encode
from muster.mesh.network import Network

REACH_SECONDS: Final = 3.0
CLOCK_SECONDS: Final = 60.0
MTU_BYTES: Final = 1500
CABLE_MBIT: Final = 1000

_RANGE: Final = f"{PORTS[0]}-{PORTS[-1]}"
_LISTENER: Final = "leave `muster mesh --for 60` running there while this command runs"
_FIREWALLS: Final = f"{_LISTENER}; let TCP ports {_RANGE} through the firewalls of both machines"
_MULTICAST: Final = (
    f"{_LISTENER}; let UDP port 5353 through the firewalls of both machines, and see that the "
    "router does not keep its Wi-Fi guests apart"
)


class Check(NamedTuple):
    """What was seen; `fix` says what to do about it, empty if it is good."""

    about: str
    seen: str
    fix: str = ""
    is_warning: bool = False
    """Of a disadvantage: it works all the same."""


class _Called(NamedTuple):
    """What came of calling an address."""

    host: str
    port: int
    problem: str = ""
    is_reached: bool = True
    ahead_seconds: float = 0.0
    """Of the clock there, if there is no problem."""


async def examine(
    network: Network, heard: Collection[Announced], named: Sequence[str]
) -> list[Check]:
    """Return the checks of each machine that is named; if none is, of each that is announced."""
    own = ", ".join(own_addresses())
    seen = f"{network.node_id} at {own or 'no address'} port {network.port}"
    fix = "" if own else "connect it to a network: only processes of this machine can be found"
    checks = [Check("this machine", seen, fix, is_warning=True)]
    if not named and not heard:
        checks.append(Check("others", "none is heard", _MULTICAST))
    for name in named or sorted({one.host for one in heard}):
        ids = {one: (one.host, one.node_id, one.process_id, *one.addresses) for one in heard}
        found = [one for one in heard if name in ids[one]]
        for one in found:
            seen = f"{one.node_id} of cluster {one.cluster!r}, protocol {one.protocol}"
            checks.append(Check(f"{name} heard", seen))
            checks += await _reach(network, name, [(each, one.port) for each in one.addresses])
        if not found:
            checks.append(Check(f"{name} heard", "no announcement", _MULTICAST, is_warning=True))
            try:
                hosts = socket.gethostbyname_ex(name)[2]
                tried = [(host, port) for host in hosts for port in PORTS]
                checks += await _reach(network, name, tried)
            except (OSError, UnicodeError) as error:
                fix = "write the IPv4 address that `ip address` prints there"
                checks.append(Check(f"{name} address", f"not heard, nor known: {error}", fix))
    return checks


async def _reach(network: Network, name: str, addresses: Sequence[Address]) -> list[Check]:
    called = await asyncio.gather(*(_call(network, *address) for address in addresses))
    reached = [one for one in called if one.is_reached]
    cable = list(_cable(name, addresses[0][0]))
    if not reached:
        seen = "; ".join(sorted({f"{one.host}: {one.problem}" for one in called}))
        return [Check(f"{name} reachable", f"no, {seen}", _FIREWALLS), *cable]
    best = min(reached, key=lambda one: one.problem)
    checks = [Check(f"{name} reachable", ", ".join(f"{one.host}:{one.port}" for one in reached))]
    if best.problem:
        seen, _, fix = best.problem.partition(": ")
        return [*checks, Check(f"{name} trusted", seen, fix or "end what listens there"), *cable]
    is_off = abs(best.ahead_seconds) > CLOCK_SECONDS
    ahead_seconds = round(best.ahead_seconds, 1) + 0.0  # not -0.0
    seen, fix = f"{ahead_seconds:+} s", "set both clocks, by NTP" if is_off else ""
    checks.append(Check(f"{name} trusted", "same protocol, cluster and secret"))
    return [*checks, Check(f"{name} clock", seen, fix, is_warning=True), *cable]


async def _call(network: Network, host: str, port: int) -> _Called:
    session = Caller(network.identity)
    try:
        async with asyncio.timeout(REACH_SECONDS):
            link = await connect((host, port), session)
    except TimeoutError:
        return _Called(host, port, "no answer", is_reached=False)
    except OSError as error:
        problem = os.strerror(error.errno) if error.errno else str(error)
        return _Called(host, port, problem, is_reached=False)
    own = Hello(host=socket.gethostname(), port=network.port)
    with closing(link.writer), suppress(OSError, EOFError, WireError):
        try:
            async with asyncio.timeout(REACH_SECONDS):
                link.send(encode(own))
                hello = decode(await link.receive_one())
                link.send(encode(Leave()))
                await link.writer.drain()
            if isinstance(hello, Hello):
                return _Called(host, port, ahead_seconds=hello.clock - time.time())
        except AuthenticationFailed as error:
            if session.claim == network.identity.claim:
                return _Called(host, port, "only this command listens", is_reached=False)
            if session.claim or isinstance(error, ProtocolDiffers):
                return _Called(host, port, str(error))
    return _Called(host, port, "another program answers there, or one that is too busy")


def _cable(name: str, host: str) -> Iterator[Check]:
    """Yield what this machine's interface to the other one says of itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, suppress(OSError):
        asked.connect((host, PORTS[0]))  # sends nothing
        own = asked.getsockname()[0]
        for interface, addresses in psutil.net_if_addrs().items():
            if own in (one.address for one in addresses):
                found = psutil.net_if_stats()[interface]
                fix = "; ".join(
                    ["1500 is usual: less is that of a tunnel"] * (found.mtu < MTU_BYTES)
                    + ["take a cable and a port of 1 Gbit/s"] * (0 < found.speed < CABLE_MBIT)
                )
                speed = f"{found.speed} Mbit/s" if found.speed else "speed not known, as of Wi-Fi"
                seen = f"{interface}: MTU {found.mtu}, {speed}"
                yield Check(f"{name} cable", seen, fix, is_warning=True)
