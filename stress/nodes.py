"""Jobs over three nodes of a household, which lose ranks, agents, power and links, or freeze.

``python -m stress.nodes [FAULTS] [SEED] [--frozen 60]`` needs root and namespaces. One training is
struck so many times at random moments; its result is compared with that of one rank that nothing
has disturbed. Then a host is frozen for so many seconds under a job of each mode: its ranks are
replaced, the old ones take no more steps, and the machine is a newcomer once. `--frozen 0` leaves
that out, FAULTS 0 the rest.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast

from muster.contracts.job.status import JobId
from muster.contracts.settings.paths import DataDir
from muster.host.containment import tag_of
from stress.hosts import ANSWERS, FIELDS, RANKS, Schedule, result
from stress.runner import Report, chance, main
from tests.support.clusters import ClusterInstallation
from tests.support.hosts import Host, hosts
from tests.support.installation import Seen, await_value, is_over
from tests.support.nodes import Cluster, nodes

KINDS: Final = ("rank killed", "agent killed", "host without power", "host cut off")
SYNCHRONOUS: Final = {
    **FIELDS,
    "checkpoint_every": 50,
    "max_workers": RANKS,
    "min_workers": 1,
    "sleep_sec": 0.02,
}
INDEPENDENT: Final = {"mode": "independent", "checkpoint_every": 50}
MOST_CUT_SECONDS: Final = 15.0
SECONDS_EACH: Final = 60.0
"""Within which a job has got over a fault; and the training has to last longer than all of them."""
EPOCHS_EACH: Final = 7
FROZEN_EPOCHS: Final = {"synchronous": 40, "independent": 100}
OLD_STEPS: Final = 1
"""That a rank may write after its machine resumes: the step that it was in."""


class NodesInstallation:
    """A cluster of nodes as `Schedule` needs an installation; the host that leads is the first."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.leader = cluster.leader()
        others = [host for host in cluster.nodes.hosts if host is not self.leader]
        self.machines = [self.leader, *others]
        self.checkpoint_dir = self.leader.directory / "node" / "checkpoints"

    def boot(self, host: Host) -> None:
        self.cluster.nodes.start(host)

    def submit(self, **fields: object) -> str:
        return self.cluster.submit(self.leader, **fields)

    def see(self, job: str) -> Seen:
        return cast("Seen", self.cluster.ask(self.leader, f"/jobs/{job}/summary"))

    def events(self, job: str) -> Any:
        return self.cluster.ask(self.leader, f"/jobs/{job}/events")["events"]

    def wait_until(self, job: str, predicate: Callable[[Seen], object], each: int = 1) -> Seen:
        """Return the first summary for which `predicate` is true, within so many faults' time."""

        def read() -> Seen | None:
            seen = self.see(job)
            return seen if predicate(seen) else None

        shown = lambda: self.cluster.muster(self.leader, "events", job)  # noqa: E731
        return await_value(read, shown, each * SECONDS_EACH)

    def process_tags(self, host: Host) -> dict[int, str]:
        tags = {pid: tag_of(pid) or "" for pid in host.processes()}
        return {pid: tag.partition("/")[2] for pid, tag in tags.items() if tag}

    def result(self, job: str) -> object:
        return result(cast("ClusterInstallation", self), job)


def run(directory: Path, faults: int = 20, seed: int = 0, *, frozen: float = 60.0) -> Report:
    """Strike one training, then freeze a host under two."""
    report = Report()
    with hosts(3, directory) as made, nodes(made, ["cli", "node"]) as running:
        running.start(*made)
        installation = NodesInstallation(Cluster(running, directory / "job.json"))
        if faults:
            strike(installation, faults, seed, report)
        if frozen:
            for fields in (SYNCHRONOUS, INDEPENDENT):
                freeze(installation, dict(fields), frozen, report)
    return report


def strike(installation: NodesInstallation, faults: int, seed: int, report: Report) -> None:
    draw, epochs = chance(seed), EPOCHS_EACH * faults
    wanted = undisturbed(installation, SYNCHRONOUS | {"epochs": epochs, "sleep_sec": 0.0}, 1)
    job = installation.submit(**SYNCHRONOUS, epochs=epochs, world_size=RANKS)
    installation.wait_until(job, lambda seen: seen["status"] == "RUNNING")
    schedule = Schedule(cast("ClusterInstallation", installation), job, draw, MOST_CUT_SECONDS)
    for number in range(faults):
        if is_over(installation.see(job)):
            report.faults.append(f"{job}: over after {number} of {faults} faults")
            break
        time.sleep(draw.random())
        schedule.strike(draw.choice(KINDS))
    report.faults += problems(installation, job, wanted, faults)
    report.lines += [
        f"{fault}: {len(taken)} times, {ANSWERS.get(fault)} at the latest after {max(taken):.1f} s"
        for fault, taken in schedule.seconds.items()
    ]


def undisturbed(installation: NodesInstallation, fields: dict[str, Any], size: int) -> object:
    job = installation.submit(**fields, world_size=size)
    installation.wait_until(job, is_over, 10)
    return installation.result(job)


def freeze(
    installation: NodesInstallation, fields: dict[str, Any], seconds: float, report: Report
) -> None:
    """Freeze a host that does not lead, with ranks that train."""
    fields |= {"epochs": FROZEN_EPOCHS[fields["mode"]], "sleep_sec": 0.05}
    size = 1 if fields["mode"] == "synchronous" else RANKS
    wanted = undisturbed(installation, fields | {"sleep_sec": 0.0}, size)
    job, host = installation.submit(**fields, world_size=RANKS), installation.machines[-1]
    installation.wait_until(job, lambda seen: seen["status"] == "RUNNING" and seen["step"])
    old = set(installation.process_tags(host))
    host.freeze()
    written = steps_written(host, job)
    time.sleep(seconds)
    step = installation.see(job)["step"]
    host.thaw()
    await_value(
        lambda: not old & set(installation.process_tags(host)),
        lambda: f"old processes of {host.name}: {installation.process_tags(host)}",
    )
    report.faults += problems(installation, job, wanted, 5)
    kept = steps_written(installation.leader, job)
    late = {name: max(0, kept.get(name, 0) - count) for name, count in written.items()}
    report.faults += [
        f"{job}: {name} has {count} steps after {host.name} resumed"
        for name, count in late.items()
        if count > OLD_STEPS
    ]
    lost = sum(each["kind"] == "host_lost" for each in installation.events(job))
    said = f"{fields['mode']}: {len(written)} ranks replaced, step {step} when {host.name} resumed"
    report.lines.append(f"{said}; lines of old ranks after that: {sum(late.values())}")
    report.faults += [f"{job}: {host.name} was given up {lost} times"] * (lost != 1)
    members = {each["host"] for each in installation.cluster.ask(host, "/hosts")["hosts"]}
    if host.name not in members:
        report.faults.append(f"{host.name} is not a member again: {members}")


def steps_written(host: Host, job: str) -> dict[str, int]:
    """Return how many steps each log of a rank says that a host has on its disk."""
    logs = DataDir(host.directory / "node").job(JobId(job)).logs.glob("rank_*.log")
    return {log.name: log.read_text().count("\nstep ") for log in logs}


def problems(installation: NodesInstallation, job: str, wanted: object, each: int) -> Iterator[str]:
    """Wait for the end of a job, and yield what must not be."""
    seen = installation.wait_until(job, is_over, each)
    if seen["status"] != "COMPLETED" or installation.result(job) != wanted:
        yield f"{job}: {seen['status']}, or other bits than one that was not disturbed"
    spec = installation.cluster.ask(installation.leader, f"/jobs/{job}")["spec"]
    if spec["mode"] == "synchronous":
        installation.cluster.muster(installation.leader, "audit", job)
    left = lambda: {host.name: installation.process_tags(host) for host in installation.machines}  # noqa: E731
    await_value(lambda: not any(left().values()), lambda: f"left behind: {left()}")


if __name__ == "__main__":
    main(run)
