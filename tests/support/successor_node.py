"""`muster node` on a machine that reads anew from its disk which node has the rows.

A test copies the rows to another machine and says so in `cluster.json` of each.
"""

import sys

import cli.main
import muster.mesh.founding
from muster.mesh.founding import Founding, read_cluster
from muster.mesh.messages import ClusterRecord


class MovableFounding(Founding):
    @property
    def record(self) -> ClusterRecord | None:  # type: ignore[override]
        return read_cluster(self._file)

    @record.setter
    def record(self, _: ClusterRecord | None) -> None:
        """The file has it."""


if __name__ == "__main__":
    muster.mesh.founding.Founding = MovableFounding  # type: ignore[misc]
    sys.argv[1:] = ["node"]
    cli.main.main()
