"""The checks after a chaos run. Each yields one sentence per violation."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cli.checkpoints import digests
from muster.checkpoints.errors import CheckpointError
from muster.checkpoints.listing import checkpoint_dirs
from muster.contracts.paths import checkpoints_of_job
from stress.chaos.figures import History
from stress.chaos.jobs import Training, Workload
from stress.chaos.scene import Scene
from stress.chaos.strikes import Striker
from tests.support.installation import Installation

Digests = list[tuple[str, int, str]]
"""Whose, of which step, and the sha256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A finished run and everything that was recorded about it."""

    scene: Scene
    striker: Striker
    undisturbed: Mapping[str, Digests]
    """Of each kind of training; nothing else was submitted before the scene began."""
    history: History
    left: Sequence[str]
    """Processes of jobs that still ran some time after all jobs had ended."""

    @property
    def installation(self) -> Installation:
        return self.scene.installation

    @property
    def workload(self) -> Workload:
        return self.scene.workload

    def breaches(self) -> dict[str, list[str]]:
        """Return the violations by the name of the check."""
        checks = {
            "every fault took effect": self._without_effect(),
            "all jobs COMPLETED": self._unfinished(),
            "no acknowledged job lost": self._lost(),
            "the bits of an undisturbed run": self._other_bits(),
            "every sample exactly once": self._inexact(),
            "no other rank restarted": self.history.unexplained(),
            "logs without gaps": self._gaps(),
            "checkpoints intact and newer each time": self._bad_reads(),
            "nothing left behind": iter(self.left),
            "no unrelated process killed": iter(self.scene.decoys.killed()),
        }
        return {name: list(found) for name, found in checks.items()}

    def _without_effect(self) -> Iterator[str]:
        """Faults without effect, which would prove nothing."""
        for strike in self.striker.strikes:
            if not strike.observed:
                yield f"{strike}"

    def _unfinished(self) -> Iterator[str]:
        for job_id in [it.job_id for it in self.workload.trainings] + self.workload.errands:
            job = self.installation.job(job_id)
            if job["status"] != "COMPLETED":
                yield f"{job_id} is {job['status']}: {job['message']}"

    def _lost(self) -> Iterator[str]:
        yield from self.workload.doubled
        answer = self.installation.request("GET", "/jobs", params={"limit": 1})
        there = int(answer.headers["X-Total-Count"]) - len(self.undisturbed)
        wanted = len(self.workload.trainings) + len(self.workload.errands)
        if there != wanted:
            yield f"{wanted} jobs were acknowledged, and there are {there}"

    def _other_bits(self) -> Iterator[str]:
        for training in self.workload.trainings:
            try:
                found = digests_of(self.installation, training)
            except CheckpointError as error:
                yield f"{training.job_id}: {error}"
                continue
            if found != self.undisturbed[training.kind]:
                wanted = self.undisturbed[training.kind]
                yield f"{training.job_id} ({training.kind}): {found} instead of {wanted}"

    def _inexact(self) -> Iterator[str]:
        for training in self.workload.trainings:
            if training.is_together:
                answer = self.installation.request("GET", f"/jobs/{training.job_id}/audit")
                audit = answer.json()
                if not (audit["complete"] and audit["exactly_once"]):
                    yield json.dumps(audit)

    def _gaps(self) -> Iterator[str]:
        for job_id, follower in self.scene.followers.items():
            if not follower.has_ended:
                yield f"the stream of {job_id} does not end"
            for fault in self.scene.printed[job_id].faults(self.installation.checkpoint_dir):
                yield f"{job_id}: {fault}"

    def _bad_reads(self) -> Iterator[str]:
        yield from self.scene.reading["invalid"]
        yield from self.scene.reading["regressed"]
        if not self.scene.reading["reads"]:
            yield "no checkpoint was read"


def digests_of(installation: Installation, training: Training) -> Digests:
    """Return the identity of a training's newest checkpoints; raises a `CheckpointError`."""
    directory = checkpoints_of_job(installation.checkpoint_dir, training.job_id)
    return list(digests(checkpoint_dirs(directory)))
