"""How long a checkpoint of another host takes to be durable: ``python bench/sent_checkpoints.py``.

A rank on a host that shares no directory saves 100 MB again and again: each call waits until the
save before it is durable on the coordinator's host. ``scp`` of a file of that size between the same
two hosts takes turns with it, by their real sshd; it flushes nothing to the disk. Needs root.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.support.clusters import ClusterInstallation, cluster

SCRIPT = """
import os, sys, time, numpy, muster
run = muster.join()
state = {"weights": numpy.frombuffer(os.urandom(int(sys.argv[1])), numpy.uint8)}
for batch in run.batches():
    run.step()
    began = time.monotonic()
    run.checkpoint(state)
    print("took", time.monotonic() - began, flush=True)
    if run.steps_done == int(sys.argv[2]):
        break
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=100_000_000)
    asked = parser.parse_args()
    found: dict[str, list[float]] = defaultdict(list)
    for way, variables in {"direct": {}, "through ssh": {"MUSTER_AGENT_ADDRESS": ""}}.items():
        with (
            tempfile.TemporaryDirectory() as name,
            cluster(Path(name), count=2, **variables) as installation,
        ):
            for _ in range(asked.rounds):
                found[f"scp, beside {way}"].append(scp(installation, asked.bytes))
                found[f"checkpoint, {way}"] += saves(installation, asked.bytes, "host-1")
                found["checkpoint, on the coordinator's host"] += saves(
                    installation, asked.bytes, "host-0"
                )
    for what, values in sorted(found.items()):
        spread = f"({min(values):.2f} .. {max(values):.2f}, {len(values)} times)"
        print(f"{what:<40} {statistics.median(values):6.2f} s  {spread}")
    for way in ("direct", "through ssh"):
        ours, theirs = (
            statistics.median(found[it]) for it in (f"checkpoint, {way}", f"scp, beside {way}")
        )
        print(f"{way}: {ours / theirs:.2f} x scp")


def scp(installation: ClusterInstallation, size: int) -> float:
    """Return how long a copy from the other host to the coordinator's takes."""
    here, other = installation.machines
    source = other.directory / "100MB"
    if not source.exists():
        source.write_bytes(os.urandom(size))
    began = time.monotonic()
    config = installation.root / "ssh" / "config"
    target = f"{here.address}:{here.local}/copied"
    other.run("scp", "-q", "-O", "-F", str(config), str(other.local / "100MB"), target)
    return time.monotonic() - began


def saves(installation: ClusterInstallation, size: int, host: str) -> list[float]:
    """Return how long the saves of a job on a host took, each until it was durable."""
    script = installation.root / "shared" / "saving.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(size), "6"]
    job_id = installation.submit(world_size=1, command=command, hosts=[host], keep_last=2)
    installation.complete(job_id)
    lines = installation.request("GET", f"/jobs/{job_id}/logs").json()["lines"]
    words = [it["line"].split() for it in lines]
    first, *took = [float(it[1]) for it in words if it[:1] == ["took"]]
    return took if host != "host-0" else [first, *took]


if __name__ == "__main__":
    main()
