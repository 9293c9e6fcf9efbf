"""How soon nodes of a household have a master, what they cost, and what their ring gains.

    python -m bench.nodes [ROUNDS] [RESTARTS]
    python -m bench.nodes jobs [ROUNDS]

Hosts of the tests, the mesh of `muster node` on each. Times are from the start of the processes,
and from the cut of the master's host, until the last of the others follows one.

`jobs` measures jobs over three of them: from the start of the nodes to the first step, from the
start of another node to its first step with the others, and the steps per second against SSH.
"""

import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil

from tests.support.clusters import cluster
from tests.support.homes import HomeScript, ask_all, household
from tests.support.hosts import Host, hosts, refusal
from tests.support.installation import await_value
from tests.support.nodes import JOB, Cluster, nodes

RESTART_SECONDS: Final = 5.0
IDLE_SECONDS: Final = 60.0
IDLE_HOSTS: Final = 10
RATE: Final = "200mbit"
DEFAULT_CLASS: Final = 10
SLOW_RATE: Final = "20mbit"
RING_HOSTS: Final = 6
ELEMENTS: Final = 4 << 20
SUMS: Final = 3
PAIRS: Final = 3
RATE_EPOCHS: Final = 40
SLOW: Final = {"epochs": 1000, "sleep_sec": 0.2}
"""The steps of a job that leaves a joining node the processor."""
LIMIT_SECONDS: Final = 180.0


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


def first_step(directory: Path) -> float:
    """Return the seconds from the start of three nodes to the first step of a job.

    The job is submitted on the last one at once, where the command waits for a node that leads.
    """
    with running_cluster(directory) as nodes_of:
        began_at = time.time()
        host = nodes_of.nodes.hosts[-1]
        nodes_of.nodes.start(*nodes_of.nodes.hosts)
        job = nodes_of.submit(host, epochs=1000)
        return await_step(nodes_of, host, job, [0], began_at) - began_at


def join(directory: Path) -> tuple[float, float]:
    """Return the seconds from the start of a third node to a step of a running job with its ranks.

    The second figure is the processor time that the processes of its host have used.
    """
    with running_cluster(directory) as nodes_of:
        *first, late = nodes_of.nodes.hosts
        nodes_of.nodes.start(*first)
        job = nodes_of.submit(first[0], world_size=8, max_workers=12, min_workers=1, **SLOW)
        await_step(nodes_of, first[0], job, range(8))
        nodes_of.ask(first[0], f"/jobs/{job}", "PATCH", world_size=12)
        time.sleep(IDLE_SECONDS / 10)  # what has begun with the first nodes is over
        began_at = time.time()
        nodes_of.nodes.start(late)
        taken = await_step(nodes_of, first[0], job, range(12), began_at) - began_at
        used = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in late.processes()]
        return taken, sum(used)


@contextmanager
def running_cluster(directory: Path) -> Iterator[Cluster]:
    """Yield three hosts whose nodes are not started yet."""
    with (
        tempfile.TemporaryDirectory(dir=directory) as root,
        hosts(3, Path(root)) as made,
        nodes(made, ["cli", "node"]) as running,
    ):
        yield Cluster(running, Path(root) / "job.json")


def await_step(
    nodes_of: Cluster, host: Host, job: str, ranks: Iterable[int], after: float = 0.0
) -> float:
    """Return when these ranks, and perhaps others, have first taken a step together."""
    wanted = {str(rank) for rank in ranks}

    def read() -> float | None:
        for at, text in nodes_of.events(host, job, "step_taken"):
            if at > after and wanted <= set(re.findall(r"\d+", text.partition("have")[0])):
                return at
        return None

    return await_value(read, lambda: nodes_of.muster(host, "events", job), LIMIT_SECONDS) or 0.0


def against_ssh(directory: Path) -> list[float]:
    """Return how many steps per second a job of six ranks makes over nodes ÷ over SSH, in pairs.

    Both have the same data, and so the same digest; the audit of each is exact.
    """
    ratios = []
    with cluster(directory / "ssh") as installation, running_cluster(directory) as nodes_of:
        made = nodes_of.nodes.hosts
        nodes_of.nodes.start(*made)
        leader = nodes_of.leader()
        data = {"dataset_dir": str(installation.root / "shared" / "shards"), "epochs": RATE_EPOCHS}
        for _ in range(PAIRS):
            job = nodes_of.submit(leader, **data)
            nodes_of.muster(leader, "wait", job)
            audit = nodes_of.ask(leader, f"/jobs/{job}/audit")
            assert audit["exactly_once"], audit
            ours = rate(nodes_of.ask(leader, f"/jobs/{job}/events")["events"], audit)
            other = installation.submit(**(JOB | data))
            installation.deadline_seconds = LIMIT_SECONDS
            installation.complete(other)
            digest = audit["checkpoints"][-1]["digest"]
            assert installation.last_digest(other) == digest, "other bits"
            theirs = rate(installation.events(other), audit)
            print(f"  {ours:.1f} steps/s over nodes, {theirs:.1f} over SSH", flush=True)
            ratios.append(ours / theirs)
    return ratios


def rate(events: Sequence[Mapping[str, Any]], audit: Mapping[str, Any]) -> float:
    """Return the steps per second from the first step of all ranks to the exit of one."""
    at = {each["kind"]: each for each in reversed(events)}
    began = next(
        each for each in events if each["kind"] == "step_taken" and "4, 5 have" in each["message"]
    )
    step = int(began["message"].split()[-1])
    ends = (datetime.fromisoformat(each["at"]) for each in (began, at["rank_exited"]))
    first, last = ends
    return (audit["checkpoints"][-1]["step"] - step) / (last - first).total_seconds()


def measure_jobs(directory: Path, rounds: int) -> None:
    show("three nodes, first step", [first_step(directory) for _ in range(rounds)], 8.0)
    joins = [join(directory) for _ in range(rounds)]
    show("a node joins a job", [seconds for seconds, _ in joins], 3.0)
    print(f"  of its processor: {median(used for _, used in joins):.1f} s")
    ratios = against_ssh(directory)
    print(f"steps/s over nodes ÷ SSH: median {median(ratios):.3f} (goal 0.97)")


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
    if sys.argv[1:2] == ["jobs"]:
        with tempfile.TemporaryDirectory(prefix="muster-bench-") as directory_name:
            measure_jobs(Path(directory_name), int((sys.argv[2:] or ["10"])[0]))
        sys.exit(0)
    sys.exit(main(*map(int, [*sys.argv[1:], *["20", "100"][len(sys.argv) - 1 :]])))
