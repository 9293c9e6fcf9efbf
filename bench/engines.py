"""How soon a job trains on each engine, and goes on after a loss: ``python bench/engines.py``.

Six ranks on three hosts that are namespaces of this machine, with a real sshd, a real Slurm and a
stand-in for Kubernetes. Needs root, and openssh, Slurm and munge. Each measurement can be taken
alone, as by ``--only start kinds``:

start    submit -> first step, on all engines in turn; what Slurm and the stand-in themselves take
cold     the same over SSH while no connection to any host is up
losses   a rank is killed, or a host loses its power: next step of the others
logs     a rank of another host prints a line -> it is in the stream of the job's logs
notice   Slurm takes a node away with notice (USR1): steps that are taken again
kinds    kinds of events of an undisturbed job, in order: what differs from one engine to another
torchrun a rank is killed: next step of a gang under srun; with --torch PYTHON, which has torch
"""

import argparse
import difflib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from _gang import SOUND
from _programs import TIME

from tests.support.clusters import ClusterInstallation, scheduler_cluster, trains
from tests.support.installation import Seen, await_value, end_of, is_over, is_running
from tests.support.kubernetes import PODS, Kubernetes
from tests.support.log_follower import LogFollower
from tests.support.slurm import Slurm

ENGINES = {
    "local": {"engine": "local"},
    "ssh": {"hosts": ["host-0", "host-1", "host-2"]},
    "slurm": Slurm.fields,
    "kubernetes": Kubernetes.fields,
}
DISTRIBUTED = [engine for engine in ENGINES if engine != "local"]
JOB = {"mode": "synchronous", "virtual_shards": 8, "world_size": 6, "epochs": 20, "seed": 3}
ENDLESS = {**JOB, "epochs": 10**6, "sleep_sec": 0.01}
MASTER = "ControlMaster=yes"  # of an ssh that others share
LINES = 200  # of each rank
GANG = """import datetime, os, platform, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
vector = torch.zeros(1000)
with open(f"{sys.argv[1]}/{platform.node()}-{os.getpid()}", "a", buffering=1) as times:
    while True:
        dist.all_reduce(vector)
        print(time.time(), file=times)
        time.sleep(0.01)
"""
PRINTING = f"""import platform, time
for n in range({LINES}): print(platform.node(), time.time(), flush=True); time.sleep(0.05)
"""

Found = Iterator[tuple[str, float]]
"""What was measured, and a value: of seconds, unless the words say what else."""


class Bench:
    """The measurements, over one installation."""

    def __init__(
        self,
        installation: ClusterInstallation,
        slurm: Slurm,
        kubernetes: Kubernetes,
        torch: str | None,
    ) -> None:
        """`torch` is an interpreter that has it."""
        self.installation = installation
        self.slurm = slurm
        self.kubernetes = kubernetes
        self._torch = torch
        self._root = installation.root
        self._digests: set[str] = set()
        self._kinds: dict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)

    def start(self) -> Found:
        yield "empty Slurm job: submit -> runs", self._empty_job()
        yield "empty Pod of the stand-in: POST -> runs", self._empty_pod()
        for engine in ENGINES:
            yield f"{engine}: submit -> first step", self._first_step(engine)

    def cold(self) -> Found:
        masters = [pid for pid in self.installation.machines[0].processes() if _runs(pid, MASTER)]
        for pid in masters:
            os.kill(pid, signal.SIGKILL)
        await_value(
            lambda: not any(_runs(pid, MASTER) for pid in masters), lambda: f"left: {masters}"
        )
        yield "ssh, no connection up: submit -> first step", self._first_step("ssh")

    def losses(self) -> Found:
        for engine in DISTRIBUTED:
            yield from self._losses(engine)

    def logs(self) -> Found:
        for engine, fields in ENGINES.items():
            lags: list[tuple[str, float]] = []
            job_id = self.installation.submit(
                **{**fields, "world_size": 2 if engine == "local" else 6},
                command=[sys.executable, "-c", PRINTING],
            )

            def take(lines: Sequence[str], lags: list[tuple[str, float]] = lags) -> None:
                now = time.time()
                for host, at in (line.split()[-2:] for line in lines):
                    lags.append((host, now - float(at)))

            follower = LogFollower(self.installation.url, job_id, take)
            follower.start()
            self.installation.complete(job_id)
            follower.wait(60)
            for host, lag in lags:
                if engine == "local" or host != self.installation.machines[0].name:
                    yield f"{engine}: printed -> in the stream", lag

    def notice(self) -> Found:
        program = self._root / "shared" / "_programs.py"
        shutil.copy(Path(__file__).with_name("_programs.py"), program)
        for old in program.parent.glob("*.steps"):
            old.unlink()
        fields = {**ENDLESS, **Slurm.fields, "program": f"{program}:Small"}
        job_id = self.installation.submit(**fields)
        seen = self.installation.wait_until(job_id, trains(30))
        name = next(name for name in self.slurm.jobs() if "slurm-2-a" in name)
        began = time.time()
        self.slurm.run("scancel", "--batch", "--signal=USR1", self.slurm.id_of(name))
        yield "slurm, notice: signal -> next step of the others", self._next_step(job_id, began)
        self.installation.wait_until(job_id, _all_train_after(seen["step"]))
        yield "slurm, notice: signal -> all ranks train", time.time() - began
        step = self.installation.see(job_id)["step"]
        self.installation.wait_until(job_id, trains(step + 20))
        self._end(job_id)
        audit = self.installation.request("GET", f"/jobs/{job_id}/audit").json()
        assert all(it["exactly_once"] for it in audit["epochs"][:-1]), audit
        taken = [_steps(file) for file in program.parent.glob("*.steps")]
        # A rank that trains all the time takes again what the job has lost.
        yield (
            "slurm, notice: steps taken again (a number)",
            max(len(steps) - len(set(steps)) for steps in taken),
        )

    def kinds(self) -> Found:
        """Yields nothing; `differences` tells."""
        for engine, fields in ENGINES.items():
            more = {"world_size": 2, "epochs": 3}
            more |= {"hosts": ["host-1"]} if engine == "ssh" else {}
            job_id = self.installation.submit(**{**JOB, **fields, **more})
            self.installation.complete(job_id)
            self._kinds[engine][tuple(self.installation.kinds(job_id))] += 1
        yield from ()

    def torchrun(self) -> Found:
        if self._torch is None:
            return
        last, times = self.installation.machines[2], self._root / "shared" / "times"
        shutil.rmtree(times, ignore_errors=True)
        times.mkdir()
        script = times.with_name("gang.py")
        script.write_text(GANG)
        words = ["-m", "torch.distributed.run", "--nnodes=3", "--nproc-per-node=2"]
        words += ["--max-restarts=10", "--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.1:29400"]
        gang = self.installation.machines[0].start(
            ["srun", "-N3", "-n3", "-c2", self._torch, *words, str(script), str(times)],
            {**os.environ, **self.slurm.environment, **SOUND, "GLOO_SOCKET_IFNAME": "eth0"},
        )
        before = await_value(lambda: _gang_of(times, set()), lambda: "torchrun starts no gang")
        rank = next(pid for pid in last.processes() if _runs(pid, f"-u\0{script}"))
        began = time.time()
        os.kill(rank, signal.SIGKILL)
        after = await_value(
            lambda: _gang_of(times, before.keys()),
            lambda: end_of(self.installation.machines[0].log),
            200,
        )
        yield "torchrun under srun: rank killed -> next step", max(after.values()) - began
        gang.send_signal(signal.SIGTERM)
        gang.wait()
        await_value(lambda: not self.slurm.jobs(), lambda: f"left: {self.slurm.jobs()}")

    def differences(self) -> Iterator[str]:
        """Yield what differs between results of jobs, and between their kinds of events."""
        if self._digests:
            same = "the same bits" if len(self._digests) == 1 else f"{self._digests}"
            yield f"{len(self._digests)} different results: {same}"
        for engine, orders in self._kinds.items():
            (usual, count), *others = orders.most_common()
            first, _ = self._kinds["local"].most_common(1)[0]
            yield f"{engine}: {len(orders)} orders of kinds; the usual one {count} times:"
            yield f"    beside local: {_difference(first, usual)}"
            for other, times in others:
                yield f"    {times} times otherwise: {_difference(usual, other)}"

    def _first_step(self, engine: str) -> float:
        size = 2 if engine == "local" else 6  # as many as fit; the bits are the same
        job_id = self.installation.submit(**{**JOB, **ENGINES[engine], "world_size": size})
        self.installation.complete(job_id)
        self._digests.add(self.installation.last_digest(job_id))
        events = {it["kind"]: _at(it["at"]) for it in reversed(self.installation.events(job_id))}
        return events["step_taken"] - events["submitted"]

    def _empty_job(self) -> float:
        proof, script = self._root / f"started-{time.monotonic_ns()}", self._root / "empty.sh"
        script.write_text(f"#!/bin/sh\ntouch {proof}\n")
        began = time.monotonic()
        self.slurm.run("sbatch", "--output=/dev/null", "--chdir=/", str(script))
        await_value(proof.exists, lambda: "Slurm does not start a job")
        return time.monotonic() - began

    def _empty_pod(self) -> float:
        proof, name = self._root / f"started-{time.monotonic_ns()}", f"empty-{time.monotonic_ns()}"
        words = ["python", "-S", "-c", f"open({str(proof)!r}, 'w')"]
        container = {"name": "agent", "image": "empty", "env": [], "command": words}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {}}}
        began = time.monotonic()
        self._ask("POST", PODS, json.dumps({**pod, "spec": {"containers": [container]}}))
        await_value(proof.exists, lambda: "the stand-in does not start a Pod")
        took = time.monotonic() - began
        self._ask("DELETE", f"{PODS}/{name}")
        return took

    def _ask(self, method: str, path: str, body: str = "") -> None:
        """Ask the stand-in, where it listens: on the first host."""
        connection = HTTPConnection("127.0.0.1")
        connection.sock = self.installation.machines[0].open_socket()
        connection.sock.connect(("127.0.0.1", self.kubernetes.port))
        connection.request(method, path, body)
        answer = connection.getresponse()
        assert answer.status < 300, answer.read()
        connection.close()

    def _losses(self, engine: str) -> Found:
        """Yield how long the others take to go on without a rank, and without a host."""
        last = self.installation.machines[2]
        job_id = self.installation.submit(**ENDLESS, **ENGINES[engine])
        self.installation.wait_until(job_id, trains(20))
        tags = self.installation.process_tags(last)
        began = time.time()
        os.kill(next(pid for pid, tag in tags.items() if tag[:1].isdigit()), signal.SIGKILL)
        yield f"{engine}: rank killed -> next step", self._next_step(job_id, began)
        self.installation.wait_until(job_id, lambda it: is_running(it) and it["restarts"] == 1)
        began = time.time()
        last.power_off()
        yield f"{engine}: host without power -> next step", self._next_step(job_id, began)
        last.power_on()
        self.installation.boot(last)
        self._end(job_id)
        self.slurm.start_node(last)
        await_value(self.slurm.is_up, lambda: "a node of Slurm is not back")

    def _next_step(self, job_id: str, began: float) -> float:
        """Return how long after `began` ranks that have met anew took a step."""

        def look() -> float | None:
            events = self.installation.events(job_id)
            times = [_at(it["at"]) for it in events if it["kind"] == "step_taken"]
            return next((it for it in times if it > began), None)

        return await_value(look, lambda: self.installation.describe(job_id)) - began

    def _end(self, job_id: str) -> None:
        self.installation.stop(job_id, 5.0)
        self.installation.wait_until(job_id, is_over)


MEASUREMENTS: dict[str, Callable[[Bench], Found]] = {
    "start": Bench.start,
    "cold": Bench.cold,
    "losses": Bench.losses,
    "logs": Bench.logs,
    "notice": Bench.notice,
    "kinds": Bench.kinds,
    "torchrun": Bench.torchrun,
}


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=[*MEASUREMENTS])
    parser.add_argument("--torch", metavar="PYTHON")
    asked = parser.parse_args()
    found: dict[str, list[float]] = defaultdict(list)
    with (
        tempfile.TemporaryDirectory() as name,
        scheduler_cluster(Path(name), partial(Slurm, cpus=2), Kubernetes) as all_of_them,
    ):
        bench = Bench(*all_of_them, asked.torch)
        for measurement in asked.only:
            for number in range(asked.rounds):
                for what, value in MEASUREMENTS[measurement](bench):
                    found[what].append(value)
                print(f"{measurement}: round {number + 1} of {asked.rounds}", file=sys.stderr)
        for line in bench.differences():
            print(line)
    print(f"{'':52}{'median':>9}{'p95':>9}{'max':>9}{'number':>8}")
    for what, values in found.items():
        shown = (statistics.median(values), _p95(values), max(values))
        print(f"{what:52}{''.join(f'{it:9.3f}' for it in shown)}{len(values):8}")


def _runs(pid: int, words: str) -> bool:
    try:
        return words.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _gang_of(directory: Path, known: Collection[str]) -> dict[str, float]:
    """Return when each rank of a new gang took its first step; nothing before all have."""
    lines = {it.name: it.read_text().split() for it in directory.iterdir() if it.name not in known}
    first = {name: float(times[0]) for name, times in lines.items() if times}
    return first if len(first) == JOB["world_size"] else {}


def _all_train_after(step: int) -> Callable[[Seen], bool]:
    return lambda seen: (
        trains(step + 1)(seen)
        and all(worker["process"] == "live" and worker["step"] > step for worker in seen["workers"])
    )


def _difference(one: Sequence[str], other: Sequence[str]) -> str:
    return "; ".join(it for it in difflib.ndiff(one, other) if it[:1] in "+-") or "none"


def _steps(file: Path) -> list[int]:
    return [step for step, _ in TIME.iter_unpack(file.read_bytes())]


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


def _at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


if __name__ == "__main__":
    main()
