"""The ways in which a database can be away, SQLite's and PostgreSQL's, each with its way back."""

import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager

from tests.support.fragile_postgres import FragilePostgres
from tests.support.installation import Installation


@contextmanager
def locked(installation: Installation, begin: str = "BEGIN EXCLUSIVE") -> Iterator[None]:
    """Hold the SQLite file as a backup or a careless shell would; IMMEDIATE lets others read."""
    path = installation.files.root / "muster.db"
    with closing(sqlite3.connect(path, isolation_level=None, timeout=60)) as database:
        database.execute(begin)
        yield
        database.execute("ROLLBACK")


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
        "stopped": lambda: _after(server.stop, server.heal),
        "cut": cut_again_and_again,
    }
