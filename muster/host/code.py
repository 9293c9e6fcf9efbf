"""Which code a job runs: digests of its files, and of what a process has loaded.

Contents are compared, never times. Files are named by their real paths, on all hosts alike.
"""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from errno import EFBIG
from hashlib import file_digest
from itertools import chain, islice
from pathlib import Path
from typing import Final, NamedTuple

from muster.contracts.settings.paths import size_text

FILES_LIMIT: Final = 5000
BYTES_LIMIT: Final = 64 << 20
"""Most files of a job that are known before a rank has them, and their size together."""

NAMES_LIMIT: Final = 100_000
"""Most files of any kind that are looked at: a script may lie beside a data set."""

FILE_COPY_LIMIT: Final = 1 << 20
COPY_LIMIT: Final = 100 << 20
"""Bytes of a snapshot: code, and no data."""

DIGEST_DIGITS: Final = 16  # of sha256, so that `sha256sum` shows the same

SHELLS: Final = frozenset({"sh", "bash", "dash", "ksh", "zsh"})
_NOT_CODE: Final = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
_MARKS: Final = ("pyvenv.cfg", "LATEST")  # files of an environment, and of checkpoints
_PLACES: Final = (Path(os.__file__).parent, Path(__file__).parents[1])
_LIBRARIES: Final = tuple(f"{place}/" for place in (*_PLACES, *map(os.path.realpath, _PLACES)))
"""Of the interpreter, and Muster itself."""


class Script(NamedTuple):
    """The file that an interpreter or a shell runs, and the directory that holds its modules."""

    file: str
    root: str
    word: str  # that names it in the command
    is_module: bool  # of ``-m``


def script_of(
    command: Sequence[str] | None, program: str | None, working_dir: Path | str
) -> Script | None:
    """Return the script of a job, also of ``-m``; None for code on the command line, or no file."""
    words = command or (("-m", program.rpartition(":")[0]) if program else ())
    for before, word in zip(("", *words), words, strict=False):
        if before == "-c":
            return None
        module = word.replace(".", "/")
        places = [f"{module}.py", f"{module}/__main__.py"] if before == "-m" else []
        if word.endswith((".py", ".sh")) or os.path.basename(before) in SHELLS:  # noqa: PTH119
            places.append(word)
        for place in places:
            if os.path.isfile(file := os.path.realpath(Path(working_dir, place))):  # noqa: PTH113
                is_module = place != word
                root = os.path.realpath(working_dir) if is_module else os.path.dirname(file)  # noqa: PTH120
                return Script(file, root, word, is_module)
    return None


def digest_of(file: str) -> str | None:
    """Return the digest of a file; None if there is none that can be read."""
    with suppress(OSError), open(file, "rb") as content:  # noqa: PTH123
        return file_digest(content, "sha256").hexdigest()[:DIGEST_DIGITS]
    return None


def read_code(script: Script | None) -> dict[str, str]:
    """Return the digests of a script and of the modules below its root, by path; {} without one."""
    found: dict[str, str] = {}
    room = BYTES_LIMIT
    names = islice(files_below(script.root), NAMES_LIMIT) if script else ()
    modules = (name for name in names if name.endswith(".py") and os.path.isfile(name))  # noqa: PTH113
    for file in islice(chain([script.file] if script else [], modules), FILES_LIMIT):
        with suppress(OSError):  # it has gone meanwhile
            room -= os.path.getsize(file)  # noqa: PTH202
            if room >= 0 and (digest := digest_of(file)):
                found[file] = digest
    return found


def files_below(root: str) -> Iterator[str]:
    """Yield the files and links below a directory, without caches, environments, checkpoints."""
    for place, directories, names in os.walk(root):
        directories[:] = sorted(
            name
            for name in directories
            if not (name.startswith(".") or name in _NOT_CODE)
            and not any(os.path.exists(f"{place}/{name}/{mark}") for mark in _MARKS)  # noqa: PTH110
        )
        links = (name for name in directories if os.path.islink(f"{place}/{name}"))  # noqa: PTH114
        yield from (f"{place}/{name}" for name in sorted([*names, *links]))


def copy_code(root: str, place: Path | None) -> None:
    """Copy the files below a directory; without a `place` only check their sizes.

    Raises `OSError`, also for more than belongs to a program; it names the largest files.
    """
    sizes = {
        os.path.relpath(file, root): os.stat(file).st_size  # noqa: PTH116
        for file in islice(files_below(root), NAMES_LIMIT)
        if os.path.exists(file)  # noqa: PTH110  no dangling link
    }
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    if sum(sizes.values()) > COPY_LIMIT or any(sizes[name] > FILE_COPY_LIMIT for name in largest):
        words = ", ".join(f"{name} ({size_text(sizes[name])})" for name in largest)
        limits = f"{size_text(FILE_COPY_LIMIT)} a file and {size_text(COPY_LIMIT)} in all"
        raise OSError(EFBIG, f"holds more than {limits}; its largest files: {words}", root)
    if place is None:
        return
    for name in sizes:
        copy, original = place / name, Path(root, name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if original.is_dir():
            copy.symlink_to(original.resolve())
        elif original.is_file():
            shutil.copy(original, copy)  # with its mode: a script may be run by its name


class LoadedCode:
    """The user's modules that this process has loaded."""

    def __init__(self) -> None:
        self._count = 0
        self._known: set[str] = set()

    def fresh(self) -> Mapping[str, str]:
        """Return the digests of what was loaded since the last call, by path."""
        if len(sys.modules) == self._count:
            return {}
        self._count = len(sys.modules)
        # Not getattr: a lazy module would import something.
        modules = list(sys.modules.values())
        places = (getattr(module, "__dict__", {}).get("__file__") for module in modules)
        new = {place for place in places if isinstance(place, str)} - self._known
        self._known |= new
        paths = sorted(filter(_is_own, map(os.path.realpath, filter(_is_own, new))))
        return {path: digest for path in paths if (digest := digest_of(path))}


def _is_own(path: str) -> bool:
    is_library = path.startswith(_LIBRARIES) or not path.endswith(".py")
    return not is_library and _NOT_CODE.isdisjoint(path.split("/"))
