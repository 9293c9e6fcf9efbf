"""Reads the newest checkpoint of every job again and again until SIGTERM.

It uses the product's reader, which verifies every byte. At the end it prints as JSON how often it
read and what was wrong: a checkpoint that does not match its checksum, or one older than that
before.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from muster.checkpoints.errors import CheckpointError
from muster.checkpoints.manifest import LATEST, CheckpointName
from muster.checkpoints.reader import CheckpointReader
from muster.checkpoints.store import open_store
from muster.contracts.location import Location, parse_location
from muster.contracts.settings.paths import rank_of_checkpoints
from muster.objects.client import default_client

PAUSE_SECONDS = 0.003
NICE = 5
"""Training has priority."""
LISTING_SECONDS = 0.2
LIVELY_SECONDS = 5.0
"""A directory without changes for longer than this is no longer read."""


class Reader:
    """All checkpoint directories below a root, and what was read in each."""

    def __init__(self, checkpoint_dir: Location) -> None:
        self._root = checkpoint_dir
        self._changed: dict[Location, tuple[object, float]] = {}
        """The version of each LATEST, and when it was first seen."""
        self._newest: dict[Location, CheckpointName] = {}
        self.reads = 0
        self.checkpoints = 0
        """Different ones among what was read."""
        self.invalid: list[str] = []
        self.regressed: list[str] = []

    def report(self) -> dict[str, Any]:
        return {
            "reads": self.reads,
            "checkpoints": self.checkpoints,
            "invalid": self.invalid,
            "regressed": self.regressed,
        }

    def look(self) -> None:
        """Read each changing directory repeatedly, for a while."""
        until = time.monotonic() + LISTING_SECONDS
        places = list(self._places())
        while time.monotonic() < until:
            for directory, rank in places:
                self._read(directory, rank)
                time.sleep(PAUSE_SECONDS)
            if not places:
                time.sleep(LISTING_SECONDS)

    def _places(self) -> Iterator[tuple[Location, int]]:
        """Yield the places whose LATEST has changed lately."""
        now = time.monotonic()
        for latest, version in self._versions():
            before, since = self._changed.get(latest, (None, now))
            self._changed[latest] = version, since if version == before else now
            if now - self._changed[latest][1] < LIVELY_SECONDS:
                yield latest.parent, rank_of_checkpoints(latest.parent.name) or 0

    def _versions(self) -> Iterator[tuple[Location, object]]:
        if isinstance(self._root, Path):
            for pattern in f"*/{LATEST}", f"*/worker_*/{LATEST}":
                for path in self._root.glob(pattern):
                    yield path, path.parent.stat().st_mtime_ns
        else:
            for stored in default_client().list(self._root):
                if stored.name.endswith(LATEST):
                    yield self._root / stored.name, stored.etag

    def _read(self, directory: Location, rank: int) -> None:
        reader = CheckpointReader(
            store=open_store(directory),
            rank=rank,
            world_size=None,
            warn=lambda sentence: self._note(directory, sentence),
        )
        self.reads += 1
        try:
            found = reader.newest()
        except CheckpointError as error:
            self.invalid.append(str(error))
            return
        before = self._newest.get(directory)
        if before is not None and (found is None or found.name < before):
            name = None if found is None else str(found.name)
            self.regressed.append(f"{directory}: {name} after {before}")
        elif found is not None and found.name != before:
            self.checkpoints += 1
            self._newest[directory] = found.name

    def _note(self, directory: Location, sentence: str) -> None:
        """A checkpoint that is skipped is damaged; a `LATEST` that lags is not an error."""
        if not sentence.startswith(f"{directory}/{LATEST} "):
            self.invalid.append(sentence)


class CheckpointWatch:
    """Runs the reader in another process."""

    def __init__(self, checkpoint_dir: Location) -> None:
        command = [sys.executable, __file__, str(checkpoint_dir)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)

    def end(self) -> dict[str, Any]:
        """End it; return what it found."""
        self._process.terminate()
        found: dict[str, Any] = json.loads(self._process.communicate()[0])
        return found


def main() -> None:
    os.nice(NICE)
    reader = Reader(parse_location(sys.argv[1]))
    is_over: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: is_over.append(number))
    while not is_over:
        reader.look()
    print(json.dumps(reader.report()))


if __name__ == "__main__":
    main()
