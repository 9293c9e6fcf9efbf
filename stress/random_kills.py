"""SIGKILL for one rank after the other: the final bits must be the same.

``python -m stress.random_kills [KILLS] [SEED]`` runs in a new installation.
"""

import argparse
import os
import random
import signal
import tempfile
from pathlib import Path
from typing import Any

from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset
from tests.support.installation import Installation, has_saved, is_over, pids


def survive_kills(installation: Installation, *, kills: int, seed: int, **fields: object) -> str:
    """Kill `kills` ranks of a new job while it runs and see it COMPLETED; return its id.

    The ranks are chosen at random among those that live. At each kill all others keep their pid.
    """
    chance = random.Random(seed)  # noqa: S311  repeatable on purpose, no secret
    job_id = installation.submit(**fields)
    seen = installation.wait_until(job_id, has_saved)
    for done in range(kills):
        assert not is_over(seen), f"the job was over after {done} kills: give it more to do"
        living = [rank for rank, pid in enumerate(pids(seen)) if pid]
        victim = chance.choice(living)
        killed = pids(seen)[victim]
        os.kill(killed, signal.SIGKILL)
        after = installation.wait_until(job_id, lambda now, killed=killed: killed not in pids(now))
        for rank in living:
            worker = after["workers"][rank]
            undisturbed = worker["pid"] == pids(seen)[rank] or worker["state"] == "finished"
            assert undisturbed or rank == victim, installation.describe(job_id)
        seen = installation.wait_until(job_id, lambda now: any(pids(now)) or is_over(now))
    seen = installation.complete(job_id)
    assert seen["restarts"] == kills, installation.describe(job_id)
    return job_id


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kills", type=int, nargs="?", default=20, help="how many (20)")
    parser.add_argument("seed", type=int, nargs="?", default=0, help="decides whom, in order (0)")
    asked = parser.parse_args()
    kills, seed = asked.kills, asked.seed
    fields: dict[str, Any] = {"world_size": 4, "epochs": 10 + 4 * kills}
    with tempfile.TemporaryDirectory() as directory:
        installation = Installation(Path(directory))
        data = installation.root / "shards"
        write_dataset(data, synthetic(samples=512, shards=8, features=8))
        with installation:
            calm = installation.submit(**fields)
            job_id = survive_kills(installation, kills=kills, seed=seed, sleep_sec=0.04, **fields)
            installation.complete(calm)
            assert installation.digests(job_id, 4) == installation.digests(calm, 4)
    print(f"{kills} kills with seed {seed}: COMPLETED, and the same bits in every rank")


if __name__ == "__main__":
    main()
