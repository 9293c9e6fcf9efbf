"""An installation whose jobs run on several test hosts, reached by a real sshd on each.

The coordinator runs on the first host. The API runs outside and shares only its files: the data
directory is on that host's own disk.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from muster.host.containment import tag_of
from tests.support.hosts import Host, Process, hosts, refusal
from tests.support.installation import (
    DEADLINE_SECONDS,
    Installation,
    Seen,
    Service,
    await_value,
    is_running,
    write_small_dataset,
)

SSHD = Path("/usr/sbin/sshd")
AGENT_PORT = 7400

SIX_RANKS = {"mode": "synchronous", "world_size": 6, "virtual_shards": 8, "epochs": 3}
ENDLESS = {**SIX_RANKS, "epochs": 100_000, "sleep_sec": 0.02}


def needs_cluster() -> pytest.MarkDecorator:
    reason = refusal()
    if os.geteuid() != 0:
        reason = "sshd lets root alone log others in"
    if not SSHD.exists():
        reason = "openssh-server is not installed"
    return pytest.mark.skipif(bool(reason), reason=f"no cluster can be made here: {reason}")


class HostService(Service):
    """A service that runs on a test host."""

    host: Host
    _running: Process | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            argv = [sys.executable, "-P", "-m", self.module, *self.words]
            self._running = self.host.start(argv, self.environment, cwd=self.directory, output=log)
        self.process = self._running  # type: ignore[assignment]  what `Installation` uses of it

    def end(self, number: signal.Signals) -> int:
        assert self._running is not None, f"{self.module} was not started"
        self._running.send_signal(number)
        try:
            return self._running.wait(DEADLINE_SECONDS)
        finally:
            self.process = self._running = None


class ClusterInstallation(Installation):
    """Services over several hosts; `machines` are the hosts, the coordinator's own first."""

    def __init__(
        self,
        root: Path,
        machines: Sequence[Host],
        slots: int = 2,
        own: Sequence[Mapping[str, str]] = (),
        **environment: str,
    ) -> None:
        """`own` are variables that the hosts themselves set, in the order of `machines`.

        With an empty `MUSTER_AGENT_ADDRESS` agents reach the coordinator through SSH.
        """
        self.machines = machines
        self._own = dict(zip(machines, own, strict=False))
        first, *_ = machines
        local = first.local
        description = root / "cluster.yaml"
        description.write_text(_description(machines, slots))
        super().__init__(
            root,
            MUSTER_CLUSTER=str(description),
            DATASET_DIR=str(root / "shared" / "shards"),
            **{"CHECKPOINT_DIR": str(local / "checkpoints"), **environment},
        )
        write_small_dataset(root / "shared" / "shards")
        # As seen from outside.
        own = str(first.directory / "checkpoints")
        self.checkpoint_dir = Path(environment.get("CHECKPOINT_DIR", own))
        api = {**self.environment, "MUSTER_DATA_DIR": str(first.directory / "data")}
        self.environment |= {
            "MUSTER_DATA_DIR": str(local / "data"),
            "MUSTER_AGENT_ADDRESS": environment.get(
                "MUSTER_AGENT_ADDRESS", f"{first.address}:{AGENT_PORT}"
            ),
            "PATH": f"{ssh_client(root)}:{os.environ['PATH']}",
        }
        self.api = Service("api", root, api)
        self.coordinator = self._service("coordinator")
        self.standby = self._service("standby")
        for host in machines:
            self.boot(host)

    def start_api(self) -> None:
        super().start_api()
        self.api.environment["MUSTER_PORT"] = self.environment.pop("MUSTER_PORT")

    def boot(self, host: Host) -> None:
        """Let others log in on a host that is on."""
        start_sshd(host, self.root, self._own.get(host, {}))

    def process_tags(self, host: Host) -> dict[int, str]:
        """Return the processes of jobs on a host, by their pids outside: what each is."""
        tags = {pid: tag_of(pid) or "" for pid in host.processes()}
        return {pid: tag.partition("/")[2] for pid, tag in tags.items() if tag}

    def all_tags(self) -> dict[int, str]:
        """Return the same for all hosts."""
        return {pid: tag for host in self.machines for pid, tag in self.process_tags(host).items()}

    def _service(self, name: str) -> HostService:
        service = HostService("coordinator", self.root, self.environment, name=name)
        service.host = self.machines[0]
        return service


@contextmanager
def cluster(
    root: Path,
    count: int = 3,
    slots: int = 2,
    own: Sequence[Mapping[str, str]] = (),
    **environment: str,
) -> Iterator[ClusterInstallation]:
    """Yield an installation that runs, over so many hosts."""
    with ExitStack() as stack:
        machines = stack.enter_context(hosts(count, root))
        installation = stack.enter_context(
            ClusterInstallation(root, machines, slots, own, **environment)
        )
        yield installation


class SchedulerUnderTest(Protocol):
    """What chooses machines for agents, over test hosts."""

    name: str
    environment: Mapping[str, str]  # that the coordinator needs
    fields: Mapping[str, Any]  # of a job that runs there, two ranks in each agent
    refused: tuple[Mapping[str, Any], str]  # options that it never accepts, and what it says
    held: str  # what the job's message says while none of its jobs is started
    taken_away: str  # what the event says of a job that was taken away

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def jobs(self) -> Mapping[str, str]:
        """Return the states of its jobs that are not over, or not removed, by their names."""

    def hold(self, *, is_held: bool) -> None:
        """Whether to start no job."""

    def take_away(self, name: str) -> None:
        """End a job, as a person or a node without memory does."""

    def is_away(self) -> AbstractContextManager[None]:
        """Answer nothing meanwhile."""


@contextmanager
def scheduler_cluster(
    root: Path,
    *kinds: Callable[[Path, Sequence[Host]], SchedulerUnderTest],
    count: int = 3,
    **environment: str,
) -> Iterator[tuple[ClusterInstallation, *tuple[Any, ...]]]:
    """Yield an installation, and each kind of scheduler, over so many hosts that share a disk."""
    with hosts(count, root) as machines, ExitStack() as stack:
        schedulers = []
        for kind in kinds:
            schedulers.append(kind(root, machines))
            stack.callback(schedulers[-1].stop)
            schedulers[-1].start()
            environment |= schedulers[-1].environment
        engines = ",".join(["local", "ssh", *(it.name for it in schedulers)])
        settings = {"CHECKPOINT_DIR": str(root / "shared" / "checkpoints"), **environment}
        installation = ClusterInstallation(root, machines, MUSTER_ENGINES=engines, **settings)
        yield stack.enter_context(installation), *schedulers


def lent_cluster(
    installation: ClusterInstallation, scheduler: SchedulerUnderTest
) -> Iterator[ClusterInstallation]:
    """Lend it to one test, whose jobs are ended and leave nothing."""
    yield installation
    installation.end_jobs()
    await_value(lambda: not scheduler.jobs(), lambda: f"left: {scheduler.jobs()}")
    await_value(lambda: not installation.all_tags(), lambda: f"{installation.all_tags()}")


def trains(step: int) -> Callable[[Seen], bool]:
    return lambda seen: is_running(seen) and seen["step"] >= step


def start_sshd(host: Host, root: Path, variables: Mapping[str, str] | None = None) -> Process:
    """Start a real sshd, which lets in the key of `ssh_client` and sets `variables`."""
    lines = "".join(f"SetEnv {name}={value}\n" for name, value in (variables or {}).items())
    config = sshd_config(host.directory, root, lines)
    return host.start([str(SSHD), "-D", "-e", "-f", str(config)], cwd=root)


def sshd_config(directory: Path, root: Path, lines: str) -> Path:
    """Write the configuration of an sshd, with a key of its own; `lines` come first, and win."""
    Path("/run/sshd").mkdir(exist_ok=True)
    key = directory / "host_key"
    if not key.exists():
        _make_key(key)
    config = directory / "sshd_config"
    config.write_text(
        f"{lines}\nHostKey {key}\nAuthorizedKeysFile {root}/ssh/key.pub\n"
        "PasswordAuthentication no\nUsePAM no\nStrictModes no\nPermitRootLogin yes\n"
        "PidFile none\nClientAliveInterval 2\nClientAliveCountMax 2\nMaxStartups 100\n"
    )
    return config


def ssh_client(root: Path) -> Path:
    """Return the directory of an ``ssh`` that uses its own key and configuration."""
    directory = root / "ssh"
    directory.mkdir(exist_ok=True)
    _make_key(directory / "key")
    config = directory / "config"
    config.write_text(
        f"IdentityFile {directory}/key\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n"
        "LogLevel ERROR\n"
    )
    client = directory / "ssh"
    client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} "$@"\n')
    client.chmod(0o755)
    return directory


def _make_key(path: Path) -> None:
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(words, check=True)


def _description(machines: Sequence[Host], slots: int) -> str:
    lines = ["nodes:"]
    for number, host in enumerate(machines):
        transport = "ssh" if number else "local"
        lines += [
            f"  - name: {host.name}",
            f"    host: {host.address if number else 'localhost'}",
            f"    transport: {transport}",
            f"    slots: {slots}",
            "    max_adapters: 8",
        ]
    return "\n".join(lines) + "\n"
