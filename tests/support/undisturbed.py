"""The results of jobs without faults, to compare others with."""

from muster.checkpoints.comparison import digests
from muster.checkpoints.listing import checkpoint_dirs
from muster.contracts.settings.paths import checkpoints_of_job
from tests.support.installation import Installation


class UndisturbedRuns:
    """Runs each kind of job once, without faults and pauses."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self._known: dict[str, list[str]] = {}

    def __call__(self, **fields: object) -> list[str]:
        """Return the identities of the newest checkpoints, of each rank or of all."""
        fields = {**fields, "sleep_sec": 0}  # a pause between steps changes no bit
        key = repr(sorted(fields.items()))
        if key not in self._known:
            job_id = self._installation.submit(**fields)
            assert self._installation.complete(job_id)["restarts"] == 0
            self._known[key] = bits(self._installation, job_id)
        return self._known[key]


def bits(installation: Installation, job_id: str) -> list[str]:
    """Return the identities of a job's newest checkpoints."""
    directory = checkpoints_of_job(installation.checkpoint_dir, job_id)
    return [digest for _, _, digest in digests(checkpoint_dirs(directory))]
