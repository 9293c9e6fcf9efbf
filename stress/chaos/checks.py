"""The checks after a chaos run. Each yields one sentence per violation."""

import json
from collections.abc import Iterator, Mapping, Sequence

from muster.checkpoints.comparison import digests
from muster.checkpoints.errors import CheckpointError
from muster.checkpoints.listing import checkpoint_dirs
from muster.contracts.location import Location
from muster.contracts.settings.paths import checkpoints_of_job
from stress.chaos.figures import History
from stress.chaos.jobs import checkpoints_of, witnesses_of
from stress.chaos.services import RunningServices
from stress.chaos.strikes import Striker


def check(
    running: RunningServices,
    striker: Striker,
    history: History,
    undisturbed: Mapping[str, object],
    left: Sequence[str],
) -> dict[str, list[str]]:
    """Return the violations by the name of the check.

    `undisturbed` has the digests of each kind of training; nothing else was submitted before.
    `left` names the processes of jobs that still ran some time after all jobs had ended.
    """
    checks = {
        # A fault without effect would prove nothing.
        "every fault took effect": (f"{it}" for it in striker.strikes if not it.observed),
        "all jobs COMPLETED": _unfinished(running),
        "no acknowledged job lost": _lost(running, len(undisturbed)),
        "the bits of an undisturbed run": _other_bits(running, undisturbed),
        "every sample exactly once": _inexact(running),
        "no other rank restarted": history.unexplained(),
        "logs without gaps": _gaps(running),
        "checkpoints intact and newer each time": _bad_reads(running.reading),
        "nothing left behind": iter(left),
        "no unrelated process killed": iter(running.decoys.killed()),
    }
    return {name: list(found) for name, found in checks.items()}


def _unfinished(running: RunningServices) -> Iterator[str]:
    for job_id in [it.job_id for it in running.workload.trainings] + running.workload.errands:
        job = running.installation.job(job_id)
        if job["status"] != "COMPLETED":
            yield f"{job_id} is {job['status']}: {job['message']}"


def _lost(running: RunningServices, before: int) -> Iterator[str]:
    yield from running.workload.doubled
    answer = running.installation.request("GET", "/jobs", params={"limit": 1})
    there = int(answer.headers["X-Total-Count"]) - before
    wanted = len(running.workload.trainings) + len(running.workload.errands)
    if there != wanted:
        yield f"{wanted} jobs were acknowledged, and there are {there}"


def _other_bits(running: RunningServices, undisturbed: Mapping[str, object]) -> Iterator[str]:
    for training in running.workload.trainings:
        try:
            found = digests_of(checkpoints_of(running.installation), training.job_id)
        except CheckpointError as error:
            yield f"{training.job_id}: {error}"
            continue
        if found != (wanted := undisturbed[training.kind]):
            yield f"{training.job_id} ({training.kind}): {found} instead of {wanted}"


def _inexact(running: RunningServices) -> Iterator[str]:
    for training in running.workload.trainings:
        if training.is_together:
            audit = running.installation.request("GET", f"/jobs/{training.job_id}/audit").json()
            if not (audit["complete"] and audit["exactly_once"]):
                yield json.dumps(audit)


def _gaps(running: RunningServices) -> Iterator[str]:
    for job_id, follower in running.followers.items():
        if not follower.has_ended:
            yield f"the stream of {job_id} does not end"
        for fault in running.printed[job_id].faults(witnesses_of(running.installation)):
            yield f"{job_id}: {fault}"


def _bad_reads(reading: Mapping[str, Sequence[str]]) -> Iterator[str]:
    yield from reading["invalid"]
    yield from reading["regressed"]
    if not reading["reads"]:
        yield "no checkpoint was read"


def digests_of(checkpoint_dir: Location, job_id: str) -> object:
    """Return the identity of a training's newest checkpoints; raises a `CheckpointError`."""
    return list(digests(checkpoint_dirs(checkpoints_of_job(checkpoint_dir, job_id))))
