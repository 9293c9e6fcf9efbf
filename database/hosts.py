"""What each host of the cluster has said about itself, written by the coordinator that asked it."""

from typing import Final

from sqlalchemy import bindparam, select

from database.engine import Database
from database.leases import require_held
from database.records import HostRecord, Lease, values_of
from database.tables import HOSTS
from muster.contracts.views import EngineSweep

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
        """Ask for a look at a scheduler and the end of jobs there, in place of the last request."""
        with self._database.writing() as connection:
            row = connection.execute(_ONE, {"name": scheduler}).one_or_none()
            last = None if row is None else row.sweep_request
            request = EngineSweep(number=last.number + 1 if last else 1, cancel=names)
            record = HostRecord(host=scheduler, sweep_request=request)
            connection.execute(self._request, values_of(record))
        return request
