"""What may be left of a file system when the processes are killed, or the power fails.

KILLED   everything that was written is there: the kernel lives on.
ORDERED  of the changes of directories that were not fsynced, the first ones (a journal).
ANY      of those changes, any subset: all that POSIX promises.

Under a power cut each file with bytes that were not fsynced holds what was durable, all that was
written, the first half of it (alone, or over what was durable: a file written over), or zeros of
its length (a size that reached the disk before the data did).
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import combinations, islice, product
from typing import Final, TypeAlias

from muster.checkpoints.memory import Change, Directory, File, MemoryFileSystem, Node

Content: TypeAlias = Callable[[File], bytes]
Case: TypeAlias = tuple[Sequence[Change], Sequence[Content]]
"""Which changes of directories reached the disk, and what each dirty file holds."""


class Mode(StrEnum):
    """How much the file system below is trusted."""

    KILLED = "killed"
    ORDERED = "ordered"
    ANY = "any"


def _durable(file: File) -> bytes:
    return file.durable


def _written(file: File) -> bytes:
    return bytes(file.written)


def _torn(file: File) -> bytes:
    return bytes(file.written[: len(file.written) // 2])


def _half_over(file: File) -> bytes:
    return _torn(file) + file.durable[len(file.written) // 2 :]


def _zeros(file: File) -> bytes:
    return bytes(len(file.written))


CONTENTS: Final[Sequence[Content]] = (_durable, _written, _torn, _half_over, _zeros)


def crash_states(
    files: MemoryFileSystem, mode: Mode, *, limit: int, seed: int = 0
) -> Iterator[MemoryFileSystem]:
    """Yield file systems as they may be found afterwards: all of them, or `limit` drawn ones.

    Everything in a yielded one is durable, and no descriptor is open.
    """
    if mode is Mode.KILLED:
        yield _survivor(files, None, {})
        return
    nodes = list(_reachable(files.root, set()))
    changes = sorted(
        (change for node in nodes if isinstance(node, Directory) for change in node.pending),
        key=lambda change: change.number,
    )
    dirty = [node for node in nodes if isinstance(node, File) and node.durable != node.written]
    choices = len(changes) + 1 if mode is Mode.ORDERED else 2 ** len(changes)
    if choices * len(CONTENTS) ** len(dirty) <= limit:
        cases = _all_cases(changes, len(dirty), mode)
    else:
        cases = islice(_drawn_cases(changes, len(dirty), mode, random.Random(seed)), limit)  # noqa: S311  no secret
    for kept, contents in cases:
        chosen = dict(zip(map(id, dirty), contents, strict=True))
        yield _survivor(files, {change.number for change in kept}, chosen)


def _all_cases(changes: Sequence[Change], dirty: int, mode: Mode) -> Iterator[Case]:
    kept: Iterable[Sequence[Change]]
    if mode is Mode.ORDERED:
        kept = [changes[:count] for count in range(len(changes) + 1)]
    else:
        kept = (
            subset for count in range(len(changes) + 1) for subset in combinations(changes, count)
        )
    return product(kept, product(CONTENTS, repeat=dirty))


def _drawn_cases(
    changes: Sequence[Change], dirty: int, mode: Mode, draw: random.Random
) -> Iterator[Case]:
    while True:
        if mode is Mode.ORDERED:
            kept = changes[: draw.randint(0, len(changes))]
        else:
            kept = [change for change in changes if draw.random() < 0.5]  # noqa: PLR2004  a coin
        yield kept, draw.choices(CONTENTS, k=dirty)


def _reachable(node: Node, seen: set[int]) -> Iterator[Node]:
    """Yield every node that some crash could leave a way to, once."""
    if id(node) in seen:
        return
    seen.add(id(node))
    yield node
    if isinstance(node, Directory):
        added = [change.added[1] for change in node.pending if change.added]
        for child in [*node.durable.values(), *added]:
            yield from _reachable(child, seen)


def _survivor(
    files: MemoryFileSystem, kept: set[int] | None, contents: Mapping[int, Content]
) -> MemoryFileSystem:
    """Build one; `kept` None: nothing is lost."""
    survivor = MemoryFileSystem()
    _copy(files.root, survivor.root, kept, contents)
    return survivor


def _copy(
    source: Directory, target: Directory, kept: set[int] | None, contents: Mapping[int, Content]
) -> None:
    for name, node in _entries(source, kept).items():
        copy: Node
        if isinstance(node, Directory):
            copy = below = Directory()
            _copy(node, below, kept, contents)
        else:
            content = contents.get(id(node), _written)(node)
            copy = File(bytearray(content), content)
        target.entries[name] = target.durable[name] = copy


def _entries(directory: Directory, kept: set[int] | None) -> dict[str, Node]:
    if kept is None:
        return directory.entries
    entries = dict(directory.durable)
    for change in directory.pending:
        if change.number in kept:
            change.apply(entries)
    return entries
