"""Which of the checkpoints that another library has written are complete and durable.

Such a library writes files in place, so a kill leaves torn ones under their final name. Only a
checkpoint in the record, which has the digest of each file, is resumed from:

    flush all files and directories           the checkpoint is whole and durable
    save the record as our own checkpoint     it is found: acknowledged
    delete the oldest                         no record names it
"""

import os
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from xxhash import xxh3_128

from muster.checkpoints.errors import CheckpointDamaged, CheckpointMismatch, checkpoint_errors
from muster.host.files import closing
from muster.run import Run
from muster.runtime.stderr_messages import print_stderr

RECORD: Final = "saved_by_trainer"
KEPT_MIN: Final = 2
"""A gang may be killed before all of its ranks have recorded the newest one."""

PIECE_BYTES: Final = 1 << 20


class SavedCheckpoints:
    """The record of a rank; `Run.restore` and `Run.checkpoint` carry it to the next attempt."""

    def __init__(self, run: Run) -> None:
        """Raises a `CheckpointError`: `CheckpointDamaged` if no recorded checkpoint is intact."""
        self._run: Final = run
        self._entries: list[dict[str, Any]] = []  # newest first
        if (state := run.restore()) is not None:
            if RECORD not in state:
                raise CheckpointMismatch(
                    "the newest checkpoint of this job was not saved by a MusterCallback: give the "
                    "job another id"
                )
            self._entries = _intact(state[RECORD])

    @property
    def newest(self) -> dict[str, Any] | None:
        """The newest one: its `path`, its `step`, and what `add` was given."""
        return self._entries[0] if self._entries else None

    @property
    def newest_path(self) -> str | None:
        return self._entries[0]["path"] if self._entries else None

    def has(self, step: int) -> bool:
        return any(entry["step"] == step for entry in self._entries)

    def add(self, path: str, best: str | None = None, **more: Any) -> None:  # noqa: ANN401
        """Make a file or directory durable, record it, and delete the oldest, but not `best`.

        `more` takes what `Run.checkpoint` takes. Raises a `CheckpointError`.
        """
        path = str(Path(path).absolute())
        with checkpoint_errors("flushing", path):
            _flush(Path(path))
            files = _digests(Path(path))
        entry = {"path": path, "step": self._run.steps_done, "files": files, **more}
        entries = [entry, *(known for known in self._entries if known["path"] != path)]
        kept = max(self._run.settings.keep_last, KEPT_MIN)
        self._entries, old = entries[:kept], entries[kept:]
        self._run.checkpoint({RECORD: self._entries})
        if old and self._run.rank == 0:
            self._run.flush()  # in an object store the record becomes durable a little later
            for entry in old:
                if best is None or Path(entry["path"]) != Path(best).absolute():
                    _delete(Path(entry["path"]))


def _intact(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries from the newest intact one on."""
    for number, entry in enumerate(entries):
        try:
            if _digests(Path(entry["path"])) == entry["files"]:
                return entries[number:]
            reason = "its files are not those that were saved"
        except OSError as error:
            reason = error.strerror or str(error)
        print_stderr(f"muster: warning: skipped the checkpoint {entry['path']}: {reason}")
    raise CheckpointDamaged(
        f"none of the last {len(entries)} checkpoints is intact, see the warnings: put back the "
        f"files of {entries[0]['path']}, or give the job another id to begin anew"
    )


def _digests(path: Path) -> dict[str, str]:
    """Return the xxh3 of each file by its place below `path`."""
    found = {}
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if not file.is_dir():
            with file.open("rb") as content:
                digest = xxh3_128()
                while piece := content.read(PIECE_BYTES):
                    digest.update(piece)
            found[str(file.relative_to(path))] = digest.hexdigest()
    return found


def _flush(path: Path) -> None:
    """Make every file below `path` durable, and every name on the way to it."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    for place in (*path.rglob("*"), path, *path.parents):
        # A directory above may be another user's, who keeps it durable.
        with suppress(PermissionError), closing(os.open(place, flags)) as descriptor:
            os.fsync(descriptor)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def random_state() -> dict[str, Any]:
    """Return the state of the generators of Python, numpy and torch, for `SavedCheckpoints.add`."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002  the generator that scripts use
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
