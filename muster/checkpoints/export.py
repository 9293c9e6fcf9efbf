"""The arrays of a checkpoint for other programs, as numpy writes them: never with pickle.

Nothing is written over. What was begun and could not be finished is taken away again.
"""

import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final
from urllib.parse import quote

import msgspec
import numpy as np

from muster.checkpoints.arrays import Array
from muster.checkpoints.errors import NotExported
from muster.checkpoints.reader import Checkpoint

ARCHIVE: Final = ".npz"
REST: Final = "checkpoint.json"
"""What is no array: the position, and the values as they are in the manifest."""


def export(checkpoint: Checkpoint, target: Path) -> int:
    """Write a checkpoint to a new ``.npz`` file, or else a new directory; return how many arrays.

    In a directory a character of a name that a file cannot have is written as in URLs, and what is
    no array goes to a file beside them. Raises `NotExported`.
    """
    found = checkpoint.state.items()
    arrays = {name: value for name, value in found if isinstance(value, np.ndarray)}
    try:
        if target.suffix == ARCHIVE:
            _write_archive(arrays, target)
        else:
            _write_directory(checkpoint, arrays, target)
    except FileExistsError as error:
        raise NotExported(f"{target} is there already: name one that is not") from error
    except OSError as error:
        raise NotExported(f"writing {target} failed: {error.strerror or error}") from error
    return len(arrays)


def _write_archive(arrays: Mapping[str, Array], target: Path) -> None:
    with target.open("xb") as file, _undone(target), zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                _write(member, array)


def _write_directory(checkpoint: Checkpoint, arrays: Mapping[str, Array], target: Path) -> None:
    target.mkdir()
    with _undone(target):
        for name, array in arrays.items():
            with (target / f"{quote(name, safe='')}.npy").open("xb") as file:
                _write(file, array)
        manifest = checkpoint.manifest
        rest = {"job_id": manifest.job_id, "position": manifest.position, "values": manifest.values}
        (target / REST).write_bytes(msgspec.json.format(msgspec.json.encode(rest), indent=2))


def _write(file: IO[bytes], array: Array) -> None:
    np.lib.format.write_array(file, array, allow_pickle=False)


@contextmanager
def _undone(target: Path) -> Iterator[None]:
    """Take away what was begun, if it cannot be finished."""
    try:
        yield
    except BaseException:
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink()
        raise
