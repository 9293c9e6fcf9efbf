"""The jobs of stale hosts: their kinds and the content of their directories."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.checkpoints.manifest import LATEST, CheckpointName, parse_latest
from muster.contracts.paths import checkpoints_of_job, checkpoints_of_rank
from tests.support.installation import Seen

KINDS: Mapping[str, Mapping[str, Any]] = {
    "independent": {"mode": "independent", "world_size": 3},
    "shared memory": {"mode": "synchronous", "backend": "shared_memory", "world_size": 3},
    "tcp": {"mode": "synchronous", "backend": "tcp", "world_size": 2},
}
COMMON = {"checkpoint_every": 5, "max_restarts": 100_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A job of one kind."""

    kind: str
    job_id: str

    def directories(self, root: Path) -> list[Path]:
        """Return where its checkpoints are, of each rank or of all."""
        if self.kind != "independent":
            return [checkpoints_of_job(root, self.job_id)]
        ranks = range(KINDS[self.kind]["world_size"])
        return [checkpoints_of_rank(root, self.job_id, rank) for rank in ranks]


def latest_of(directory: Path) -> CheckpointName | None:
    try:
        return parse_latest((directory / LATEST).read_bytes())
    except OSError:
        return None


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def generation_in(directory: Path) -> int:
    """Return whose checkpoint `LATEST` names; -1 if there is none."""
    latest = latest_of(directory)
    return -1 if latest is None else latest.generation


def is_finished(seen: Seen, rank: int) -> bool:
    return bool(seen["workers"][rank]["state"] == "finished")


def older_names(directory: Path) -> set[CheckpointName]:
    """Return the checkpoints of all generations but the one of `LATEST`."""
    latest = latest_of(directory)
    names = filter(None, map(CheckpointName.parse, names_in(directory)))
    return {name for name in names if latest is None or name.generation < latest.generation}
