"""Builds the images, runs docker-compose.yml, and kills its services under a training job.

Needs docker with its compose plugin, or podman with podman-compose. Jobs read shards from the
object store and save there. Their last states must have the bits of a job that nothing disturbs and
that saves to a disk; every sample must be counted once. Everything that was started is removed.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from stress.runner import Report, main, say

ROOT: Final = Path(__file__).parents[1]
PORT: Final = 18000
START_SECONDS: Final = 120.0
JOB_SECONDS: Final = 300.0
JOB: Final[Mapping[str, Any]] = {
    "mode": "synchronous",
    "world_size": 2,
    "epochs": 2,
    "virtual_shards": 4,
    "batch_size": 32,
    "sleep_sec": 0.02,
    "checkpoint_every": 5,
    "max_restarts": 100,
}
VICTIMS: Final = ("coordinator", "s3", "postgres", "api")


class Cluster:
    """The services of the compose file, under a project of their own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # A copy, as a developer may have keys of their own beside the compose file.
        shutil.copy(ROOT / "docker-compose.yml", directory)
        if not (directory / ".secrets").exists():
            command = ["make", "-f", str(ROOT / "Makefile"), "compose-env"]
            subprocess.run(command, cwd=directory, check=True, capture_output=True)
            (directory / ".env").write_text(f"MUSTER_PORT={PORT}\n")
        self._project = f"muster-stress-{directory.name.lower().replace('_', '')}"
        docker = shutil.which("docker")
        version = [docker or "false", "compose", "version"]
        is_docker = subprocess.run(version, capture_output=True, check=False).returncode == 0
        self._engine = "docker" if is_docker else "podman"
        self._compose = ["docker", "compose"] if is_docker else ["podman-compose"]
        token = (directory / ".secrets/muster_token").read_text()
        headers = {"Authorization": f"Bearer {token}"}
        self._client = httpx.Client(
            base_url=f"http://127.0.0.1:{PORT}", headers=headers, timeout=10
        )

    def compose(self, *words: str) -> None:
        """Run a compose command; raises CalledProcessError with its output."""
        command = [*self._compose, "-p", self._project, *words]
        subprocess.run(command, cwd=self._directory, check=True, capture_output=True)

    def container(self, service: str) -> str:
        """Return the id of a service's container."""
        filters = (f"project={self._project}", f"service={service}")
        words = [f"--filter=label=com.docker.compose.{each}" for each in filters]
        return self.engine("ps", "-aq", *words).split()[0]

    def engine(self, *words: str) -> str:
        """Run a command of docker or podman, and return what it prints."""
        done = subprocess.run([self._engine, *words], check=True, capture_output=True, text=True)
        return done.stdout

    def kill(self, service: str, seconds: float) -> None:
        """Kill a service without warning, and start it again some time later."""
        container = self.container(service)
        self.engine("kill", container)
        time.sleep(seconds)
        self.engine("start", container)

    def request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Send a request until the API answers it."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                answer = self._client.request(method, path, **options)
                if answer.status_code < 500:
                    assert answer.is_success, answer.text
                    return answer.json()
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, f"{method} {path} is not answered"
            time.sleep(0.5)

    def wait_for_data(self) -> None:
        """Wait until the sample data set is in the store."""
        deadline = time.monotonic() + START_SECONDS
        state = ("inspect", "-f", "{{.State.Status}} {{.State.ExitCode}}")
        while self.engine(*state, self.container("sample-data")).split() != ["exited", "0"]:
            assert time.monotonic() < deadline, "the sample data set is not written"
            time.sleep(0.5)

    def submit(self, job_id: str, **fields: Any) -> None:
        self.request("POST", "/jobs", json={"job_id": job_id, **JOB, **fields})

    def wait_for_step(self, job_id: str, step: int) -> None:
        deadline = time.monotonic() + JOB_SECONDS
        while self.request("GET", f"/jobs/{job_id}/summary")["step"] < step:
            assert time.monotonic() < deadline, f"{job_id} does not reach step {step}"
            time.sleep(0.2)

    def wait_for_end(self, job_id: str) -> dict[str, Any]:
        deadline = time.monotonic() + JOB_SECONDS
        while True:
            job = self.request("GET", f"/jobs/{job_id}")
            if job["finished_at"]:
                return job
            assert time.monotonic() < deadline, f"{job_id} does not end: {job}"
            time.sleep(0.5)

    def digest(self, location: str) -> str:
        """Return the SHA-256 of the newest state in a place."""
        container = self.container("coordinator")
        done = json.loads(
            self.engine("exec", container, "muster", "digest", location, "-o", "json")
        )
        return str(done[0]["sha256"])


@contextmanager
def running(directory: Path) -> Iterator[Cluster]:
    """Start the services, and remove them with their volumes."""
    cluster = Cluster(directory)
    try:
        cluster.compose("up", "-d")
        yield cluster
    finally:
        cluster.compose("down", "-v")


def run(directory: Path, *, build: int = 1, seed: int = 0) -> Report:
    """Kill each service once in the middle of a job of its own; `build` 0: the images exist."""
    report = Report()
    if build:
        for image in ("api", "coordinator"):
            say(f"builds muster-{image}")
            words = ("-f", f"Dockerfile.{image}", "-t", f"muster-{image}", str(ROOT))
            Cluster(directory).engine("build", *words)
    with running(directory) as cluster:
        began = time.monotonic()
        cluster.request("GET", "/readyz")
        cluster.wait_for_data()
        report.lines.append(f"ready after {time.monotonic() - began:.1f} s")
        cluster.submit("reference", seed=seed, checkpoint_dir="/var/lib/muster/checkpoints")
        assert cluster.wait_for_end("reference")["status"] == "COMPLETED"
        wanted = cluster.digest("/var/lib/muster/checkpoints/reference")
        for victim in VICTIMS:
            job_id = f"without-{victim}"
            cluster.submit(job_id, seed=seed)
            cluster.wait_for_step(job_id, 10)
            say(f"kills {victim}")
            cluster.kill(victim, seconds=3)
            report.faults += _faults(cluster, job_id, wanted)
            report.lines.append(f"{victim} was killed: {cluster.wait_for_end(job_id)['status']}")
    return report


def _faults(cluster: Cluster, job_id: str, wanted: str) -> Iterator[str]:
    job = cluster.wait_for_end(job_id)
    if job["status"] != "COMPLETED":
        yield f"{job_id} is {job['status']}: {job['message']}"
        return
    if cluster.digest(f"s3://training-data/checkpoints/{job_id}") != wanted:
        yield f"{job_id} ends with other bits"
    verdict = cluster.request("GET", f"/jobs/{job_id}/audit")
    if not verdict["exactly_once"]:
        yield f"{job_id} did not read every sample exactly once: {verdict}"


if __name__ == "__main__":
    main(run)
