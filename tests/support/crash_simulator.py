"""A file system in memory that records every operation, and every state a crash may leave of it.

It implements the port of `muster.checkpoints.local` (the same tests hold for both) and adds three
things: each operation is recorded as a value and can be replayed, any one can be made to fail, and
durable content is kept apart from written content. It is stricter than a disk: only what was
fsynced survives for certain. `crash_states` yields what may be left after a crash:

KILLED   the processes died: everything that was written is there.
ORDERED  the power failed: of the directory changes that were not fsynced, the first ones (journal).
ANY      the power failed: of those changes, any subset. POSIX promises no more.

After a power cut each file with bytes that were not fsynced holds the durable content, everything
that was written, the first half of it (alone, or over the durable content), or zeros of its length
(a size that reached the disk before the data did).
"""

import errno
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, combinations, product
from typing import Final, TypeAlias

from muster.checkpoints.local import Data


@dataclass(slots=True, eq=False)
class File:
    """A file's bytes: as processes see them, and as they survive for certain."""

    written: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


@dataclass(slots=True)
class Opened:
    """An open file and the offset of its next byte."""

    file: File
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a directory: a name removed, a name added, or both at once (a rename)."""

    number: int
    """Orders the changes of the whole file system."""
    removed: str | None = None
    added: "tuple[str, Node] | None" = None

    def apply(self, entries: "dict[str, Node]") -> None:
        if self.removed is not None:
            entries.pop(self.removed, None)
        if self.added is not None:
            entries[self.added[0]] = self.added[1]


@dataclass(slots=True, eq=False)
class Directory:
    """A directory's entries: as seen, as durable, and the changes between the two."""

    entries: "dict[str, Node]" = field(default_factory=dict)
    durable: "dict[str, Node]" = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)


Node: TypeAlias = File | Directory


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of the port, and the error it was made to fail with."""

    name: str
    arguments: tuple[str | int | bytes, ...]
    error: int | None = None


class MemoryFileSystem:
    """A `FileSystem` in memory. `errors` maps an operation's number to the errno it fails with."""

    def __init__(
        self, *, errors: Mapping[int, int] | None = None, largest_write_bytes: int | None = None
    ) -> None:
        self.root: Final = Directory()
        self.operations: Final[list[Operation]] = []
        self._errors: Final = errors or {}
        self._largest_write_bytes: Final = largest_write_bytes
        self._open: Final[dict[int, Opened]] = {}
        self._changes = 0
        self._descriptors = 0

    def make_directory(self, path: str) -> None:
        self._record("make_directory", path)
        parent, name = self._parent(path)
        _refuse(errno.EEXIST, path, when=name in parent.entries)
        self._change(parent, added=(name, Directory()))

    def is_directory(self, path: str) -> bool:
        self._record("is_directory", path)
        try:
            return isinstance(self._node(path), Directory)
        except FileNotFoundError:
            return False

    def list_directory(self, path: str) -> list[str]:
        self._record("list_directory", path)
        return list(self._directory(path).entries)

    def fsync_directory(self, path: str) -> None:
        self._record("fsync_directory", path)
        directory = self._directory(path)
        directory.durable = dict(directory.entries)
        directory.pending.clear()

    def remove_directory(self, path: str) -> None:
        self._record("remove_directory", path)
        parent, name = self._parent(path)
        _refuse(errno.ENOTEMPTY, path, when=bool(self._directory(path).entries))
        self._change(parent, removed=name)

    def create(self, path: str) -> int:
        self._record("create", path)
        parent, name = self._parent(path)
        _refuse(errno.EEXIST, path, when=name in parent.entries)
        file = File()
        self._change(parent, added=(name, file))
        return self._descriptor_of(file)

    def overwrite(self, path: str, size_bytes: int) -> int:
        self._record("overwrite", path, size_bytes)
        node = self._node(path)
        if isinstance(node, Directory):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        del node.written[size_bytes:]
        return self._descriptor_of(node)

    def write(self, descriptor: int, data: Data) -> int:
        taken = bytes(data[: self._largest_write_bytes])
        self._record("write", descriptor, taken)
        opened = self._opened(descriptor)
        end = opened.offset + len(taken)
        opened.file.written[opened.offset : end] = taken
        opened.offset = end
        return len(taken)

    def fsync(self, descriptor: int) -> None:
        self._record("fsync", descriptor)
        file = self._opened(descriptor).file
        file.durable = bytes(file.written)

    def close(self, descriptor: int) -> None:
        self._opened(descriptor)
        del self._open[descriptor]
        self._record("close", descriptor)

    def read(self, path: str, limit_bytes: int) -> bytearray:
        self._record("read", path, limit_bytes)
        node = self._node(path)
        if isinstance(node, Directory):
            raise OSError(errno.EINVAL, "not a regular file", path)
        _refuse(errno.EFBIG, path, when=len(node.written) > limit_bytes)
        return bytearray(node.written)

    def rename(self, source: str, target: str) -> None:
        self._record("rename", source, target)
        parent, old = self._parent(source)
        new_parent, new = self._parent(target)
        _refuse(errno.EXDEV, target, when=parent is not new_parent)
        node = self._node(source)
        replaced = parent.entries.get(new)
        _refuse(errno.ENOTEMPTY, target, when=isinstance(replaced, Directory))
        _refuse(
            errno.ENOTDIR, target, when=isinstance(replaced, File) and isinstance(node, Directory)
        )
        self._change(parent, removed=old, added=(new, node))

    def remove_file(self, path: str) -> None:
        self._record("remove_file", path)
        parent, name = self._parent(path)
        _refuse(errno.EISDIR, path, when=isinstance(self._node(path), Directory))
        self._change(parent, removed=name)

    def replay(self, operations: Iterable[Operation]) -> None:
        """Repeat recorded operations: the same operations leave the same tree."""
        for operation in operations:
            if operation.error is None:
                # An operation that failed then fails again.
                with suppress(OSError):
                    getattr(self, operation.name)(*operation.arguments)

    def tree(self) -> dict[str, bytes]:
        """Return every file's path and content; a directory's path ends in a slash."""
        return dict(_walk(self.root, ""))

    def _record(self, name: str, *arguments: str | int | bytes) -> None:
        error = self._errors.get(len(self.operations))
        self.operations.append(Operation(name, arguments, error))
        if error is not None:
            raise OSError(error, os.strerror(error))

    def _change(
        self,
        directory: Directory,
        removed: str | None = None,
        added: tuple[str, Node] | None = None,
    ) -> None:
        self._changes += 1
        change = Change(self._changes, removed, added)
        change.apply(directory.entries)
        directory.pending.append(change)

    def _descriptor_of(self, file: File) -> int:
        # Never reused, so that a record tells one file from another.
        self._descriptors += 1
        self._open[self._descriptors] = Opened(file)
        return self._descriptors

    def _opened(self, descriptor: int) -> Opened:
        _refuse(errno.EBADF, str(descriptor), when=descriptor not in self._open)
        return self._open[descriptor]

    def _parent(self, path: str) -> tuple[Directory, str]:
        parent, _, name = path.rpartition("/")
        return self._directory(parent), name

    def _directory(self, path: str) -> Directory:
        node = self._node(path)
        if isinstance(node, File):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return node

    def _node(self, path: str) -> Node:
        node: Node = self.root
        for name in filter(None, path.split("/")):
            if isinstance(node, File):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            _refuse(errno.ENOENT, path, when=name not in node.entries)
            node = node.entries[name]
        return node


def _walk(directory: Directory, path: str) -> Iterable[tuple[str, bytes]]:
    for name, node in directory.entries.items():
        if isinstance(node, File):
            yield f"{path}/{name}", bytes(node.written)
        else:
            yield f"{path}/{name}/", b""
            yield from _walk(node, f"{path}/{name}")


def _refuse(number: int, path: str, *, when: bool) -> None:
    if when:
        raise OSError(number, os.strerror(number), path)


Content: TypeAlias = Callable[[File], bytes]
Case: TypeAlias = tuple[Sequence[Change], Sequence[Content]]
"""The directory changes that reached the disk, and the content of each dirty file."""


class CrashMode(StrEnum):
    """The kind of crash, see the module's docstring."""

    KILLED = "killed"
    ORDERED = "ordered"
    ANY = "any"


def _written(file: File) -> bytes:
    return bytes(file.written)


def _torn(file: File) -> bytes:
    return bytes(file.written[: len(file.written) // 2])


CONTENTS: Final[Sequence[Content]] = (
    lambda file: file.durable,
    _written,
    _torn,
    lambda file: _torn(file) + file.durable[len(file.written) // 2 :],
    lambda file: bytes(len(file.written)),
)


def crash_states(
    files: MemoryFileSystem, mode: CrashMode, *, limit: int, seed: int = 0
) -> Iterator[MemoryFileSystem]:
    """Yield the file systems that a crash may leave: all of them, or `limit` random ones.

    Everything in a yielded one is durable, and no descriptor is open.
    """
    if mode is CrashMode.KILLED:
        yield _survivor(files, None, {})
        return
    nodes = list(_reachable(files.root, set()))
    changes = sorted(
        (change for node in nodes if isinstance(node, Directory) for change in node.pending),
        key=lambda change: change.number,
    )
    dirty = [node for node in nodes if isinstance(node, File) and node.durable != node.written]
    sizes = range(len(changes) + 1)
    choices = len(sizes) if mode is CrashMode.ORDERED else 2 ** len(changes)
    cases: Iterable[Case]
    if choices * len(CONTENTS) ** len(dirty) > limit:
        draw = random.Random(seed)  # noqa: S311  no secret
        cases = (_draw_case(changes, len(dirty), mode, draw) for _ in range(limit))
    elif mode is CrashMode.ORDERED:
        cases = product((changes[:size] for size in sizes), product(CONTENTS, repeat=len(dirty)))
    else:
        subsets = chain.from_iterable(combinations(changes, size) for size in sizes)
        cases = product(subsets, product(CONTENTS, repeat=len(dirty)))
    for kept, contents in cases:
        chosen = dict(zip(map(id, dirty), contents, strict=True))
        yield _survivor(files, {change.number for change in kept}, chosen)


def _draw_case(changes: Sequence[Change], dirty: int, mode: CrashMode, draw: random.Random) -> Case:
    if mode is CrashMode.ORDERED:
        kept = changes[: draw.randint(0, len(changes))]
    else:
        kept = [change for change in changes if draw.random() < 0.5]
    return kept, draw.choices(CONTENTS, k=dirty)


def _reachable(node: Node, seen: set[int]) -> Iterator[Node]:
    """Yield every node that is reachable after some crash, once."""
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
    """Return a copy with the `kept` changes; None keeps all."""
    survivor = MemoryFileSystem()
    _copy(files.root, survivor.root, kept, contents)
    return survivor


def _copy(
    source: Directory, target: Directory, kept: set[int] | None, contents: Mapping[int, Content]
) -> None:
    entries = dict(source.entries if kept is None else source.durable)
    for change in source.pending if kept else ():
        if change.number in kept:
            change.apply(entries)
    for name, node in entries.items():
        copy: Node
        if isinstance(node, Directory):
            copy = Directory()
            _copy(node, copy, kept, contents)
        else:
            content = contents.get(id(node), _written)(node)
            copy = File(bytearray(content), content)
        target.entries[name] = target.durable[name] = copy
