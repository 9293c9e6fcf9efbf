"""Gangs that save with ``import muster`` and are killed between the saves of two ranks.

``python -m stress.gangs [GANGS] [SEED] [--kills 3] [--store s3]`` runs in a new installation. The
ranks of a gang train one model in step with each other, as DDP does: each adds up the gradients of
all and updates a copy of its own. All copies must end with the same bits, those of a gang that was
not disturbed. Run as a script, this file is one rank.
"""

import os
import random
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import muster
from muster.contracts.location import Location
from stress.runner import Report, chance, main, say
from tests.support.installation import Installation, is_over, pids, write_small_dataset
from tests.support.s3_server import new_bucket, own_server, variables

RANKS = 2
EPOCHS = 12  # of 16 steps each
SAVE_SECONDS = 0.03
"""Longest pause of a rank before it saves: a kill may come between the saves of two ranks."""

AT_ONCE = 3  # gangs


def run(
    directory: Path, gangs: int = 20, seed: int = 0, *, kills: int = 3, store: str = "disk"
) -> Report:
    """Kill ranks of so many gangs, and compare their models with an undisturbed one."""
    fields: dict[str, Any] = {
        "world_size": RANKS,
        "restart_scope": "gang",
        "command": [sys.executable, __file__, "0"],
        "env": {"PYTHONPATH": str(Path(__file__).parents[1])},
        "dataset_dir": str(write_small_dataset(directory / "shards")),
        "epochs": EPOCHS,
        "checkpoint_every": 3,
        "stop_grace_seconds": 1,
    }
    report = Report()
    with ExitStack() as stack:
        place: Location = directory / "checkpoints"
        if store == "s3":
            server = own_server()[0]
            stack.enter_context(patch.dict(os.environ, variables(server)))
            place = new_bucket(server) / "checkpoints"
        fields["checkpoint_dir"] = str(place)
        installation = stack.enter_context(Installation(directory))
        installation.checkpoint_dir = place
        calm = installation.submit(**fields)
        installation.complete(calm)
        (wanted,) = set(_models(installation, calm))
        paused = {**fields, "command": [sys.executable, __file__, str(SAVE_SECONDS)]}
        draws = [chance((seed, number)) for number in range(gangs)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            jobs = list(pool.map(lambda draw: _disturbed(installation, paused, kills, draw), draws))
        for job_id in jobs:
            models = _models(installation, job_id)
            if models != [wanted] * RANKS:
                report.faults.append(f"{job_id} ended with the models {models}, not {wanted}")
        chosen = sum(installation.kinds(job_id).count("checkpoint_chosen") for job_id in jobs)
    report.lines.append(f"{gangs} gangs, {chosen} restarts from a checkpoint of all their ranks")
    return report


def _disturbed(
    installation: Installation, fields: dict[str, Any], kills: int, draw: random.Random
) -> str:
    """Run a gang and kill its ranks, at any moment after its first checkpoint; return its id."""
    job_id = installation.submit(**fields)
    for _ in range(kills):
        seen = installation.wait_until(
            job_id, lambda now: (all(pids(now)) and now["last_checkpoint_step"]) or is_over(now)
        )
        assert not is_over(seen), f"give it more to do: {installation.describe(job_id)}"
        time.sleep(draw.uniform(0, 0.2))
        with suppress(ProcessLookupError):  # it has lost the other rank
            os.kill(pids(seen)[draw.randrange(RANKS)], signal.SIGKILL)
    installation.complete(job_id)
    say(f"{job_id} is COMPLETED")
    return job_id


def _models(installation: Installation, job_id: str) -> list[str]:
    """Return step and bits of each rank's last model."""
    found = installation.checkpoints(job_id, RANKS)
    return [f"{it.step}: {it.state['weights'].tobytes().hex()}" for it in found]


def _train(save_seconds: float) -> None:
    """Be one rank."""
    run, peer = muster.join(), _meet()
    state = run.restore() or {"weights": np.ones(8), "read": 0}
    print(f"rank {run.rank} goes on from step {run.steps_done}", flush=True)
    for batch in run.batches():
        state["read"] += int(1e6 * sum(sum(sample["x"]) for sample in batch))
        own = np.sin(state["weights"] * (run.rank + 1) + state["read"] % 1000)
        peer.sendall(own.tobytes())
        other = np.frombuffer(peer.recv(own.nbytes, socket.MSG_WAITALL))
        assert len(other) == len(own), "the other rank is gone"
        state["weights"] += own + other
        run.step()
        if run.should_checkpoint:
            time.sleep(random.uniform(0, save_seconds))  # noqa: S311  a pause, no secret
            run.checkpoint(state)
    run.checkpoint(state)


def _meet() -> socket.socket:
    """Return the connection to the other rank."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "0":
        with socket.create_server(place) as server:
            return server.accept()[0]
    while True:
        with suppress(ConnectionRefusedError):  # rank 0 is still starting
            return socket.create_connection(place)
        time.sleep(0.01)


if __name__ == "__main__":
    if "MASTER_PORT" in os.environ:
        _train(float(sys.argv[1]))
    else:
        main(run)
