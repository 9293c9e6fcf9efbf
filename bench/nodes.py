"""How soon nodes of a household have a master, what they cost, and what their ring gains.

    python -m bench.nodes [ROUNDS] [RESTARTS]

Hosts of the tests, the mesh of `muster node` on each. Times are from the start of the processes,
and from the cut of the master's host, until the last of the others follows one.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Final

import psutil

from tests.support.homes import HomeScript, ask_all, household
from tests.support.hosts import Host, hosts, refusal
from tests.support.nodes import nodes

RESTART_SECONDS: Final = 5.0
IDLE_SECONDS: Final = 60.0
IDLE_HOSTS: Final = 10
RATE: Final = "200mbit"
DEFAULT_CLASS: Final = 10
SLOW_RATE: Final = "20mbit"
RING_HOSTS: Final = 6
ELEMENTS: Final = 4 << 20
SUMS: Final = 3


def elect(made: list[Host]) -> float:
    """Return the seconds until nodes that start at once have one master."""
    with nodes(made) as running:
        began_at = time.monotonic()
        running.start(*made)
        running.await_master(made)
        return time.monotonic() - began_at


def cut(made: list[Host], rounds: int) -> list[float]:
    """Return the seconds until the others have another master, each time it is cut off."""
    taken = []
    with nodes(made) as running:
        running.start(*made)
        for _ in range(rounds):
            master = running.await_master(made)
            lost = next(host for host in made if running.ids[host] == master)
            others = [host for host in made if host is not lost]
            time.sleep(2)
            began_at = time.monotonic()
            lost.cut(*others)
            running.await_master(others, master)
            taken.append(time.monotonic() - began_at)
            lost.heal()
    return taken


def restart(made: list[Host], restarts: int) -> int:
    """Return how often the master changes while another node is killed and starts again."""
    with nodes(made) as running:
        running.start(*made)
        master, changes = running.await_master(made), 0
        restless = next(host for host in made if running.ids[host] != master)
        for _ in range(restarts):
            running.kill(restless)
            running.start(restless)
            time.sleep(RESTART_SECONDS)
            now = running.await_master(made)
            changes += now != master
            master = now
    return changes


def idle(made: list[Host]) -> dict[str, float]:
    """Return what one node costs when nothing happens."""
    with nodes(made) as running:
        running.start(*made)
        master = running.await_master(made)
        time.sleep(IDLE_SECONDS)  # all links are measured
        host = next(host for host in made if running.ids[host] == master)
        process = psutil.Process(running.pid(host))
        before, sent = sum(process.cpu_times()[:2]), sent_bytes(process.pid)
        time.sleep(IDLE_SECONDS)
        return {
            "of a core, %": 100 * (sum(process.cpu_times()[:2]) - before) / IDLE_SECONDS,
            "memory, MB": process.memory_info().rss / 1e6,
            "sent by the master, B/s": (sent_bytes(process.pid) - sent) / IDLE_SECONDS,
        }


def sent_bytes(pid: int) -> int:
    """Return what has left the host of a process."""
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()
    (fields,) = (line.split() for line in lines if line.strip().startswith("eth0:"))
    return int(fields[9])


def ring(made: list[Host], directory: Path) -> float:
    """Return by which factor the ring of the nodes is faster than the order of ids.

    Two pairs that follow each other in the order of ids have a tenth of the rate.
    """
    with nodes(made) as running, household(directory) as home:
        by_id = sorted(made, key=lambda host: running.ids[host])
        for one, other in ((0, 1), (3, 4)):
            slow(by_id[one], by_id[other])
            slow(by_id[other], by_id[one])
        home.secret = running.secret
        scripts = [home.start(host, MUSTER_DATA_DIR=str(host.local / "node")) for host in made]
        for script in scripts:
            script.answer()
        plain = sums(scripts, "plain")
        for script in scripts:
            script.call("close")
        running.start(*made)
        running.await_master(made)
        time.sleep(IDLE_SECONDS)  # all links are measured
        return plain / sums(scripts, "ring")


def sums(scripts: list[HomeScript], group: str) -> float:
    """Return the median seconds of a sum of 16 MB around the ring of ranks."""
    met = ask_all(scripts, "discover", peers=len(scripts) - 1, group=group)
    print(f"  {group}: ranks {[said['rank'] for said in met]}")
    taken = [ask_all(scripts, "reduce", size=ELEMENTS, route="ring") for _ in range(SUMS)]
    return median(max(float(said["seconds"]) for said in answers) for answers in taken)


def slow(host: Host, other: Host) -> None:
    """Give what one host sends to another a tenth of the rate."""
    number = DEFAULT_CLASS + 1 + other.number
    if "htb" not in host.run("tc", "qdisc", "show", "dev", "eth0"):
        host.run(*f"tc qdisc replace dev eth0 root handle 1: htb default {DEFAULT_CLASS}".split())
        host.run(
            *f"tc class add dev eth0 parent 1: classid 1:{DEFAULT_CLASS} htb rate {RATE}".split()
        )
    host.run(*f"tc class add dev eth0 parent 1: classid 1:{number} htb rate {SLOW_RATE}".split())
    which = f"protocol ip u32 match ip dst {other.address}/32 flowid 1:{number}"
    host.run(*f"tc filter add dev eth0 parent 1: {which}".split())


def main(rounds: int, restarts: int) -> int:
    if reason := refusal():
        print(f"left out: no hosts can be made here: {reason}")
        return 0
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        directory = Path(name)
        with hosts(3, directory / "three") as made:
            show("three nodes, one master", [elect(made) for _ in range(rounds)], 5.0)
            show("master cut off, another", cut(made, rounds), 6.0)
            changes = restart(made, restarts)
            print(f"{restarts} restarts of a follower: {changes} changes of the master (goal 0)")
        with hosts(IDLE_HOSTS, directory / "ten") as made:
            for what, value in idle(made).items():
                print(f"{IDLE_HOSTS} idle nodes: {what:24} {value:.2f}")
        with hosts(RING_HOSTS, directory / "six") as made:
            print(f"ring of {RING_HOSTS} against ids: {ring(made, directory):.2f} x (goal 1.5)")
    return 0


def show(name: str, seconds: list[float], goal_seconds: float) -> None:
    ranked = sorted(seconds)
    late = ranked[int(0.95 * (len(ranked) - 1) + 0.5)]
    print(f"{name}: median {median(ranked):.2f} s, p95 {late:.2f} s (goal {goal_seconds:g})")


if __name__ == "__main__":
    sys.exit(main(*map(int, [*sys.argv[1:], *["20", "100"][len(sys.argv) - 1 :]])))
