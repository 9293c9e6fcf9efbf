"""Nodes on hosts of the tests: `muster node`, or its mesh alone."""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final

import msgspec

from muster.cluster.identity import node_id
from muster.mesh.node import Status
from muster.mesh.secret import make_secret
from tests.support.hosts import Host, Process
from tests.support.installation import await_value, is_over

ROOT: Final = Path(__file__).parents[2]
POLL_SECONDS: Final = 0.01
LIMIT_SECONDS: Final = 60.0
JOB_SECONDS: Final = 240.0


class Nodes:
    """`muster node` on hosts; each writes what it says into a file."""

    def __init__(self, made: list[Host], directory: Path, words: Sequence[str]) -> None:
        self.hosts = made
        self._words = words
        self.secret = make_secret()
        self._directory = directory
        self._processes: dict[Host, Process] = {}
        self.ids = {host: node_id(self._data(host) / "node.key") for host in made}

    def start(self, *made: Host) -> None:
        for host in made:
            words = [sys.executable, "-m", *self._words]
            environ = os.environ | self.environ(host)
            with self._log(host).open("ab") as log:
                self._processes[host] = host.start(words, environ, cwd=ROOT, output=log)

    def kill(self, host: Host) -> None:
        self._processes[host].send_signal(signal.SIGKILL)
        self._processes[host].wait()

    def stop(self, host: Host) -> int:
        """End a node in order, and return its exit code."""
        self._processes[host].send_signal(signal.SIGTERM)
        return self._processes[host].wait()

    def pid(self, host: Host) -> int:
        return self._processes[host].pid

    def master(self, host: Host) -> str | None:
        """Return the node that this one has named last."""
        lines = self._log(host).read_text().splitlines()
        for line in reversed(lines):
            if "this node leads, in epoch" in line:
                return self.ids[host]
            if " leads, in epoch" in line:
                named = line.removeprefix("muster: ").partition(" leads,")[0]
                return named.partition("(")[2].removesuffix(")") or named  # it may not be linked
            if "no master answers" in line:
                return None
        return None

    def await_master(self, made: list[Host], former: str | None = None) -> str:
        until = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < until:
            named = {self.master(host) for host in made}
            if len(named) == 1 and (only := named.pop()) not in (None, former):
                return str(only)
            time.sleep(POLL_SECONDS)
        raise TimeoutError(f"no master: {[self._log(host).read_text() for host in made]}")

    def end(self) -> set[int]:
        """End all, and return their exit codes."""
        processes, self._processes = [*self._processes.values()], {}
        for process in processes:
            process.send_signal(signal.SIGTERM)
        return {process.wait() for process in processes}

    def environ(self, host: Host) -> dict[str, str]:
        """Return what a process of this host needs to be of the household."""
        own = {"MUSTER_DATA_DIR": str(host.local / "node"), "HOME": str(host.local / host.name)}
        return {"MUSTER_CLUSTER_KEY": self.secret, **own}

    def mesh(self, host: Host) -> Status:
        """Return what `muster mesh` shows there."""
        words = [f"{name}={value}" for name, value in self.environ(host).items()]
        command = [sys.executable, "-m", "cli", "mesh", "--output", "json"]
        return msgspec.json.decode(host.run("env", "-C", str(ROOT), *words, *command), type=Status)

    def said(self, host: Host) -> list[str]:
        """Return the lines of a node."""
        return self._log(host).read_text().splitlines()

    def _data(self, host: Host) -> Path:
        (host.directory / host.name).mkdir(exist_ok=True)
        made = host.directory / "node"
        made.mkdir(mode=0o700, exist_ok=True)
        return made

    def _log(self, host: Host) -> Path:
        log = self._directory / f"{host.name}.node.log"
        log.touch()
        return log


class _Loopback(HTTPConnection):
    """A connection of a host to its own node."""

    def __init__(self, host: Host) -> None:
        super().__init__("127.0.0.1", 8000, timeout=LIMIT_SECONDS)
        self._host = host

    def connect(self) -> None:
        self.sock = self._host.open_socket()
        self.sock.settimeout(self.timeout)
        self.sock.connect((self.host, self.port))


JOB: Final = {"world_size": 6, "mode": "synchronous", "epochs": 12}


class Cluster:
    """`muster node` on hosts, and `muster` typed there."""

    def __init__(self, running: Nodes, file: Path) -> None:
        self.nodes = running
        self.file = file

    def muster(self, host: Host, *words: str) -> str:
        return host.run(*self._command(host, *words))

    def keep_secret(self, host: Host, name: str, value: str) -> None:
        piped = 'printf %s "$0" | "$@"'
        host.run("sh", "-c", piped, value, *self._command(host, "secret", "set", name))

    def _command(self, host: Host, *words: str) -> list[str]:
        environ = self.nodes.environ(host) | {"PYTHONPATH": str(ROOT)}
        named = [f"{name}={value}" for name, value in environ.items()]
        return ["env", "-C", environ["HOME"], *named, sys.executable, "-m", "cli", *words]

    def read(self, host: Host, *words: str) -> Any:  # noqa: ANN401  JSON
        printed = self.muster(host, *words, "--output", "json")
        return json.loads(printed[printed.index("{") :])

    def ask(self, host: Host, path: str, method: str = "GET", **fields: object) -> Any:  # noqa: ANN401  JSON
        """Return what the node of a host answers. Raises OSError if no node leads."""
        with closing(_Loopback(host)) as connection:
            body = json.dumps(fields) if fields else None
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
            if answer.status >= HTTPStatus.MULTIPLE_CHOICES:
                raise OSError(f"{method} {path}: {answer.status} {text}")
            return json.loads(text)

    def events(self, host: Host, job: str, kind: str = "") -> list[tuple[float, str]]:
        """Return the times, in seconds since 1970, and texts of the events of a kind, or of all."""
        return [
            (datetime.fromisoformat(each["at"]).timestamp(), each["message"])
            for each in self.ask(host, f"/jobs/{job}/events")["events"]
            if kind in ("", each["kind"])
        ]

    def has_copies(self, leader: Host) -> bool:
        """Return whether all other nodes have the rows of the one that leads."""
        peers = self.nodes.mesh(leader).peers
        nodes = [peer for peer in peers if peer.machine is not None]
        return len(nodes) == len(self.nodes.hosts) - 1 and all(peer.has_rows for peer in nodes)

    def leader(self, former: Host | None = None) -> Host:
        """Return the host whose node leads, once it serves the cluster; `former` is off."""
        others = [host for host in self.nodes.hosts if host is not former]
        master = self.nodes.await_master(others, former and self.nodes.ids[former])
        found = next(host for host in self.nodes.hosts if self.nodes.ids[host] == master)
        until = time.monotonic() + LIMIT_SECONDS
        while not self._is_served(found):
            if time.monotonic() > until:
                raise TimeoutError(f"{found.name} leads, and does not serve the cluster")
            time.sleep(POLL_SECONDS)
        return found

    def _is_served(self, host: Host) -> bool:
        try:
            return bool(self.ask(host, "/readyz"))
        except OSError:
            return False

    def submit(self, host: Host, **fields: object) -> str:
        self.file.write_text(json.dumps(JOB | fields))
        return self.submit_words(host, str(self.file))

    def submit_words(self, host: Host, *words: str) -> str:
        printed = self.muster(host, "submit", "--detach", *words)
        return next(line for line in printed.splitlines() if line.startswith("job-"))

    def nodes_of(self, host: Host, job: str) -> set[str]:
        """Return the machines of the ranks that run."""
        workers = self.ask(host, f"/jobs/{job}/workers")["workers"]
        return {each["node"] for each in workers if each["pid"] is not None}

    def complete(self, host: Host, job: str) -> None:
        """Wait for the end of a job, for minutes where the machine is busy."""
        is_ended = lambda: is_over(self.ask(host, f"/jobs/{job}/summary"))  # noqa: E731
        await_value(is_ended, lambda: self.muster(host, "events", job), JOB_SECONDS)
        self.muster(host, "wait", job)

    def result(self, host: Host, leader: Host, job: str) -> str:
        """Wait for the end of a job, check what it read, and return the digest of its weights.

        They lie on the machine that leads.
        """
        self.complete(host, job)
        self.muster(host, "audit", job)
        return self.muster(leader, "digest", job)


@contextmanager
def nodes(made: list[Host], words: Sequence[str] = ("tests.support.bare_node",)) -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory(prefix="muster-nodes-") as name:
        running = Nodes(made, Path(name), words)
        try:
            yield running
        finally:
            running.end()
