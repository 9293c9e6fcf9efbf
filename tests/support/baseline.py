"""Writes down an installation of this release, which the releases after it have to take over.

    .venv/bin/python -m tests.support.baseline tests/acceptance/data/0.1.0.tar.xz

It holds two jobs that are over and two that were interrupted in the middle, with their checkpoints
and data, a secret, a token, and how the interrupted jobs come out.
"""

import json
import signal
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from database.engine import Database
from database.tokens import Tokens
from muster.contracts.token import Scope
from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset
from muster.runtime.secrets import SecretStore
from tests.support.installation import Installation, has_saved

ANY_PROCESSOR = {
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
}
"""Without it the steps that are left have other bits on a processor with AVX-512."""

SYNCHRONOUS = {"mode": "synchronous", "world_size": 2, "epochs": 40, "keep_last": 1}
INDEPENDENT = {"mode": "independent", "world_size": 2, "epochs": 3, "keep_last": 1}

FACTS = "facts.json"
"""The file that says where the installation was, its token, and the digests of its jobs."""


def write(archive: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="muster-baseline-") as place:
        root = Path(place)
        write_dataset(root / "shards", synthetic(samples=512, shards=4, features=8, classes=3))
        secrets = {"LENT": "file:lent"}
        with Installation(root, **ANY_PROCESSOR) as installation:
            SecretStore(installation.files.secrets).put("lent", "a value")
            with closing(Database.open(installation.files.root / "muster.db")) as database:
                _, token = Tokens(database).create("ci", Scope.READ, lifetime=None, created_by=None)
            installation.complete(installation.submit(job_id="done", **SYNCHRONOUS | {"epochs": 1}))
            command = ["sh", "-c", "echo boom >&2; exit 64"]
            installation.fail(installation.submit(job_id="failed", world_size=1, command=command))
            installation.submit(job_id="together", **SYNCHRONOUS, sleep_sec=0.02)
            installation.submit(job_id="apart", **INDEPENDENT, sleep_sec=0.2, secrets=secrets)
            installation.wait_until("together", lambda seen: seen["last_checkpoint_step"])
            installation.wait_until("apart", has_saved)
            assert installation.coordinator.end(signal.SIGINT) == 0  # as `muster down`
            installation.api.end(signal.SIGTERM)
            with tarfile.open(archive, "w:xz") as written:
                for name in ("data", "checkpoints", "shards"):
                    written.add(root / name, name, filter=_anonymous)
                installation.start()
                facts = {"root": place, "token": token, "digests": _digests(installation)}
                (root / FACTS).write_text(json.dumps(facts, indent=1))
                written.add(root / FACTS, FACTS, filter=_anonymous)


def _digests(installation: Installation) -> Mapping[str, list[str]]:
    jobs = {"together": 1, "apart": 2}
    for job_id in jobs:
        installation.complete(job_id)
    return {
        "together": [installation.last_digest("together")],
        "apart": installation.digests("apart", 2),
    }


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out who made an archive, and what only running processes need."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    is_needed = entry.isfile() or entry.isdir()
    return entry if is_needed and not entry.name.endswith((".turn", "disk.reserve")) else None


def extract(archive: Path, root: Path) -> Mapping[str, Any]:
    """Extract an installation to `root`, and return the facts about it."""
    with tarfile.open(archive) as written:
        written.extractall(root, filter="data")
    facts: Mapping[str, Any] = json.loads((root / FACTS).read_text())
    return facts


if __name__ == "__main__":
    write(Path(sys.argv[1]))
