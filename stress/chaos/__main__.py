"""Inject faults into every process of a whole installation.

``python -m stress.chaos [--faults 300] [--seed 7] [--minutes 20]`` runs in a new installation and
fails if a check fails. No fault is injected after so many minutes; then the jobs are finished.
``--jobs`` and ``--steps`` say how many trainings run at once and how long each is, and
``--coordinators 1`` does without a standby, ``--spares 0`` without spare processes. ``--only
coordinator:kill,agent:term`` draws only from these faults. With ``--store s3`` data and checkpoints
lie in an object store; its process is stopped for moments, and the storage process of each job is
one more victim.

The seed decides the jobs, the faults and their order. Which of several processes a fault hits, and
at which instruction, also depends on the machine, so it can take a second run to reproduce a
failure.
"""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from stress.chaos.checks import check, digests_of
from stress.chaos.faults import ON_S3, VICTIMS, Victim, blows, choices_of
from stress.chaos.figures import Event, History, figures
from stress.chaos.jobs import KINDS, Workload, fields_of
from stress.chaos.observer import LeaseObserver, Observer
from stress.chaos.services import RunningServices
from stress.chaos.strikes import Striker
from stress.runner import Report, main
from tests.support.faulty_store import FaultyStore, faulty
from tests.support.installation import Installation, write_small_dataset
from tests.support.s3_server import bare_client, new_bucket, own_server, variables

SLOW_SECONDS = 0.05
"""Duration of one step while faults are injected."""

ENDURING = {
    "heartbeat_timeout": 3.0,
    # A rank that is frozen before its first heartbeat is replaced after this time.
    "start_grace_seconds": 15.0,
    # All faults are injected, so the restart budget must not run out.
    "max_restarts": 1_000_000,
    "max_kills": 1_000_000,
}


def run(  # noqa: PLR0913  the arguments of the command
    directory: Path,
    *,
    faults: int = 300,
    seed: int = 0,
    minutes: float = 20.0,
    jobs: int = 3,
    steps: int = 300,
    coordinators: int = 2,
    spares: int = 1,
    only: str = "",
    store: str = "disk",
) -> Report:
    """Run all of it in a new installation."""
    chosen = choices_of(only) if only else ()
    kinds = list(KINDS)[: max(2, jobs + 1)]
    fields = {kind: {**fields_of(kind, steps), **ENDURING, "spare_ranks": spares} for kind in kinds}
    write_small_dataset(directory / "shards")
    places = {
        "dataset_dir": str(directory / "shards"),
        "checkpoint_dir": str(directory / "checkpoints"),
    }
    with ExitStack() as stack:
        proxy, settings = stack.enter_context(_stored(directory)) if store == "s3" else (None, {})
        # Of the services: the ranks of a job with `env` are exec'ed instead of forked.
        witnesses = str(directory / "witnesses")
        installation = stack.enter_context(Installation(directory, WITNESSES=witnesses, **settings))
        undisturbed = {kind: _undisturbed(installation, fields[kind] | places) for kind in kinds}
        observer = Observer(installation)
        slow = {kind: {**fields[kind], "sleep_sec": SLOW_SECONDS} for kind in kinds}
        workload = Workload(installation, observer, width=jobs, seed=seed, fields=slow)
        leases = LeaseObserver(installation)
        striker = Striker(installation, workload, observer, leases, proxy)
        victims = dict(ON_S3 if proxy else VICTIMS)
        if not spares:
            del victims[Victim.SPARE]
        began_at = time.monotonic()
        with RunningServices(installation, observer, workload, leases, coordinators) as running:
            for blow in blows(faults, seed, chosen, victims):
                if time.monotonic() > began_at + 60 * minutes:
                    break
                striker.strike(blow)
                running.meet_new_jobs()
            left = running.come_to_rest()
            history = _history(running, striker)
            found = check(running, striker, history, undisturbed, left)
            return Report(
                [*figures(history), *_facts(running, striker), *_verdicts(found)],
                [f"{name}: {sentence}" for name, several in found.items() for sentence in several],
            )


@contextmanager
def _stored(directory: Path) -> Iterator[tuple[FaultyStore, dict[str, str]]]:
    """Put the data set into a store; yield its proxy, and the settings of services that use it."""
    server = own_server()[0]
    bucket = new_bucket(server)
    for path in (directory / "shards").iterdir():
        key = (bucket / "shards" / path.name).prefix
        bare_client(server).upload_file(str(path), bucket.bucket, key)
    # This process reads without the proxy.
    with patch.dict(os.environ, variables(server)), faulty(server) as proxy:
        settings = {
            "MUSTER_CACHE_DIR": str(directory / "cache"),
            "DATASET_DIR": str(bucket / "shards"),
            "CHECKPOINT_DIR": str(bucket / "checkpoints"),
        }
        yield proxy, {**variables(proxy.access), **settings}


def _undisturbed(installation: Installation, fields: dict[str, Any]) -> object:
    """Run a job on the disk without faults and pauses; return its digests."""
    job_id = installation.submit(**fields)
    installation.complete(job_id)
    return digests_of(installation.checkpoint_dir, job_id)


def _history(running: RunningServices, striker: Striker) -> History:
    trainings = running.workload.trainings
    return History(
        strikes=striker.strikes,
        looks=running.observer.looks,
        events={
            it.job_id: [Event.read(event) for event in running.installation.events(it.job_id)]
            for it in trainings
        },
        ends={
            Victim.API: running.api_restarter.ends,
            Victim.COORDINATOR: [term.at for term in running.leases.terms],
        },
        kinds={it.job_id: it.kind for it in trainings},
    )


def _facts(running: RunningServices, striker: Striker) -> list[str]:
    """Return further counts."""
    strikes, workload, reading = striker.strikes, running.workload, running.reading
    return [
        f"faults: {len(strikes)} injected, {sum(it.inside for it in strikes)} inside a checkpoint",
        f"faults without a process to hit: {len(striker.missed)}",
        f"jobs: {len(workload.trainings)} trainings, {len(workload.errands)} short ones",
        f"submissions repeated because the response was lost: {workload.retried}",
        f"refusals of the API: {len([*workload.refusals, *running.observer.refusals])}",
        f"reads of the newest checkpoint: {reading['reads']}, of {reading['checkpoints']}",
        f"coordinators that took the lease: {len(running.leases.terms)}",
        f"streams of logs resumed: {sum(it.resumed for it in running.followers.values())}",
        f"frozen ranks that had to be resumed: {sum(it.woken for it in strikes)}",
        f"decoys: {len(running.decoys)}",
    ]


def _verdicts(found: dict[str, list[str]]) -> list[str]:
    return [f"{'FAILED' if several else 'holds '}  {name}" for name, several in found.items()]


if __name__ == "__main__":
    main(run)
