"""Another user of the machine at every port that Muster opens: agents' and ranks', wake-ups.

``python -m stress.security.strangers`` holds connections with half a frame or nothing in them at
the coordinator, floods it and ranks that meet over TCP with connections, and sends wake-ups. It
prints what that costs and how long jobs take meanwhile, and exits with 1 if a goal is missed. Only
root can be another user.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from database.engine import Database
from database.leases import Leases
from muster.host.addresses import read_coordinator_address
from stress.load.figures import Figure, at_most, none_of, report_of
from stress.runner import Report, main
from tests.support.installation import Installation, is_over, write_small_dataset
from tests.support.strangers import STRANGER, socket_of
from tests.support.usage import memory_bytes

MEMORY_GOAL_MIB = 8.0
LOG_GOAL_KIB = 8.0  # for each of the jobs, which have lines of their own
DELAY_GOAL_SECONDS = 3.0
HALF_FRAME = (1 << 20).to_bytes(8, "little") + bytes((1 << 20) - 1)

Address = tuple[str, int]
Attack = Callable[[Installation, ExitStack], object]


def strangers_figures(root: Path, *, connections: int, seconds: float) -> Iterator[Figure]:
    """Run each attack while jobs are submitted, and compare with none."""
    write_small_dataset(root / "shards")
    with Installation(root) as installation:
        attacks: dict[str, Attack] = {
            "none": lambda *_: None,
            "silent connections": partial(_hold, connections, b""),
            "half frames": partial(_hold, connections, HALF_FRAME),
            "connections without end": partial(_flood, lambda: [_agents_address(installation)]),
            "wake-ups without end": _send_wake_ups,
            "connections to ranks": partial(_flood, lambda: list(_rank_addresses(installation))),
        }
        for name, attack in attacks.items():
            yield from _figures_of(installation, name, attack, seconds)


def _figures_of(
    installation: Installation, name: str, attack: Attack, seconds: float
) -> Iterator[Figure]:
    pid, log = installation.coordinator.pid, installation.coordinator.log
    memory, size = memory_bytes(pid, "VmRSS"), log.stat().st_size
    delays, faults = [], []
    with ExitStack() as attackers:
        attack(installation, attackers)
        until = time.monotonic() + seconds
        while not delays or time.monotonic() < until:
            began = time.monotonic()
            ids = [installation.submit(command=["true"], world_size=1)]
            ids.append(installation.submit(mode="synchronous", world_size=3, backend="tcp"))
            for job_id in ids:
                seen = installation.wait_until(job_id, is_over)
                delays += [time.monotonic() - began] if job_id == ids[0] else []
                if seen["status"] != "COMPLETED" or sum(it["restarts"] for it in seen["workers"]):
                    faults.append(installation.describe(job_id))
    yield at_most(f"{name}: a new job takes", max(delays), DELAY_GOAL_SECONDS, " s")
    grown = (memory_bytes(pid, "VmHWM") - memory) / (1 << 20)
    yield at_most("  memory of the coordinator grows by", grown, MEMORY_GOAL_MIB, " MiB")
    written = (log.stat().st_size - size) / 1024 / (2 * len(delays))
    yield at_most("  its log grows for each job by", written, LOG_GOAL_KIB, " KiB")
    yield none_of("  jobs that failed or were restarted", faults)


def _agents_address(installation: Installation) -> Address:
    address = read_coordinator_address(installation.files.coordinator_address)
    assert address is not None
    return address.host, address.port


def _rank_addresses(installation: Installation) -> Iterator[Address]:
    """Yield where the ranks of all jobs listen."""
    for record in installation.running_ranks():
        with suppress(psutil.Error):
            for found in psutil.Process(record.pid).net_connections("tcp"):
                if found.status == psutil.CONN_LISTEN:
                    yield found.laddr


def _hold(count: int, content: bytes, installation: Installation, held: ExitStack) -> None:
    address = _agents_address(installation)
    for _ in range(count):
        connection = held.enter_context(socket_of(STRANGER))
        connection.settimeout(1.0)
        with suppress(OSError):  # closed already
            connection.connect(address)
            connection.setblocking(False)  # noqa: FBT003  the standard library's signature
            connection.send(content)


def _flood(addresses: Callable[[], list[Address]], _: Installation, attackers: ExitStack) -> None:
    def connect_to_all() -> None:
        for address in addresses():
            for _ in range(100):
                with suppress(OSError), socket_of(STRANGER) as connection:
                    connection.settimeout(0.1)
                    connection.connect(address)

    attackers.enter_context(_repeated(connect_to_all))


def _send_wake_ups(installation: Installation, attackers: ExitStack) -> None:
    database = Database.open(f"sqlite:///{installation.files.root}/muster.db")
    lease = Leases(database).current()
    database.close()
    assert lease is not None
    host, _, port = lease.address.rpartition(":")
    sender = attackers.enter_context(socket.socket(type=socket.SOCK_DGRAM))

    def send() -> None:
        for _ in range(100):
            sender.sendto(b"", (host, int(port)))

    attackers.enter_context(_repeated(send))


@contextmanager
def _repeated(act: Callable[[], None]) -> Iterator[None]:
    """Repeat an action in a thread until the end of the block."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(0.001):
            act()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def run(directory: Path, *, connections: int = 1000, seconds: float = 20.0) -> Report:
    """Attack in six ways, each for so many seconds."""
    return report_of(list(strangers_figures(directory, connections=connections, seconds=seconds)))


if __name__ == "__main__":
    main(run)
