"""Exports a checkpoint in the formats of numpy, safetensors or PyTorch; no pickle is ever read.

Nothing is overwritten, and an export that fails leaves nothing behind.
"""

import re
import shutil
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import quote

import msgspec
import numpy as np

from muster.checkpoints.errors import ExportFailed
from muster.checkpoints.format import FOREIGN, Array, State, encode_arrays, from_json
from muster.checkpoints.manifest import VALUES
from muster.checkpoints.nested import ARRAY, ARRAYS, unflatten, with_leaves
from muster.checkpoints.reader import Checkpoint

ARCHIVE: Final = ".npz"
REST: Final = "checkpoint.json"
"""Holds the rest of the checkpoint: the position, and the values as in the manifest."""

NUMPY: Final = "numpy"
SAFETENSORS: Final = "safetensors"
TORCH: Final = "torch"
FORMATS: Final[Mapping[str, str]] = {
    "": NUMPY,
    ARCHIVE: NUMPY,
    ".safetensors": SAFETENSORS,
    ".pt": TORCH,
    ".pth": TORCH,
}
"""The format that the suffix of a target means. None is a directory."""


def export(checkpoint: Checkpoint, target: Path, kind: str = NUMPY, only: str | None = None) -> int:
    """Write a checkpoint to a new file or directory; return the number of arrays.

    numpy: a ``.npz`` file or else a directory, with the arrays under the names of the checkpoint.
    In a directory, names are percent-encoded where needed, and the values go to a JSON file beside
    the arrays. torch: what the script has saved, or the ``state_dict()`` of a muster.torch job's
    model and optimizer. safetensors: the arrays of that, named by their paths. `only` selects one
    part, such as "model" or "registered.average", and leaves out its name. Raises `ExportFailed`.
    """
    state = checkpoint.state if kind == NUMPY else _with_state_dicts(checkpoint.state)
    sources = _selected(state, only, checkpoint.step)
    arrays = {name: state[source] for name, source in sources.items()}
    try:
        if kind == TORCH:
            _write_torch(state, only, target)
        elif kind == SAFETENSORS:
            kinds = state.get(ARRAYS, {})
            types = {name: kinds.get(sources[name], {}).get("torch") for name in arrays}
            foreign = {name: kind for name, kind in types.items() if kind in FOREIGN}
            _write_safetensors(arrays, foreign, target)
        elif target.suffix == ARCHIVE:
            _write_archive(arrays, target)
        else:
            _write_directory(checkpoint, arrays, target)
    except FileExistsError as error:
        raise ExportFailed(f"{target} exists: choose a new name") from error
    except OSError as error:
        raise ExportFailed(f"writing {target} failed: {error.strerror or error}") from error
    return len(arrays)


def _selected(state: State, only: str | None, step: int) -> dict[str, str]:
    """Return the names of arrays in the export, and those in the state."""
    names = [name for name, value in state.items() if isinstance(value, np.ndarray)]
    if only is None:
        return {name: name for name in names}
    prefix = f"{only}."
    found = {name.removeprefix(prefix): name for name in names if f"{name}.".startswith(prefix)}
    if not found:
        # Of the registered objects of a muster.torch job each is a part.
        cut = re.compile(r"registered\.[^.]+|[^.]+")
        parts = sorted({match[0] for name in names if (match := cut.match(name))})
        raise ExportFailed(
            f"the checkpoint of step {step} has no part {only!r} with arrays: it has "
            f"{', '.join(parts) or 'none'}"
        )
    return found


def _with_state_dicts(state: State) -> dict[str, Any]:
    """Return the state of a muster.torch job as `flatten` returns that of a script.

    That is ``{"model": model.state_dict(), "optimizer": optimizer.state_dict(), …}``; see
    `TrainingState.encode`. Any other state is returned as it is.
    """
    encoded = msgspec.json.decode(state.get(VALUES, "{}"))
    if (layout := encoded.get("layout")) is None:
        return dict(state)
    arrays, kinds = dict[str, Array](), dict[str, dict[str, str]]()
    foreign = {name: kind for kind in FOREIGN for name in layout.get(kind, ())}

    def moved(source: str, name: str) -> dict[str, str]:
        arrays[name] = array = state[source]
        kinds[name] = {"torch": foreign.get(source, f"{array.dtype}")}
        return {ARRAY: name}

    kept = from_json(encoded["kept"])

    def optimizer(part: str, groups: Sequence[tuple[Any, list[str]]]) -> dict[str, Any]:
        """Return a part: what `state_dict()` of an optimizer with these groups returns."""
        numbers = {name: at for at, name in enumerate(chain(*(names for _, names in groups)))}

        def slot(name: str, key: str, value: Any) -> Any:  # noqa: ANN401  JSON
            source = f"optimizer.{name}.{key}"
            is_moved = value is None and source in state
            return moved(source, f"{part}.state.{numbers[name]}.{key}") if is_moved else value

        return {
            "state": {
                number: {key: slot(name, key, value) for key, value in kept[name].items()}
                for name, number in numbers.items()
                if name in kept
            },
            "param_groups": [
                {**group, "params": [numbers[name] for name in names]} for group, names in groups
            ],
        }

    groups = iter(zip(from_json(encoded["groups"]), layout["optimizer"], strict=True))
    counts = layout.get("groups", [len(layout["optimizer"])])
    optimizers = {f"optimizer{at or ''}": [*islice(groups, size)] for at, size in enumerate(counts)}
    parts = {
        "model": {
            key: moved(f"model.{name}", f"model.{key}") for key, name in layout["model"].items()
        },
        **{part: optimizer(part, members) for part, members in optimizers.items()},
        "values": from_json(encoded["values"]),
    }
    objects = from_json(encoded["objects"])
    kinds |= objects.pop(ARRAYS, {})
    arrays |= {name: state[name] for name in kinds if name not in arrays}
    parts["model"] |= objects.pop("model", {})  # what get_extra_state has returned
    return {**arrays, **parts, **objects, ARRAYS: kinds}


def _write_torch(state: dict[str, Any], only: str | None, target: Path) -> None:
    try:
        torch: Any = import_module("torch")
    except ImportError as error:
        raise ExportFailed(
            f"a file for PyTorch needs torch, and {sys.executable} has none: install it there, or "
            "export to a .safetensors file"
        ) from error
    tree = unflatten(state)
    if only is not None:
        tree = _part(tree, only)

    def tensor(value: Any, _: str) -> Any:  # noqa: ANN401
        return torch.from_numpy(value) if isinstance(value, np.ndarray) else value

    with target.open("xb") as file, _removed_on_error(target):
        try:
            torch.save(with_leaves(tree, "", tensor), file)
        except RuntimeError as error:  # what torch makes of a full disk
            raise OSError(f"{error.__context__ or error}") from error


def _part(tree: Any, path: str) -> Any:  # noqa: ANN401
    """Return what is at a dotted path of nested dicts, whose keys may have dots, too."""
    items = {f"{key}": part for key, part in tree.items()}
    if path in items:
        return items[path]
    for key, part in items.items():
        if path.startswith(f"{key}.") and isinstance(part, dict):
            return _part(part, path.removeprefix(f"{key}."))
    prefix = f"{path}."
    return {key.removeprefix(prefix): part for key, part in items.items() if key.startswith(prefix)}


def _write_safetensors(
    arrays: Mapping[str, Array], foreign: Mapping[str, str], target: Path
) -> None:
    with target.open("xb") as file, _removed_on_error(target):
        file.writelines(encode_arrays(arrays, foreign))


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
