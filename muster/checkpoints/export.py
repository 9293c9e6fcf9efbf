"""Exports the arrays of a checkpoint in numpy's own formats, never with pickle.

Nothing is overwritten, and an export that fails leaves nothing behind.
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

from muster.checkpoints.errors import ExportFailed
from muster.checkpoints.format import Array
from muster.checkpoints.reader import Checkpoint

ARCHIVE: Final = ".npz"
REST: Final = "checkpoint.json"
"""Holds the rest of the checkpoint: the position, and the values as in the manifest."""


def export(checkpoint: Checkpoint, target: Path) -> int:
    """Write a checkpoint to a new ``.npz`` file or a new directory; return the number of arrays.

    In a directory, names are percent-encoded where needed, and the values go to a JSON file beside
    the arrays. Raises `ExportFailed`.
    """
    found = checkpoint.state.items()
    arrays = {name: value for name, value in found if isinstance(value, np.ndarray)}
    try:
        if target.suffix == ARCHIVE:
            _write_archive(arrays, target)
        else:
            _write_directory(checkpoint, arrays, target)
    except FileExistsError as error:
        raise ExportFailed(f"{target} exists: choose a new name") from error
    except OSError as error:
        raise ExportFailed(f"writing {target} failed: {error.strerror or error}") from error
    return len(arrays)


def _write_archive(arrays: Mapping[str, Array], target: Path) -> None:
    with (
        target.open("xb") as file,
        _removed_on_error(target),
        zipfile.ZipFile(file, "w") as archive,
    ):
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                _write(member, array)


def _write_directory(checkpoint: Checkpoint, arrays: Mapping[str, Array], target: Path) -> None:
    target.mkdir()
    with _removed_on_error(target):
        for name, array in arrays.items():
            with (target / f"{quote(name, safe='')}.npy").open("xb") as file:
                _write(file, array)
        manifest = checkpoint.manifest
        rest = {"job_id": manifest.job_id, "position": manifest.position, "values": manifest.values}
        (target / REST).write_bytes(msgspec.json.format(msgspec.json.encode(rest), indent=2))


def _write(file: IO[bytes], array: Array) -> None:
    np.lib.format.write_array(file, array, allow_pickle=False)


@contextmanager
def _removed_on_error(target: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink()
        raise
