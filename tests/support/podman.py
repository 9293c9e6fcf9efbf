"""Pods that podman plays, on this machine, as they are: ``podman kube play``.

Their image is empty. Containers see the programs of this machine and this checkout, and write to
nothing but the volumes of the Pod. All that podman stores is below one directory.

They run as the user of the coordinator, root, though without its capabilities: an `emptyDir` of
podman 4 belongs to root.
"""

import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from tests.support.hosts import Host
from tests.support.kubernetes import Kubernetes

IMAGE: Final = "localhost/agent:test"
CLAIM: Final = "shared"
TOOLS: Final = ("podman", "runc", "catatonit", "netavark")
CHECKOUT: Final = Path(__file__).parents[2]

_STORAGE: Final = """[storage]
driver = "vfs"
graphroot = "{root}/graph"
runroot = "{root}/run"
"""
_CONTAINERS: Final = """[containers]
default_ulimits = ["nofile=16384:16384", "nproc=16384:16384"]
volumes = {volumes}
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
tmp_dir = "{root}/tmp"
[network]
network_backend = "netavark"
"""


def needs_podman() -> pytest.MarkDecorator:
    reason = "" if os.geteuid() == 0 else "only root can run its containers"
    path = f"{os.environ['PATH']}:/usr/sbin:/usr/lib/podman:/usr/libexec/podman"
    if missing := [name for name in TOOLS if shutil.which(name, path=path) is None]:
        reason = f"{', '.join(missing)} are not installed"
    return pytest.mark.skipif(bool(reason), reason=f"no podman can run here: {reason}")


class Podman(Kubernetes):
    """The API of the stand-in, with podman below it. Pods are in the networks of the hosts."""

    def __init__(self, root: Path, machines: Sequence[Host]) -> None:
        super().__init__(root, machines)
        claimed = machines[0].shared
        options = {"image": IMAGE, "ranks_per_host": 2, "claim": CLAIM, "claim_path": str(claimed)}
        self.fields = {"engine": "kubernetes", "engine_options": options}
        self._pod_ids: list[str] = []
        self._root = root / "podman"
        self._root.mkdir()
        seen = {Path("/usr"), Path(sys.base_prefix), Path(sys.prefix), CHECKOUT}
        outer = [it for it in seen if not seen & {*it.parents}]
        volumes = msgspec.json.encode([f"{it}:{it}:ro" for it in outer]).decode()
        containers, storage = self._root / "containers.conf", self._root / "storage.conf"
        containers.write_text(_CONTAINERS.format(root=self._root, volumes=volumes))
        storage.write_text(_STORAGE.format(root=self._root))
        files = {"CONTAINERS_CONF": containers, "CONTAINERS_STORAGE_CONF": storage}
        self._environ = {**os.environ, **{name: str(path) for name, path in files.items()}}
        path = f"ENV PATH={Path(sys.executable).parent}:/usr/bin:/bin"
        self.run("import", "--change", path, "-", IMAGE, content=_empty_system())
        bind = [f"--opt={it}" for it in ("type=none", "o=bind", f"device={claimed}")]
        self.run("volume", "create", *bind, CLAIM)

    def stop(self) -> None:
        super().stop()
        self.run("pod", "rm", "--all", "--force", "--time=0")
        self.run("volume", "rm", "--all", "--force")
        for pod_id in self._pod_ids:  # podman 4 leaves groups of the version 1 behind
            for group in Path("/sys/fs/cgroup").glob(f"*/libpod_parent/{pod_id}"):
                group.rmdir()

    def run(self, *words: str, content: bytes = b"", prefix: Sequence[str] = ()) -> str:
        """Run a command of podman, which has to succeed, and return what it printed."""
        tried = subprocess.run(
            [*prefix, "podman", *words],
            input=content,
            env=self._environ,
            capture_output=True,
            check=False,
        )
        assert tried.returncode == 0, f"podman {words[0]}: {tried.stderr.decode()}"
        return tried.stdout.decode()

    def containers(self) -> list[str]:
        """Return the names of all containers, also of those that have ended."""
        return self.run("ps", "--all", "--format={{.Names}}").split()

    def _run(self, pod: dict[str, Any], node: Host) -> "PlayedPod":
        return PlayedPod(self, pod, node)

    def play(self, pod: Mapping[str, Any], node: Host) -> "subprocess.Popen[bytes]":
        """Start a Pod; return a process that prints the exit code of its container."""
        name = pod["metadata"]["name"]
        body = self._root / f"{name}.json"
        body.write_bytes(msgspec.json.encode(pod))
        # Pods cannot be put into a network by its path, but into that of podman.
        prefix = ["nsenter", f"--net={node.network_namespace}", "--"]
        _, pod_id, *_ = self.run("kube", "play", "--network=host", str(body), prefix=prefix).split()
        self._pod_ids.append(pod_id)
        words = ["podman", "wait", f"{name}-agent"]
        return subprocess.Popen(words, env=self._environ, stdout=subprocess.PIPE)


class PlayedPod:
    """What `Kubernetes` uses of a `Process`."""

    def __init__(self, podman: Podman, pod: Mapping[str, Any], node: Host) -> None:
        self._podman = podman
        self._name = pod["metadata"]["name"]
        self._waiting = podman.play(pod, node)
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and self._waiting.poll() is not None:
            self._code = int(self._waiting.communicate()[0])
            self._podman.run("pod", "rm", "--force", self._name)
        return self._code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            self._podman.run("kill", f"--signal={number.name}", f"{self._name}-agent")


def _empty_system() -> bytes:
    """Return an archive of a system that has directories to mount on, and nothing else."""
    content = BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name in ("usr", "etc", "tmp", "dev", "proc", "sys"):
            member = tarfile.TarInfo(name)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(member)
        for name in ("bin", "lib", "lib64"):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, f"usr/{name}"
            archive.addfile(member)
    return content.getvalue()
