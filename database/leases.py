"""The lease: which coordinator decides.

A lease holds no time. A watcher measures on its own monotonic clock how long the beat has not
changed, and names the lease it saw when it takes it over. Its epoch only rises, also over
a release, so that it fences: see `database.fenced_writer`.
"""

from typing import Any, Final

from sqlalchemy import Connection, Row, and_, bindparam, select, update

from database.engine import Database
from database.errors import LeaseLost
from database.records import Lease, values_of
from database.tables import LEASES
from muster.contracts.rank import ProcessRecord

_NAME: Final = "coordinator"  # its holder decides about all jobs of a database

LEASE_SECONDS: Final = 5.0
"""If the beat has not changed for this long, the holder is taken to be dead."""

_ROW: Final = select(LEASES).where(LEASES.c.name == _NAME)
_HELD: Final = and_(
    LEASES.c.name == _NAME, LEASES.c.epoch == bindparam("held_epoch"), LEASES.c.held
)
_RENEW: Final = update(LEASES).where(_HELD).values(beat=LEASES.c.beat + 1)
_BEAT: Final = select(LEASES.c.beat).where(_HELD)
_RELEASE: Final = update(LEASES).where(_HELD).values(held=False)


class Leases:
    """The coordinator's lease."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._upsert = database.upsert(LEASES)

    def current(self) -> Lease | None:
        """Return the lease as it is held now; None if it is free."""
        with self._database.reading() as connection:
            return _held(connection.execute(_ROW).one_or_none())

    def take(
        self,
        owner: str,
        process: ProcessRecord,
        address: str,
        *,
        displacing: Lease | None,
        least_epoch: int = 0,
    ) -> Lease:
        """Take the lease from the holder that was seen, or a free one (None), with a new epoch.

        That is `least_epoch` at least: a copy of the rows may not show the last one that was used.
        Raises `LeaseLost` if the lease has changed since: the holder has renewed or released it, or
        another process was faster.
        """
        with self._database.writing() as connection:
            row = connection.execute(_ROW).one_or_none()
            epoch = row.epoch if row else 0
            if _held(row) != displacing:
                raise LeaseLost(_NAME, displacing.epoch if displacing else epoch)
            lease = Lease(
                name=_NAME,
                epoch=max(epoch + 1, least_epoch),
                beat=0,
                owner=owner,
                process=process,
                address=address,
            )
            connection.execute(self._upsert, values_of(lease) | {"held": True})
        return lease

    def release(self, lease: Lease) -> None:
        """Release the lease; do nothing if it was lost already."""
        with self._database.writing() as connection:
            connection.execute(_RELEASE, {"held_epoch": lease.epoch})


def renew(connection: Connection, lease: Lease) -> int:
    """Renew `lease` inside a transaction and return its new beat; raise `LeaseLost`."""
    if connection.execute(_RENEW, {"held_epoch": lease.epoch}).rowcount == 0:
        raise LeaseLost(lease.name, lease.epoch)
    beat: int = connection.execute(_BEAT, {"held_epoch": lease.epoch}).scalar_one()
    return beat


def require_held(connection: Connection, lease: Lease) -> None:
    """Raise `LeaseLost` if `lease` is not held; no other can take it until the transaction ends."""
    if (
        connection.execute(_BEAT.with_for_update(), {"held_epoch": lease.epoch}).one_or_none()
        is None
    ):
        raise LeaseLost(lease.name, lease.epoch)


def _held(row: Row[Any] | None) -> Lease | None:
    if row is None or not row.held:
        return None
    values = row._asdict()
    del values["held"]
    return Lease(**values)
