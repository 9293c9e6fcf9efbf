"""How long a process waits to write while the threads of another write without a pause.

    python bench/waiting_writers.py [seconds]

A coordinator with a lease to renew beside an API under a flood of submissions, on SQLite. Two ways
to wait, in turns: SQLite's own, which looks again now and then, and that of `database.engine`.
Both processes wait the same way. A write is one row, durable.
"""

import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import text

from database.engine import Database

ROUNDS = 3
THREADS = 8
BUSY_SECONDS = 60.0
PAUSE_SECONDS = 0.1
"""Between two writes of the process that waits."""

NEW_ROW = "INSERT INTO rows DEFAULT VALUES"


def bare_writer(path: Path) -> Callable[[], None]:
    """Return what writes a row with nothing but SQLite's busy handler."""
    connection = sqlite3.connect(
        path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    connection.execute("PRAGMA synchronous = FULL")
    alone = threading.Lock()

    def write() -> None:
        with alone:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(NEW_ROW)
            connection.execute("COMMIT")

    return write


def our_writer(path: Path) -> Callable[[], None]:
    """Return what writes a row through the door of the product."""
    database = Database.open(f"sqlite:///{path}", busy_timeout_seconds=BUSY_SECONDS)
    statement = text(NEW_ROW)

    def write() -> None:
        with database.writing() as connection:
            connection.execute(statement)

    return write


WAYS = {"SQLite's own": bare_writer, "in turns": our_writer}


def flood(way: str, path: Path) -> None:
    """Write from all threads until the standard input ends, and print how many rows a second."""
    write = WAYS[way](path)
    is_over = threading.Event()
    written = [0] * THREADS

    def go_on(number: int) -> None:
        while not is_over.is_set():
            write()
            written[number] += 1

    threads = [threading.Thread(target=go_on, args=(number,)) for number in range(THREADS)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    sys.stdin.read()
    is_over.set()
    for thread in threads:
        thread.join()
    print(sum(written) / (time.monotonic() - began))


def waits_beside_a_flood(way: str, path: Path, seconds: float) -> tuple[list[float], float]:
    """Return how long each write took, and how many rows a second the flood wrote meanwhile."""
    waits = []
    write = WAYS[way](path)
    command = [sys.executable, __file__, "--flood", way, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        end = time.monotonic() + seconds
        while (began := time.monotonic()) < end:
            write()
            waits.append(time.monotonic() - began)
            time.sleep(PAUSE_SECONDS)
        rate, _ = process.communicate()
    return waits, float(rate)


def main(seconds: float) -> None:
    waits: dict[str, list[float]] = {way: [] for way in WAYS}
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way in WAYS:
            with tempfile.TemporaryDirectory(dir=".") as directory:
                path = Path(directory) / "rows.db"
                with sqlite3.connect(path) as connection:
                    connection.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY)")
                connection.close()
                new, rate = waits_beside_a_flood(way, path, seconds)
            waits[way] += new
            rates[way].append(rate)
    for way, all_waits in waits.items():
        print(
            f"{way:14} a write waits {statistics.median(all_waits) * 1000:.0f} ms p50, "
            f"{max(all_waits) * 1000:.0f} ms at worst of {len(all_waits)}; "
            f"the flood wrote {statistics.median(rates[way]):.0f} rows/s"
        )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--flood", way, path]:
            flood(way, Path(path))
        case numbers:
            main(*(float(number) for number in numbers or ["10"]))
