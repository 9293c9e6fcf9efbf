"""One training on three nodes of a household, which lose the machine that leads again and again.

``python -m stress.leaders [LOSSES] [SEED]`` needs root and namespaces. By turns the node that leads
is killed and its machine is switched off; it is started again after up to half a minute, every
other time with an empty disk, when it joins as a new node and the old one is forgotten. Before each
loss a job is submitted that does nothing: what was answered must be there at the end. The training
has the digest of one that nothing has disturbed.
"""

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Final

from muster.cluster.identity import node_id
from stress.runner import Report, chance, main
from tests.support.hosts import Host, hosts
from tests.support.installation import await_value, is_over
from tests.support.nodes import Cluster, nodes

STEP_SECONDS: Final = 0.25
SECONDS_EACH: Final = 45.0
"""Of training for one loss; more than it takes, or the training is over too early."""
STEPS_OF_EPOCH: Final = 32
LIMIT_SECONDS: Final = 120.0
LINES: Final = 40
MOST_OFF_SECONDS: Final = 30.0
MOST_WAIT_SECONDS: Final = 5.0


class Training:
    """A job, and what is typed on whichever machine answers."""

    def __init__(self, cluster: Cluster, losses: int) -> None:
        self.cluster = cluster
        first = cluster.leader()
        epochs = int(losses * SECONDS_EACH / STEP_SECONDS / STEPS_OF_EPOCH)
        calm = cluster.submit(first, epochs=epochs, sleep_sec=0, world_size=1)
        self.wanted = cluster.result(first, first, calm)
        self.job = cluster.submit(first, epochs=epochs, sleep_sec=STEP_SECONDS)

    def step(self, host: Host) -> int:
        """Return the last step that all ranks have taken together; 0 without an answer."""
        try:
            workers = self.cluster.ask(host, f"/jobs/{self.job}/summary")["workers"]
        except OSError:
            return 0
        return min((each["step"] or 0 for each in workers if each["pid"]), default=0)

    def await_progress(self, host: Host, beyond: int) -> None:
        self.await_true(lambda: self.step(host) > beyond)

    def await_true(
        self, is_true: Callable[[], object], limit_seconds: float = LIMIT_SECONDS
    ) -> None:
        await_value(is_true, self.describe, limit_seconds)

    def describe(self) -> str:
        parts = [f"{self.job} does not go on"]
        for host in self.cluster.nodes.hosts:
            parts += [f"--- {host.name}", *self.cluster.nodes.said(host)[-LINES:]]
            with suppress(AssertionError):
                parts += self.cluster.muster(host, "events", self.job).splitlines()[-LINES:]
                parts += self.cluster.muster(host, "show", self.job).splitlines()
        return "\n".join(parts)


def run(directory: Path, losses: int = 20, seed: int = 0) -> Report:
    """Lose the machine that leads so many times."""
    report, draw = Report(), chance(seed)
    answered, served, progressed = [], [], []
    with hosts(3, directory) as made, nodes(made, ["cli", "node"]) as running:
        running.start(*made)
        cluster = Cluster(running, directory / "job.json")
        training = Training(cluster, losses)
        leader = cluster.leader()
        for number in range(losses):
            training.await_true(lambda: cluster.has_copies(leader))  # noqa: B023  called now
            training.await_progress(leader, training.step(leader))
            time.sleep(draw.uniform(0, MOST_WAIT_SECONDS))
            answered.append(cluster.submit_words(leader, "-n", "1", "--", "true"))
            step, lost, began = training.step(leader), leader, time.monotonic()
            if is_killed := number % 2 == 0:
                running.kill(lost)
            else:
                lost.power_off()
            leader = cluster.leader(lost)
            served.append(time.monotonic() - began)
            training.await_progress(leader, step + 1)
            progressed.append(time.monotonic() - began)
            time.sleep(draw.uniform(0, MOST_OFF_SECONDS))
            if not is_killed:
                if number % 4 == 1:
                    forget(cluster, leader, lost)
                lost.power_on()
            running.start(lost)
            print(f"loss {number + 1}: {served[-1]:.1f} s, {progressed[-1]:.1f} s", flush=True)
        shown = f"/jobs/{training.job}/summary"
        training.await_true(
            lambda: is_over(cluster.ask(leader, shown)), LIMIT_SECONDS + losses * SECONDS_EACH
        )
        if cluster.result(leader, leader, training.job) != training.wanted:
            report.faults.append("other bits than a training that was not disturbed")
        jobs = {each["job_id"] for each in cluster.ask(leader, "/jobs?limit=500")["jobs"]}
        report.faults += [f"{job} was answered, and is lost" for job in answered if job not in jobs]
    for what, seconds in (("the API answers", served), ("a new common step", progressed)):
        report.lines.append(f"{what} after {median(seconds):.1f} s, {max(seconds):.1f} s at most")
    return report


def forget(cluster: Cluster, leader: Host, lost: Host) -> None:
    """Take the disk of a machine that is off, which will be a new node."""
    name = cluster.nodes.ids[lost]

    def is_forgotten() -> bool:
        try:
            cluster.muster(leader, "node", "forget", name)
        except AssertionError:  # it is linked until it has answered nothing for a while
            return False
        return True

    await_value(is_forgotten, lambda: f"{name} is not forgotten")
    directory = lost.directory / "node"
    shutil.rmtree(directory)
    directory.mkdir(mode=0o700)
    cluster.nodes.ids[lost] = node_id(directory / "node.key")


if __name__ == "__main__":
    main(run)
