"""A script of a household that does what it reads, line by line, and prints what came of it."""

import json
import os
import signal
import sys
import threading
import time
from typing import Any, TypeAlias

import numpy as np

import muster
from muster.collectives import all_reduce, counters
from muster.contracts.errors import MusterError
from muster.mesh import MeshBackend, discover
from muster.mesh.group import Mesh
from muster.run import Run

Said: TypeAlias = dict[str, object]

SEE_SECONDS = 0.01
PATIENCE_SECONDS = 5.0


class Script:
    backend: MeshBackend
    run: Run

    def discover(self, **options: Any) -> Said:  # noqa: ANN401  JSON is any
        self.backend = discover(**options)
        return self._group()

    def see(self, others: int) -> Said:
        """Wait until so many are linked, and leave."""
        mesh = Mesh("default")
        while len(mesh.network.members()) < others:
            time.sleep(SEE_SECONDS)
        at = time.monotonic()
        time.sleep(PATIENCE_SECONDS)  # the others have to see this one
        mesh.close()
        return {"seen_at": at}

    def meet(self, **options: Any) -> Said:  # noqa: ANN401  JSON is any
        self.backend = discover(after=self.backend, **options)
        return self._group()

    def reduce(self, size: int = 10, route: str = "auto") -> Said:
        array = np.ones(size, np.float32)
        self.backend.barrier()
        began_at = time.monotonic()
        all_reduce(self.backend, array, route=route)
        return {"sum": float(array[0]), "seconds": time.monotonic() - began_at}

    def wait(self, rank: int) -> Said:
        return {"received": self.backend.recv(rank, 1, timeout_seconds=60.0).decode()}

    def send(self, rank: int) -> Said:
        self.backend.send(rank, b"x")
        return {}

    def linked(self) -> Said:
        mesh = self.backend.mesh
        return {"linked": [] if mesh is None else [*map(str, mesh.network.members())]}

    def fork(self) -> Said:
        if (pid := os.fork()) == 0:
            signal.pause()
        return {"pid": pid}

    def save(self, size: int) -> Said:
        """Begin to have checkpoints, and save one."""
        self.run = muster.join(backend=self.backend)
        self.run.checkpoint(weights=np.ones(size, np.float32))
        return {}

    def restore(self) -> Said:
        restored = self.run.restore(backend=self.backend)
        return {"size": 0 if restored is None else restored["weights"].size}

    def counters(self) -> Said:
        return dict(counters(self.backend))

    def close(self) -> Said:
        self.backend.close()
        return {}

    def _group(self) -> Said:
        own = self.backend
        members = [member.process_id for member in own.members]
        return {"rank": own.rank, "members": members, "names": [*map(str, own.members)]}


def say(said: Said) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


def main() -> None:
    script = Script()
    say({"pid": os.getpid()})
    for line in sys.stdin:
        verb, options = json.loads(line)
        try:
            said = getattr(script, verb)(**options)
        except (MusterError, KeyboardInterrupt) as error:
            said = {"error": type(error).__name__, "text": str(error)}
            said["name"] = getattr(error, "name", "")
        threads = [thread.name for thread in threading.enumerate()]
        say({**said, "at": time.monotonic(), "threads": threads})


if __name__ == "__main__":
    main()
