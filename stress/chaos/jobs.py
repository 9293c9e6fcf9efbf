"""The load of a chaos run: training jobs of every kind, and short jobs in between.

Jobs are submitted continuously. Each request carries an ``Idempotency-Key`` and is sent until it is
answered, and some are sent once more after that: there must be one job per key.
"""

import random
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from muster.contracts.location import Location, parse_location
from stress.chaos.observer import Observer
from tests.support.installation import Installation

HERE = Path(__file__).parent

LOOK_SECONDS = 0.1
RETRY_SECONDS = 0.3
ANSWER_SECONDS = 60.0
ERRAND_LOOKS = 20
"""One short job per this many polls."""
REPEATED = 1 / 3
"""Share of submissions that are repeated although they were answered."""

TOGETHER: Mapping[str, Any] = {
    "mode": "synchronous",
    "batch_size": 64,
    "virtual_shards": 16,
    "program": "program.py:Numbered",
    "working_dir": str(HERE),
}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "script": {
        "mode": "independent",
        "world_size": 2,
        "command": [sys.executable, str(HERE / "program.py")],
    },
    "together": {**TOGETHER, "world_size": 3, "backend": "shared_memory"},
    "built-in": {"mode": "independent", "world_size": 2},
    "by tcp": {**TOGETHER, "world_size": 2, "backend": "tcp", "env": {"ANY": "value"}},
}
"""Two are forked by a prefork server. A command and a job with own variables are exec'ed."""

ERRAND: Mapping[str, Any] = {
    "mode": "independent",
    "world_size": 1,
    "command": ["/bin/sh", "-c", "echo done"],
}

STEPS_OF_AN_EPOCH = {"independent": 16, "synchronous": 8}
"""Of 512 samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A job that faults are injected into."""

    job_id: str
    uid: str
    kind: str

    @property
    def is_together(self) -> bool:
        return KINDS[self.kind]["mode"] == "synchronous"


def checkpoints_of(installation: Installation) -> Location:
    """Return where jobs save that name no place."""
    return parse_location(installation.environment["CHECKPOINT_DIR"])


def witnesses_of(installation: Installation) -> Path:
    return Path(installation.environment["WITNESSES"])


def fields_of(kind: str, steps: int) -> dict[str, Any]:
    """Return the fields of a job of about `steps` steps."""
    fields = dict(KINDS[kind])
    return {**fields, "epochs": -(-steps // STEPS_OF_AN_EPOCH[fields["mode"]])}


class Workload:
    """Keeps `width` training jobs running, cycling through the kinds."""

    def __init__(
        self,
        installation: Installation,
        observer: Observer,
        *,
        width: int,
        seed: int,
        fields: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """`fields` says what to ask for, for each kind."""
        self._installation = installation
        self._observer = observer
        self._width = width
        self._fields = fields
        self._chance = random.Random(f"{seed}/jobs")  # noqa: S311  repeatable on purpose, no secret
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._kinds = sorted(fields, key=list(KINDS).index)
        self.trainings: list[Training] = []
        self.errands: list[str] = []
        self.doubled: list[str] = []
        """One sentence per key that created more than one job."""
        self.refusals: list[str] = []
        """Responses of the API that did not accept a job."""
        self.retried = 0
        """Number of submissions whose response was lost."""

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """Stop submitting after the last request is answered."""
        self._is_ending.set()
        self._thread.join(ANSWER_SECONDS)

    def lively(self) -> list[Training]:
        """Return the training jobs that still run."""
        return [it for it in self.trainings if not self._observer.is_over(it.job_id)]

    def _run(self) -> None:
        looks = 0
        while not self._is_ending.wait(LOOK_SECONDS):
            if len(self.lively()) < self._width:
                self._trains()
            if looks % ERRAND_LOOKS == 0:
                self.errands.append(self._submit(ERRAND)["job_id"])
            looks += 1

    def _trains(self) -> None:
        kind = self._kinds[len(self.trainings) % len(self._kinds)]
        job = self._submit(self._fields[kind])
        self._observer.attend(job["job_id"])
        self.trainings.append(Training(job_id=job["job_id"], uid=job["job_uid"], kind=kind))

    def _submit(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        key = f"{self._chance.getrandbits(64):016x}"
        job = self._send(fields, key)
        self._installation.note(job)
        if self._chance.random() < REPEATED:
            again = self._send(fields, key)
            if again["job_uid"] != job["job_uid"]:
                self.doubled.append(f"key {key}: {job['job_id']} and {again['job_id']}")
        return job

    def _send(self, fields: Mapping[str, Any], key: str) -> dict[str, Any]:
        """Retry until there is a response, as a client does after a lost reply."""
        while True:
            try:
                answer = self._installation.request(
                    "POST", "/jobs", json={**fields}, headers={"Idempotency-Key": key}
                )
                if answer.status_code == httpx.codes.CREATED:
                    return dict(answer.json())
                self.refusals.append(answer.text)
            except httpx.TransportError:
                self.retried += 1
            time.sleep(RETRY_SECONDS)
