"""Kill what is left of a job on this host: before an agent starts, at its end, and zombies."""

import os
from collections.abc import Collection, Container

from muster.contracts.rank import ProcessRecord
from muster.host.containment import (
    SWEEP_PATIENCE,
    cgroup_name,
    cgroups_of_job,
    kill_cgroup,
    tag_number_of,
    tag_numbers,
    tag_of,
    tagged_processes,
)
from muster.host.processes import descendants, identify, kill
from muster.runtime.stderr_messages import print_stderr


def kill_leftovers(job_uid: str, spared: Collection[str], own: Collection[int]) -> None:
    """Kill every process of the job but those with the pids `own` and the tags `spared`.

    An agent that was killed may leave a rank that it had not reported, a prefork server, or may
    itself only be stopped. Killing all of that before anything starts ensures that no attempt
    ever runs twice.
    """
    spared_cgroups = {cgroup_name(tag) for tag in spared}

    def kill_each() -> int:
        cgroups = [each for each in cgroups_of_job(job_uid) if each.name not in spared_cgroups]
        left = [cgroup for cgroup in cgroups if not kill_cgroup(cgroup)]
        found = [record for record in _leftovers(job_uid, spared) if record.pid not in own]
        return len(left) + sum(map(kill, found))

    left = SWEEP_PATIENCE.poll(kill_each)
    if left:
        print_stderr(f"{left} processes or cgroups of the job survive SIGKILL")


def _leftovers(job_uid: str, spared: Collection[str]) -> list[ProcessRecord]:
    prefix = f"{job_uid}/"
    of_job = tag_numbers(prefix)
    of_spared = {number for tag in spared for number in tag_numbers(tag)}

    def is_spared(pid: int) -> bool:
        number = tag_number_of(pid)
        if number in of_job:
            return number in of_spared
        # An agent, a prefork server, or a rank in its first milliseconds. Spare what has exited.
        tag = tag_of(pid)
        return tag is None or tag in spared

    return [record for record in tagged_processes(prefix) if not is_spared(record.pid)]


def reap_zombies(own: Container[int]) -> bool:
    """Reap zombies up to one whose pid is in `own`, because its exit status is still needed.

    As a child subreaper, the agent inherits the orphans of its ranks. Return whether any child is
    left.
    """
    while True:
        try:
            zombie = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        if zombie is None or zombie.si_pid in own:
            return True
        os.waitpid(zombie.si_pid, os.WNOHANG)


def kill_descendants() -> None:
    """Kill everything below this process, at the end of the job.

    This also ends processes that have left both their tag and their session.
    """

    def kill_each() -> int:
        if not reap_zombies(own=()):
            return 0  # orphans would be our children
        records = [identify(pid) for pid in descendants(os.getpid())]
        return sum(kill(record) for record in records if record is not None)

    SWEEP_PATIENCE.poll(kill_each)
