"""A service, and files next to its own that must be neither changed nor shown."""

import json
import re
import signal
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from database.engine import Database
from muster.checkpoints.manifest import CheckpointName
from muster.contracts.job.status import JobStatus
from muster.runtime.secrets import SecretStore
from stress.security.injection_fields import EARLIER, JOB, ORDINARY, STANDING
from tests.support.api_service import DEADLINE_SECONDS, Agent, Service, StandIn
from tests.support.database_samples import member
from tests.support.installation import write_small_dataset

CONTENT = "content that must not be shown or changed"

SEGMENTS: Mapping[str, str] = {"job_id": STANDING, "worker_id": "0", "name": ORDINARY}
"""What stands in a path where no text does."""

PLANTED = (
    "notes.txt",
    "worker_0/model.pt",
    "step_1/manifest.json",
    "logs/rank_00000.000.log",
)
"""Named like what a job has, but for what would be taken for checkpoints of another job: beside
those none is accepted."""

LOOKS = ("", "/summary", "/events", "/logs", "/attempts", "/audit", "/workers")


@dataclass
class Findings:
    """What became of every text, by where it was put, and sentences about what must not be."""

    refused: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    """What has not been tried in truth, as nothing would have been taken."""

    @property
    def sent(self) -> int:
        return sum(self.refused.values()) + sum(self.accepted.values())

    def count(self, where: str, answer: httpx.Response) -> None:
        for kind, is_it in ((self.refused, answer.is_client_error), (self.accepted, True)):
            kind.setdefault(where, 0)
            if is_it:
                kind[where] += 1
                break

    def judge(self, where: str, text: str, answer: httpx.Response) -> None:
        """Record violations in a response to any request."""
        told = f"{where}, {text[:80]!r}:"
        if answer.is_server_error:
            self.faults.append(f"{told} answered with {answer.status_code}")
        if CONTENT in answer.text or "root:x:" in answer.text:
            self.faults.append(f"{told} {answer.request.url} shows {answer.text[:200]}")
        if "x-injected" in answer.headers:
            self.faults.append(f"{told} has made a header")


class AttackedService:
    """The service below `root`, whose coordinator is a stand-in."""

    def __init__(self, root: Path, findings: Findings) -> None:
        self.precious = root / "outside" / JOB
        self.mark = root / "mark"
        self._root = root
        self._findings = findings
        installation = root / "installation"
        installation.mkdir()
        lent = {"MUSTER_SECRET_ENV": ORDINARY, ORDINARY: "lent"}
        self.service = Service(installation, MUSTER_REQUESTS_PER_SECOND="1000000", **lent)
        SecretStore(self.service.files.secrets).put(ORDINARY, "kept")
        write_small_dataset(installation / "shards")
        (installation / f"{ORDINARY}.py").write_text("class Name: ...")
        saved = str(CheckpointName(generation=0, step=5))
        (installation / "checkpoints" / EARLIER / "worker_0" / saved).mkdir(parents=True)
        for name in PLANTED:
            (self.precious / name).parent.mkdir(parents=True, exist_ok=True)
            (self.precious / name).write_text(CONTENT)
        self._before = self.surroundings()

    @contextmanager
    def serving(self) -> Iterator[None]:
        self.service.start()
        database = Database.open(self.service.database_url)
        self._stand_in = StandIn(database)
        url = self.service.url
        self._client = httpx.Client(base_url=url, timeout=DEADLINE_SECONDS)
        try:
            self._let_stand()
            yield
        finally:
            self._client.close()
            database.close()
            self.service.end(signal.SIGKILL)

    def _let_stand(self) -> None:
        """Mark the job that is the subject of requests as running."""
        body = {"job_id": STANDING, "mode": "synchronous", "world_size": 2}
        self._client.post("/jobs", json=body).raise_for_status()
        self._stand_in.run(STANDING)
        self._stand_in.write(STANDING, members=[member(number) for number in range(2)])
        Agent(self.service.files).write(STANDING, 0, "a line\n", at_micros=1_700_000_000_000_000)

    def surroundings(self) -> Mapping[str, object]:
        """Return the files outside of the installation."""
        inside = self.service.root
        return {
            str(path): _facts(path)
            for path in self._root.rglob("*")
            if path != inside and inside not in path.parents
        }

    def compare(self, where: str) -> None:
        """Record changes outside since the last call, and a job that no longer runs."""
        if self._client.get(f"/jobs/{STANDING}").json().get("status") != JobStatus.RUNNING:
            self._findings.faults.append(f"{where}: {STANDING} no longer runs")
        now = self.surroundings()
        for path in now.keys() | self._before.keys():
            if now.get(path) != self._before.get(path):
                self._findings.faults.append(f"{where}: {path} has changed")
        self._before = now

    def demand(self, what: str, answer: httpx.Response) -> None:
        """Note that something ordinary was not taken; what runs is not deleted, as it runs."""
        is_kept = answer.request.method == "DELETE" and answer.status_code == httpx.codes.CONFLICT
        if not (answer.is_success or is_kept):
            self._findings.lacking.append(f"{what}: {answer.status_code} {answer.text[:200]}")

    def submit(self, where: str, text: str, body: Mapping[str, Any]) -> httpx.Response:
        """Submit a job; one that is accepted is looked at from all sides, and removed by force."""
        content = json.dumps({"command": ["true"], **body}).encode()
        headers = {"content-type": "application/json"}
        answer = self._client.post("/jobs", content=content, headers=headers)
        self._findings.count(where, answer)
        self._findings.judge(where, text, answer)
        if answer.status_code == httpx.codes.CREATED:
            job_id = answer.json()["job_id"]
            self._stand_in.move(job_id, JobStatus.STOPPED)
            self._look_at(job_id, where, text)
            self._remove(job_id, where, text)
        return answer

    def call(self, where: str, text: str, method: str, path: str, **query: str) -> httpx.Response:
        """Send a text in a path or a query."""
        body = {} if method in {"POST", "PATCH"} else None
        with self._client.stream(method, path, params=query, json=body) as begun:
            answer = _shown(begun)
        self._findings.count(where, answer)
        self._findings.judge(where, text, answer)
        if f"/{STANDING}" in path and "/problems/job-not-found" in answer.text:
            self._findings.lacking.append(f"{method} {path} {query} has met no job")
        return answer

    def swap(self, where: str, link: Path, target: Path) -> None:
        """Put a link in the place of something of a job's, look at the job and delete it."""
        submitted = self._client.post("/jobs", json={"job_id": JOB, "command": ["true"]})
        assert submitted.is_success, [submitted.text, *self._findings.faults]
        self._stand_in.run(JOB)
        self._stand_in.end(JOB)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
        self._findings.count(where, submitted)
        self._look_at(JOB, where, str(link))
        self._remove(JOB, where, str(link))
        link.unlink(missing_ok=True)

    def operations(self) -> Iterator[tuple[str, str, list[str]]]:
        """Yield method, path and the names of queries of every route."""
        document = self._client.get("/openapi.json").json()
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                queries = [
                    parameter["name"]
                    for parameter in operation.get("parameters", [])
                    if parameter["in"] == "query"
                ]
                yield method.upper(), path, queries

    def _look_at(self, job_id: str, where: str, text: str) -> None:
        for look in LOOKS:
            answer = self._client.get(f"/jobs/{job_id}{look}")
            self._findings.judge(f"{where}, looked at", text, answer)

    def _remove(self, job_id: str, where: str, text: str) -> None:
        gone = self._client.delete(f"/jobs/{job_id}", params={"force": True})
        self._findings.judge(f"{where}, removed", text, gone)
        if gone.is_error:
            self._findings.faults.append(f"{where}, {text[:80]!r}: {gone.text[:200]}")


def names_in(path: str) -> list[str]:
    """Return the names in a path that stand for something."""
    return re.findall(r"{(\w+)}", path)


def filled(path: str, **texts: str) -> str:
    """Return a path with these texts, as one segment each, and something ordinary elsewhere."""
    for name, text in {**SEGMENTS, **texts}.items():
        segment = quote(text.encode(errors="surrogatepass"), safe="")
        path = path.replace(f"{{{name}}}", segment)
    return path


def _shown(begun: httpx.Response) -> httpx.Response:
    """Return an answer that has begun: all of it, of a stream up to the first line."""
    if begun.headers.get("content-type", "").startswith("text/event-stream"):
        text = ""
        for piece in begun.iter_text():
            text += piece
            if "data:" in text:
                break
    else:
        text = begun.read().decode(errors="replace")
    return httpx.Response(
        begun.status_code, headers=begun.headers, text=text, request=begun.request
    )


def _facts(path: Path) -> object:
    found = path.lstat()
    content = path.read_bytes() if stat.S_ISREG(found.st_mode) else b""
    return found.st_mode, found.st_ino, found.st_mtime_ns, content
