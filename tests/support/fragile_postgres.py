"""A PostgreSQL server for one test, to be killed, stopped and disconnected."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import URL, create_engine, text

from muster.host import processes
from tests.support.postgres_server import own_server

RETRY_SECONDS = 0.1
PATIENCE_SECONDS = 60.0

CUT = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"


class FragilePostgres:
    """Start it with `fragile_postgres`; `heal` undoes every failure."""

    def __init__(self, server: Any, url: URL, data: Path) -> None:  # noqa: ANN401  not annotated
        self._server = server
        self._url = url
        self._pid_file = data / "postmaster.pid"
        self._ours = self._processes()

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
    with own_server() as started:
        server = FragilePostgres(*started)
        try:
            yield server
        finally:
            server.heal()
