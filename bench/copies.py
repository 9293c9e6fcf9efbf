"""What a copy of the database on another machine costs: ``python bench/copies.py [submissions]``.

Two APIs on one disk, by turns: one alone, one with a follower, which acknowledges each submission
before it is answered; 1,000 submissions a minute each. Then the processor time of both processes
that copy, while nothing is written but the lease.
"""

import http.client
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _services import Services, cpu_seconds
from msgspec.structs import replace

from muster.cluster.members import MemberNode, Members, write_members
from muster.host.processes import module_command

SUBMISSIONS = 300
PAUSE_SECONDS = 0.06
IDLE_SECONDS = 20.0


def main() -> None:
    submissions = int(sys.argv[1]) if len(sys.argv) > 1 else SUBMISSIONS
    with tempfile.TemporaryDirectory() as elsewhere:
        members = Path(elsewhere, "nodes.json")
        node = MemberNode(node_id="n", name="n", slots=1, cores=1, ram_mb=1, address=None)
        away = replace(node, node_id="m", name="m", address=("127.0.0.1", 9), is_linked=False)
        write_members(members, Members(nodes=(node, away), has_copies=True))
        with Services() as alone, Services(environ={"MUSTER_NODES": str(members)}) as leading:
            processes = copying(leading.root, members, Path(elsewhere, "muster.db"))
            try:
                pids = [process.pid for process in processes]
                before = processor_seconds([alone.api.pid, leading.api.pid, *pids])
                measure(submissions, alone, leading)
                after = processor_seconds([alone.api.pid, leading.api.pid, *pids])
                spent = [1000 * (b - a) / submissions for a, b in zip(before, after, strict=True)]
                words = "processor time of a submission: {:.1f} ms alone; {:.1f} ms copied"
                print((words + ", and {:.1f} ms in leader, {:.1f} ms in follower").format(*spent))
                idle(pids)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()


def copying(root: Path, members: Path, copy: Path) -> list[subprocess.Popen[bytes]]:
    """Start what sends the rows, and a follower."""
    place = root / "replication.sock"
    files = map(str, (root / "muster.db", place, members))
    lead = subprocess.Popen(module_command("database.replication", "lead", *files))
    while not place.exists():
        time.sleep(0.05)
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(str(place))
        command = module_command("database.replication", "follow", str(copy))
        return [lead, subprocess.Popen(command, stdin=stream, stdout=stream)]


def measure(submissions: int, *both: Services) -> None:
    seconds: list[list[float]] = [[], []]
    warnings = 0
    for services in both:
        services.stop_coordinator()  # the API alone is measured
    connections = [http.client.HTTPConnection("127.0.0.1", each.port) for each in both]
    for number in range(submissions):
        body = json.dumps({"job_id": f"job-{number}", "world_size": 1, "command": ["true"]})
        for place, connection in enumerate(connections):
            began = time.perf_counter()
            connection.request("POST", "/jobs", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
            seconds[place].append(time.perf_counter() - began)
            assert answer.status == 201, content
            warnings += answer.getheader("Warning") is not None
            time.sleep(PAUSE_SECONDS / 2)
    alone, copied = (1000 * statistics.median(each) for each in seconds)
    print(f"submission alone {alone:.2f} ms, with a follower {copied:.2f} ms (medians)")
    print(f"ratio {copied / alone:.2f} (goal <= 1.3), {warnings} of {submissions} with a warning")


def processor_seconds(pids: list[int]) -> list[float]:
    return [cpu_seconds(pid, with_children=False) for pid in pids]


def idle(pids: list[int]) -> None:
    before = processor_seconds(pids)
    time.sleep(IDLE_SECONDS)
    for name, first, last in zip(
        ("leader", "follower"), before, processor_seconds(pids), strict=True
    ):
        print(f"idle {name}: {100 * (last - first) / IDLE_SECONDS:.2f} % of a core (goal <= 0.5)")


if __name__ == "__main__":
    main()
