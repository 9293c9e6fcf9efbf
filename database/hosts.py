"""What each host of the cluster file has said about itself, written by its coordinator."""

from typing import Final

from sqlalchemy import Connection, bindparam, select

from database.engine import Database
from database.leases import require_held
from database.records import HostRecord, Lease, values_of
from database.tables import HOSTS
from muster.contracts.views.service import EngineSweep

_ALL: Final = select(HOSTS)
_ONE: Final = _ALL.where(HOSTS.c.host == bindparam("name"))


class Hosts:
    """The hosts that were ever asked, by name."""

    def __init__(self, database: Database) -> None:
        self._database = database
        requested = "sweep_request"
        self._upsert = database.upsert(HOSTS, kept=[requested])
        others = [column.name for column in HOSTS.c if column.name != requested]
        self._request = database.upsert(HOSTS, kept=others)

    def all(self) -> dict[str, HostRecord]:
        with self._database.reading() as connection:
            rows = connection.execute(_ALL).all()
        return {row.host: HostRecord(**row._asdict()) for row in rows}

    def find(self, host: str) -> HostRecord:
        """Return what a host has reported; a record without facts if it never has."""
        with self._database.reading() as connection:
            row = connection.execute(_ONE, {"name": host}).one_or_none()
        return HostRecord(host=host) if row is None else HostRecord(**row._asdict())

    def write(self, record: HostRecord, lease: Lease) -> None:
        """Write what a host has said; raise `LeaseLost` if another coordinator asks now."""
        with self._database.writing() as connection:
            require_held(connection, lease)
            connection.execute(self._upsert, values_of(record))

    def request_sweep(self, scheduler: str, names: list[str]) -> EngineSweep:
        """Request that a scheduler is asked for its jobs, and those of these names are ended."""
        with self._database.writing() as connection:
            return self.request_sweep_in(connection, scheduler, names)

    def request_sweep_in(self, connection: Connection, host: str, names: list[str]) -> EngineSweep:
        """Request it, of a scheduler or a host, with what was requested before and is not done."""
        row = connection.execute(_ONE, {"name": host}).one_or_none()
        known = HostRecord(host=host) if row is None else HostRecord(**row._asdict())
        last = known.sweep_request or EngineSweep(number=0, cancel=[])
        waiting = last.cancel if known.is_sweep_due else []
        request = EngineSweep(number=last.number + 1, cancel=[*waiting, *names])
        connection.execute(self._request, values_of(HostRecord(host=host, sweep_request=request)))
        return request
