"""Whose checkpoints these are: a job never takes another one's for its own."""

from dataclasses import dataclass

from muster.checkpoints.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who saves: which rank of which job, and which of its incarnations."""

    job_id: str
    job_uid: str | None
    """None when started by hand: then every checkpoint under the job's id is its own."""
    rank: int
    world_size: int
    generation: int | None
    """None when started by hand: one above the newest checkpoint's."""

    def owns(self, manifest: Manifest) -> bool:
        """Return whether a checkpoint is this job's own."""
        if self.job_uid is None:
            return manifest.job_id == self.job_id
        return manifest.job_uid == self.job_uid
