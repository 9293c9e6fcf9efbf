"""Who decides.

A lease has no time in it: whoever watches it measures on his own clock how long its beat has
stood still, and names the very lease he saw when he takes it away. The epoch of a name only ever
goes up, also over a release, so that it fences: see `store.tenure`.
"""

from typing import Any, Final

from sqlalchemy import Connection, Row, and_, bindparam, select, update

from store.database import Database
from store.errors import LeaseLost
from store.records import Lease, ProcessRecord
from store.rows import values_of
from store.tables import LEASES

COORDINATOR_LEASE: Final = "coordinator"
"""The one who decides about all jobs of a database."""

LEASE_SECONDS: Final = 5.0
"""A beat that has stood still for this long is that of a holder who is gone."""

_ROW: Final = select(LEASES).where(LEASES.c.name == bindparam("lease"))
_HELD: Final = and_(
    LEASES.c.name == bindparam("lease"), LEASES.c.epoch == bindparam("held_epoch"), LEASES.c.held
)
_BEAT: Final = update(LEASES).where(_HELD).values(beat=LEASES.c.beat + 1)
_BEATS: Final = select(LEASES.c.beat).where(_HELD)
_RELEASE: Final = update(LEASES).where(_HELD).values(held=False)


class Leases:
    """The leases of all names."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._write = database.upsert(LEASES)

    def current(self, name: str) -> Lease | None:
        """Return the lease as it is held now; None if it is free."""
        with self._database.reading() as connection:
            row = _row(connection, name)
        return _held(row)

    def current_among_writers(self, name: str) -> Lease | None:
        """Return the same, but in the turn of one who writes: in time only if anybody could."""
        with self._database.writing() as connection:
            row = _row(connection, name)
        return _held(row)

    def take(
        self,
        name: str,
        owner: str,
        process: ProcessRecord,
        address: str,
        *,
        displacing: Lease | None,
    ) -> Lease:
        """Return the lease, taken from the holder who was seen, or free (None), with a new epoch.

        Raises `LeaseLost` if things are no longer as seen: the holder has renewed or released it,
        or somebody else was faster.
        """
        with self._database.writing() as connection:
            row = _row(connection, name)
            epoch = row.epoch if row else 0
            if _held(row) != displacing:
                raise LeaseLost(name, displacing.epoch if displacing else epoch)
            lease = Lease(
                name=name, epoch=epoch + 1, beat=0, owner=owner, process=process, address=address
            )
            connection.execute(self._write, values_of(lease) | {"held": True})
        return lease

    def release(self, lease: Lease) -> None:
        """Give the lease back; nothing happens if it is lost already."""
        with self._database.writing() as connection:
            connection.execute(_RELEASE, _named(lease))


def beat(connection: Connection, lease: Lease) -> int:
    """Renew `lease` inside a transaction and return how often it was; or raise `LeaseLost`."""
    if connection.execute(_BEAT, _named(lease)).rowcount == 0:
        raise LeaseLost(lease.name, lease.epoch)
    beats: int = connection.execute(_BEATS, _named(lease)).scalar_one()
    return beats


def _named(lease: Lease) -> dict[str, str | int]:
    return {"lease": lease.name, "held_epoch": lease.epoch}


def _row(connection: Connection, name: str) -> Row[Any] | None:
    return connection.execute(_ROW, {"lease": name}).one_or_none()


def _held(row: Row[Any] | None) -> Lease | None:
    if row is None or not row.held:
        return None
    values = row._asdict()
    del values["held"]
    return Lease(**values)
