"""The places where a secret could leak: files, responses, rows, processes."""

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx
from sqlalchemy import MetaData, create_engine, select

from muster.host.containment import tag_of

LOOK_SECONDS = 0.05


@dataclass
class Search:
    """Looks for secrets, by their names, and counts what it has looked at by place."""

    canaries: dict[str, str]
    """Values by description; more may be added."""
    decoy: str
    """Not secret: it must be found in every place, or that place was not searched."""
    decoyed: set[str] = field(default_factory=set)
    """The places where it did."""
    looked_at: Counter[str] = field(default_factory=Counter)
    hits: dict[str, set[str]] = field(default_factory=dict)
    """By place: which secret, and in what."""

    def look(self, place: str, what: str, content: str) -> set[str]:
        """Record the secrets in `content`; return their names."""
        self.looked_at[place] += 1
        if self.decoy in content:
            self.decoyed.add(place)
        # A copy: other threads add values.
        found = {name for name, value in list(self.canaries.items()) if value in content}
        self.hits.setdefault(place, set()).update(f"{name} in {what}" for name in found)
        return found


def files_below(root: Path) -> Iterator[tuple[str, str]]:
    """Yield every file and its content, its own name included: one may be called like a secret."""
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink():
            where = str(path.relative_to(root))
            yield where, f"{where}\n{path.read_text(errors='replace')}"


def answers(client: httpx.Client) -> Iterator[httpx.Response]:
    """Yield every answer of every GET route, of every job there is."""
    jobs = [job["job_id"] for job in client.get("/jobs").json()["jobs"]]
    for path, methods in client.get("/openapi.json").json()["paths"].items():
        if "get" not in methods or path == "/jobs/summaries/stream":  # which has no end
            continue
        for filled in [path.replace("{job_id}", job) for job in jobs] if "{" in path else [path]:
            yield client.get(filled)


def rows(database_url: str) -> Iterator[tuple[str, str]]:
    """Yield every row of every table."""
    engine = create_engine(database_url)
    tables = MetaData()
    try:
        with engine.connect() as connection:
            tables.reflect(connection)
            for table in tables.sorted_tables:
                for row in connection.execute(select(table)):
                    yield f"a row of {table.name}", repr(tuple(row))
    finally:
        engine.dispose()


class ProcessWatch:
    """Reads the command line of every process of this machine, and the environment of agents."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._known: set[tuple[str, str]] = set()
        self._is_over = threading.Event()
        self._watcher = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        self._watching = self._watcher.submit(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop watching; raises the error that ended the watch, if any."""
        self._is_over.set()
        self._watcher.shutdown()
        self._watching.result()

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_SECONDS):
            for pid in (path.name for path in Path("/proc").iterdir() if path.name.isdigit()):
                self._look("command lines of processes", pid, "cmdline")
                tag = tag_of(int(pid))
                if tag is not None and tag.partition("/")[2] in {"agent", "prefork"}:
                    self._look("environments of agents", pid, "environ")

    def _look(self, place: str, pid: str, file: str) -> None:
        try:
            content = Path("/proc", pid, file).read_text(errors="replace")
        except OSError:
            return
        if (pid, content) not in self._known:
            self._known.add((pid, content))
            self._search.look(place, f"that of {pid}", content)
