"""Which cluster this node belongs to, and whether it may found one.

One node founds the cluster: that on which the secret was made, or, where all have it from the
environment, the first that leads. At first the rows are on that node alone, so no other one leads.
Nodes that meet it write down to which cluster they belong, and have no part in any other.
"""

import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from muster.checkpoints.local import LocalFileSystem, replace_file
from muster.contracts.errors import MusterError
from muster.contracts.settings.paths import DataDir
from muster.mesh.messages import ClusterRecord

ALONE_SECONDS: Final = 30.0
"""A node that nothing marks as the founder waits so long for others before it founds a cluster: it
may have been started before its network."""


class EarlierJobs(NamedTuple):
    """What a database holds that this node has had before it belongs to a cluster."""

    database: Path
    unfinished: int
    all: int


class Founding:
    """What a node keeps on its disk of its cluster."""

    def __init__(
        self,
        file: Path,
        *,
        has_mark: bool,
        has_secret_file: bool,
        earlier: EarlierJobs | None = None,
    ) -> None:
        """`has_mark` tells that the secret was made here. Raises `MusterError`."""
        self._file = file
        self.has_mark = has_mark
        self._may_be_first = not has_secret_file
        self._earlier = earlier
        self.record = read_cluster(file)

    def may_lead(self, node_id: str, alone_seconds: float) -> bool:
        """Return whether this node has the rows, or founds the cluster when it is elected.

        `alone_seconds` is for how long it has waited for another node; 0 if one is linked.
        """
        if self.record is not None:
            return self.record.founder == node_id
        is_first = self._may_be_first and not 0 < alone_seconds < ALONE_SECONDS
        return self.has_mark or is_first

    def found(self, node_id: str, name: str) -> None:
        """Begin a cluster, with the jobs that this node has. Raises OSError."""
        self._write(ClusterRecord(cluster_id=uuid.uuid4().hex, founder=node_id, name=name))

    def join(self, record: ClusterRecord) -> str:
        """Belong to a cluster from now on; return what became of an earlier database, or "".

        Raises `MusterError` if that has unfinished jobs, and OSError.
        """
        remark, earlier = "", self._earlier
        until = f"{datetime.now(UTC):%Y-%m-%dT%H%M%S}"
        if earlier is not None:
            if earlier.unfinished:
                raise MusterError(
                    f"this machine has {earlier.unfinished} unfinished jobs in "
                    f"{earlier.database}: finish or stop them with muster up, then start "
                    "muster node again"
                )
            kept = earlier.database.with_name(f"{earlier.database.name}.{until}")
            earlier.database.rename(kept)
            remark = f"the {earlier.all} jobs that this machine has had are kept in {kept}"
        secrets = DataDir(self._file.parent).secrets
        if secrets.exists():  # those of the cluster come in their place
            secrets.rename(secrets.with_name(f"{secrets.name}.{until}"))
        self._write(record)
        return remark

    def _write(self, record: ClusterRecord) -> None:
        replace_file(LocalFileSystem(), str(self._file), msgspec.json.encode(record))
        self.record = record


def read_cluster(file: Path) -> ClusterRecord | None:
    """Return the cluster of this node; None if it belongs to none. Raises `MusterError`."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=ClusterRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise MusterError(
            f"{file} cannot be read ({error}), so it is not known to which cluster this node "
            "belongs: restore it from a backup, or type muster node leave"
        ) from error
