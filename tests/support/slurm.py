"""A real Slurm over test hosts: its controller on the first one, a node on each."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.support.hosts import Host, Process, refusal
from tests.support.installation import await_value

TOOLS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "squeue", "scancel")


def needs_slurm() -> pytest.MarkDecorator:
    reason = refusal()
    if os.geteuid() != 0:
        reason = "only root can start slurmd"
    if missing := [name for name in TOOLS if not Path("/usr/sbin", name).exists()]:
        reason = f"{', '.join(missing)} are not installed"
    return pytest.mark.skipif(bool(reason), reason=f"no Slurm can run here: {reason}")


class Slurm:
    """The daemons; see `SchedulerUnderTest`."""

    name = "slurm"
    fields: Final = {"engine": "slurm", "engine_options": {"ranks_per_host": 2}}
    refused: Final = {"partition": "nowhere"}, "invalid partition specified: nowhere"
    held: Final = "PENDING, Part"
    taken_away: Final = "CANCELLED"

    def __init__(self, root: Path, machines: Sequence[Host], cpus: int = 4) -> None:
        self.machines = machines
        self._root = root / "slurm"
        self._root.mkdir()
        (self._root / "state").mkdir()
        socket = self._root / "munge.sock"
        key = self._root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        words = [f"--{what}={self._root}/munge.{what}" for what in ("pid", "log", "seed")]
        words = [word.replace("=", "-file=", 1) for word in words]
        self._munged = subprocess.Popen(
            [
                "/usr/sbin/munged",
                "--foreground",
                "--force",
                f"--socket={socket}",
                f"--key-file={key}",
                *words,
            ],
            stderr=subprocess.DEVNULL,
        )
        self._conf = self._root / "slurm.conf"
        self._conf.write_text(_configuration(self._root, socket, machines, cpus))
        (self._root / "cgroup.conf").write_text("CgroupPlugin=autodetect\n")
        self.environment = {"SLURM_CONF": str(self._conf)}
        self.controller: Process | None = None

    def start(self) -> None:
        await_value((self._root / "munge.sock").exists, lambda: "munged does not start")
        self.start_controller()
        for host in self.machines:
            self.start_node(host)
        await_value(self.is_up, lambda: "the nodes of Slurm do not come up")

    def start_controller(self) -> None:
        words = ["/usr/sbin/slurmctld", "-D", "-f", str(self._conf)]
        self.controller = self.machines[0].start(words, self._environ)

    def kill_controller(self) -> None:
        """Kill it once it has written down what it knows."""
        now = time.time()
        state = self._root / "state" / "job_state"
        held = self.run("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true")
        self.run("scancel", held.strip())  # a change, so that it writes
        await_value(lambda: state.exists() and state.stat().st_mtime > now, lambda: "no state")
        assert self.controller is not None
        self.controller.send_signal(signal.SIGKILL)
        self.controller.wait()

    def start_node(self, host: Host) -> None:
        words = ["/usr/sbin/slurmd", "-D", "-f", str(self._conf), "-N", host.name]
        host.start(words, self._environ)

    def stop(self) -> None:
        self._munged.terminate()
        self._munged.wait()

    def run(self, *argv: str) -> str:
        """Run one of its commands on the first host."""
        return self.machines[0].run(
            "env", *(f"{k}={v}" for k, v in self.environment.items()), *argv
        )

    def jobs(self) -> dict[str, str]:
        """Return the jobs that are not over: their states by their names."""
        lines = self.run("squeue", "--noheader", "--format=%j|%T").split()
        return dict(line.split("|") for line in lines)

    def hold(self, *, is_held: bool) -> None:
        self.run("scontrol", "update", "PartitionName=main", f"State={'DOWN' if is_held else 'UP'}")

    def take_away(self, name: str) -> None:
        self.run("scancel", f"--name={name}")

    @contextmanager
    def is_away(self) -> Iterator[None]:
        self.kill_controller()
        try:
            yield
        finally:
            self.start_controller()
            await_value(self.is_up, lambda: "the controller is not back")
            self.take_away("wrap")  # what it wrote down may be older than the first `scancel`

    def id_of(self, name: str) -> str:
        return self.run("squeue", "--noheader", f"--name={name}", "--format=%i").strip()

    @property
    def _environ(self) -> Mapping[str, str]:
        return {**os.environ, **self.environment}

    def is_up(self) -> bool:
        try:
            counts = self.run("sinfo", "-h", "-t", "idle,mix,alloc", "-o", "%D").split()
            return sum(map(int, counts)) == len(self.machines)
        except AssertionError:
            time.sleep(0.1)
            return False


def _configuration(root: Path, socket: Path, machines: Sequence[Host], cpus: int) -> str:
    nodes = "".join(
        f"NodeName={host.name} NodeAddr={host.address} CPUs={cpus} RealMemory=1000\n"
        for host in machines
    )
    return f"""ClusterName=test
SlurmctldHost={machines[0].name}({machines[0].address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={socket},cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,sched_interval=2,bf_interval=2
SlurmdTimeout=10
MessageTimeout=5
KillWait=3
ReturnToService=2
{nodes}PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
