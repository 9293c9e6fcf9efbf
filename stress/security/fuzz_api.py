"""Fuzzes the API and the page with requests generated from an OpenAPI document.

``python -m stress.security.fuzz_api --cases 20000 --seed 0`` sends valid and invalid requests to a
real service with Schemathesis. No response may be a 5xx, each must match the document, and the
service must not log an error. A stand-in for the coordinator changes the jobs meanwhile, so that
requests see them in every state.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute

from api.page import routes as page
from api.server import create_app
from database.engine import Database
from database.errors import DatabaseError
from database.jobs import NewJob
from database.records import Job, RankRecord, utc_now
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import JobId, JobStatus, JobUid
from muster.contracts.rank import ProcessState
from stress.runner import Report, main
from stress.security.fuzz_hooks import KNOWN
from tests.support.api_service import Agent, Service, StandIn

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
ROUND_EXAMPLES = 300
"""Limit of cases per operation and round; each round has another seed."""

COVERAGE_CASES = 1500
"""Schemathesis tries every limit of every field, however few cases are asked for: about as many."""

PAUSE_SECONDS = 0.05
LIFE_SECONDS = 0.3
"""Of a job: streams and waits are over soon."""

SPECS = {
    KNOWN[0]: JobSpec(mode="synchronous", world_size=4, min_workers=2, max_workers=6),
    KNOWN[1]: JobSpec(command=("true",), world_size=2),
}


@dataclass
class Rounds:
    """Counts and faults so far."""

    cases: int = 0
    rounds: int = 0
    operations: int = 0
    faults: list[str] = field(default_factory=list)


class Caretaker:
    """Moves jobs on, and brings back those that are known, inside of `with`."""

    def __init__(self, stand_in: StandIn, agent: Agent) -> None:
        self._stand_in = stand_in
        self._agent = agent
        self._is_over = threading.Event()
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        self._caring = self._thread.submit(self._care)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop; raises the error that ended the thread, since requests then had no jobs."""
        self._is_over.set()
        self._thread.shutdown()
        self._caring.result()

    def _care(self) -> None:
        while not self._is_over.wait(PAUSE_SECONDS):
            # The API may be faster: then the job is looked at again.
            with suppress(DatabaseError):
                for job in self._stand_in.jobs.unfinished():
                    self._move_on(job)
            for job_id in KNOWN:
                with suppress(DatabaseError):
                    self._bring_back(JobId(job_id))

    def _move_on(self, job: Job) -> None:
        if job.stop_request is not None:
            self._stand_in.end(job.job_id)
        elif job.status is JobStatus.QUEUED:
            with suppress(FileNotFoundError):  # the API has deleted the job's directory
                self._agent.write(job.job_id, 0, "one\ntwo\nthr", at_micros=1_700_000_000_000_000)
            rank = RankRecord(rank=0, attempt=0, state=ProcessState.LIVE, process=None)
            self._stand_in.run(job.job_id, rank)
        elif _age_seconds(job) > LIFE_SECONDS:
            self._stand_in.move(job.job_id, JobStatus.COMPLETED)

    def _bring_back(self, job_id: JobId) -> None:
        jobs = self._stand_in.jobs
        job = jobs.find(job_id)
        if job is not None and job.is_terminal and _age_seconds(job) > LIFE_SECONDS:
            jobs.delete(job_id, job.uid)
            job = None
        if job is None:
            uid = JobUid(f"{job_id}-{time.monotonic_ns()}")
            jobs.create([NewJob(job_id, uid, SPECS[job_id])])


def run(directory: Path, *, cases: int = 20_000, seed: int = 0) -> Report:
    """Send at least so many cases."""
    done = Rounds()
    service = Service(directory)
    with _served(service):
        while done.cases < cases and not done.faults:
            _round(service, cases - done.cases, seed + done.rounds, done)
    done.faults += [f"logged: {line}" for line in _logged(service) if line["level"] == "error"]
    figures = f"{done.cases} cases on {done.operations} operations in {done.rounds} rounds"
    return Report([figures], done.faults)


@contextmanager
def _served(service: Service) -> Iterator[None]:
    service.start()
    database = Database.open(service.database_url)
    try:
        with Caretaker(StandIn(database), Agent(service.files)):
            yield
    finally:
        database.close()
        service.end(signal.SIGTERM)


def _round(service: Service, cases: int, seed: int, done: Rounds) -> None:
    """Let Schemathesis run once, and add what it found to `done`."""
    verdict, document = service.root / "verdict.json", service.root / "document.json"
    document.write_text(json.dumps(_document()))
    is_thorough = done.rounds == 0 and cases > COVERAGE_CASES
    # Not every operation has so many cases: some take nothing that could differ.
    examples = min(ROUND_EXAMPLES, cases // (done.operations or 15) + 1)
    ended = subprocess.run(
        [
            sys.executable,
            *("-m", "schemathesis.cli", "run", str(document), "--url", service.url),
            *("--checks", ",".join(CHECKS)),
            *("--exclude-path-regex", "summaries/stream|/watch"),  # they end with their jobs
            *("--phases", "examples,coverage,fuzzing" if is_thorough else "examples,fuzzing"),
            *("--max-examples", str(examples), "--seed", str(seed)),
            *("--request-timeout", "20", "--warnings", "off", "--no-color"),
            *("--report", "json", "--report-json-path", str(verdict)),
        ],
        cwd=service.root,
        env={
            **os.environ,
            "SCHEMATHESIS_HOOKS": str(Path(__file__).with_name("fuzz_hooks.py")),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    found = json.loads(verdict.read_text()) if verdict.exists() else None
    if ended.returncode or not found or not found["test_cases"]["generated"]:
        done.faults.append(f"with seed {seed}:\n{ended.stdout}")
    if found:
        done.cases += found["test_cases"]["generated"]
        done.operations = found["operations"]["tested"]
    done.rounds += 1


def _document() -> dict[str, Any]:
    """Return the API's document with the routes of the page, whose answers it leaves open."""
    document, pages = create_app().openapi(), FastAPI()
    for route in (*page.router.routes, *page.open_router.routes):
        assert isinstance(route, APIRoute)
        pages.add_api_route(route.path, route.endpoint, methods=[*route.methods])
    for path, operations in pages.openapi()["paths"].items():
        for operation in operations.values():
            operation["responses"] = {"default": {"description": "A page, or a refusal."}}
            if "requestBody" in operation:
                schema = msgspec.json.schema(page.JobText)["$defs"]["JobText"]
                operation["requestBody"]["content"] = {"application/json": {"schema": schema}}
        document["paths"][path] = operations
    return document


def _logged(service: Service) -> Iterator[dict[str, Any]]:
    """Yield its log; a line that is not JSON, such as a traceback, counts as an error."""
    for line in service.log.read_text(errors="replace").splitlines():
        try:
            yield {"level": "error", **json.loads(line)}
        except ValueError:
            yield {"level": "error", "event": line}


def _age_seconds(job: Job) -> float:
    return (utc_now() - job.updated_at).total_seconds()


if __name__ == "__main__":
    main(run)
