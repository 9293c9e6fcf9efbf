"""What `muster mesh doctor` finds at the other end of a connection."""

import asyncio
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from muster.links.frames import frame
from muster.links.serving import LinkServer, ServedLink, listen
from muster.links.session import Answerer
from muster.mesh.announce import Announced
from muster.mesh.doctor import Check, examine
from muster.mesh.group import PORTS
from muster.mesh.health import PRESETS
from muster.mesh.identity import MeshIdentity, mesh_identity
from muster.mesh.network import Hello, Network

KEY = b"k" * 32


def identity(directory: Path, name: str = "home", key: bytes = KEY) -> MeshIdentity:
    return mesh_identity(name, directory / "node.key", key)


def network(own: MeshIdentity, host: str = "127.0.0.1", ports: Iterable[int] = (0,)) -> Network:
    for port in ports:  # others may run on this machine
        with suppress(OSError):
            return Network(own, listen(host, port), PRESETS["default"])
    raise OSError("no port is free")


def announced(port: int) -> Announced:
    return Announced("p-1", ("127.0.0.1",), port, "laptop", "n-1", "home", "1")


def examined(own: MeshIdentity, heard: Announced | None, *names: str) -> Mapping[str, Check]:
    """Return the checks by the last words of what they are about."""
    with closing(network(own)) as from_here:
        checks = asyncio.run(examine(from_here, [heard] if heard else [], names))
    return {check.about.split()[-1]: check for check in checks}


@contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """Yield the port of a program that says this to one connection and waits for its end."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            peer, _ = listening.accept()
            with peer:
                peer.sendall(answer)
                while peer.recv(4096):
                    pass

        thread = Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1]
        thread.join()


def test_a_good_machine_passes_every_check(tmp_path: Path) -> None:
    own = identity(tmp_path)
    with closing(network(identity(tmp_path))) as other:
        found = examined(own, announced(other.port))
    assert {check.fix for name, check in found.items() if name not in ("machine", "cable")} == {""}
    assert found["heard"].seen == "n-1 of cluster 'home', protocol 1"
    assert found["reachable"].seen == f"127.0.0.1:{other.port}"
    assert {"trusted", "clock", "cable"} <= found.keys()


@pytest.mark.parametrize(
    ("name", "key", "seen", "fix"),
    [
        ("home", b"x" * 32, "another secret", "remove cluster.key where it is wrong"),
        ("lab", KEY, "the cluster 'lab'", "set MUSTER_CLUSTER_NAME to the same name on both"),
    ],
)
def test_another_secret_and_name_differ(
    tmp_path: Path, name: str, key: bytes, seen: str, fix: str
) -> None:
    with closing(network(identity(tmp_path, name, key))) as other:
        found = examined(identity(tmp_path), announced(other.port))
    assert found["reachable"].fix == ""
    assert seen in found["trusted"].seen
    assert fix in found["trusted"].fix
    assert "clock" not in found


@pytest.mark.parametrize(
    ("answer", "seen", "fix"),
    [
        (frame(b"muster\0\x7f"), "links of protocol 127", "install the same Muster"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "another program", "end what listens there"),
        (frame(b"x" * 200), "another program", "end what listens there"),
    ],
)
def test_other_programs_are_named(tmp_path: Path, answer: bytes, seen: str, fix: str) -> None:
    with answering(answer) as port:
        found = examined(identity(tmp_path), announced(port))
    assert seen in found["trusted"].seen
    assert fix in found["trusted"].fix


def test_a_closed_port_names_the_firewalls(tmp_path: Path) -> None:
    with closing(listen("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    found = examined(identity(tmp_path), announced(port))
    assert found["reachable"].seen == "no, 127.0.0.1: Connection refused"
    assert "TCP ports 52416-52447" in found["reachable"].fix
    assert found.keys() == {"machine", "heard", "reachable", "cable"}


def test_a_clock_that_is_years_off_is_said(tmp_path: Path) -> None:
    own, started = identity(tmp_path), asyncio.new_event_loop()

    async def serve(link: ServedLink, _: bytes) -> None:
        link.send(msgspec.msgpack.encode(Hello(host="laptop", port=1, clock=0.0)))
        await link.receive()

    listening = listen("127.0.0.1", 0)
    other = identity(tmp_path)
    server = LinkServer(lambda _: Answerer(lambda _: other), serve, print)
    started.call_soon(lambda: server.accept(listening, is_remote=True))
    thread = Thread(target=started.run_forever)
    thread.start()
    clock = examined(own, announced(listening.getsockname()[1]))["clock"]
    asyncio.run_coroutine_threadsafe(server.stop(), started).result()
    started.call_soon_threadsafe(started.stop)
    thread.join()
    started.close()
    assert clock.seen.startswith("-")
    assert (clock.fix, clock.is_warning) == ("set both clocks, by NTP", True)


def test_a_machine_that_is_not_heard_is_called_at_every_port(tmp_path: Path) -> None:
    with closing(network(identity(tmp_path), "127.0.0.9", PORTS)) as other:
        found = examined(identity(tmp_path), None, "127.0.0.9")
    assert (found["heard"].seen, found["heard"].is_warning) == ("no announcement", True)
    assert str(other.port) in found["reachable"].seen
    assert found["trusted"].fix == ""


def test_names_choose_among_what_is_heard(tmp_path: Path) -> None:
    nothing, unknown = examined(identity(tmp_path), None), "no such name"
    assert nothing["others"].seen == "none is heard"
    assert "UDP port 5353" in nothing["others"].fix
    assert "`ip address`" in examined(identity(tmp_path), None, unknown)["address"].fix
    for name in ("laptop", "n-1", "p-1", "127.0.0.1"):
        assert "cluster 'home'" in examined(identity(tmp_path), announced(1), name)["heard"].seen
