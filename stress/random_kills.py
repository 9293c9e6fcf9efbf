"""SIGKILL for one rank after the other: the final bits must be the same.

``python -m stress.random_kills [KILLS] [SEED]`` runs in a new installation.
"""

import os
import signal
from pathlib import Path
from typing import Any

from stress.runner import Report, chance, main
from tests.support.installation import (
    Installation,
    has_saved,
    is_over,
    pids,
    write_small_dataset,
)


def run(directory: Path, kills: int = 20, seed: int = 0) -> Report:
    """Compare a job that loses `kills` ranks with an undisturbed one."""
    fields: dict[str, Any] = {"world_size": 4, "epochs": 10 + 4 * kills}
    write_small_dataset(directory / "shards")
    with Installation(directory) as installation:
        calm = installation.submit(**fields)
        job_id = survive_kills(installation, kills=kills, seed=seed, sleep_sec=0.04, **fields)
        installation.complete(calm)
        is_same = installation.digests(job_id, 4) == installation.digests(calm, 4)
    report = Report([f"{kills} kills: COMPLETED, and no other rank lost its process"])
    return report if is_same else Report(report.lines, ["other bits than without kills"])


def survive_kills(installation: Installation, *, kills: int, seed: int, **fields: object) -> str:
    """Kill `kills` ranks of a new job while it runs and see it COMPLETED; return its id.

    The ranks are chosen at random among those that live. At each kill all others keep their pid.
    """
    draw = chance(seed)
    job_id = installation.submit(**fields)
    seen = installation.wait_until(job_id, has_saved)
    for done in range(kills):
        assert not is_over(seen), f"the job was over after {done} kills: give it more to do"
        living = [rank for rank, pid in enumerate(pids(seen)) if pid]
        victim = draw.choice(living)
        killed = pids(seen)[victim]
        os.kill(killed, signal.SIGKILL)
        after = installation.wait_until(job_id, lambda now, killed=killed: killed not in pids(now))
        for rank in living:
            worker = after["workers"][rank]
            undisturbed = worker["pid"] == pids(seen)[rank] or worker["process"] == "finished"
            assert undisturbed or rank == victim, installation.describe(job_id)
        seen = installation.wait_until(job_id, lambda now: any(pids(now)) or is_over(now))
    seen = installation.complete(job_id)
    assert seen["restarts"] == kills, installation.describe(job_id)
    return job_id


if __name__ == "__main__":
    main(run)
