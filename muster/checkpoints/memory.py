"""A file system in memory that remembers every operation.

A backend like the other one (the same tests hold for both), with three things a disk does not
offer: each operation is recorded as a value and can be replayed, any one can be made to fail, and
what is durable is kept apart from what is only written, so that `power_cut` can say what may be
left. It is stricter than a disk: only what was fsynced survives for certain.
"""

import errno
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from muster.checkpoints.filesystem import Data


@dataclass(slots=True, eq=False)
class File:
    """A file's bytes: as the processes see them, and as they are sure to survive."""

    written: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


@dataclass(slots=True)
class Opened:
    """An open file and the place its next byte goes to."""

    file: File
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """One step of a directory: a name gone, a name there, or both at once (a rename)."""

    number: int
    """Counts the changes of the whole file system, so that their order is known."""
    removed: str | None = None
    added: "tuple[str, Node] | None" = None

    def apply(self, entries: "dict[str, Node]") -> None:
        if self.removed is not None:
            entries.pop(self.removed, None)
        if self.added is not None:
            entries[self.added[0]] = self.added[1]


@dataclass(slots=True, eq=False)
class Directory:
    """A directory's entries: as seen, as sure to survive, and the changes between the two."""

    entries: "dict[str, Node]" = field(default_factory=dict)
    durable: "dict[str, Node]" = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)


Node: TypeAlias = File | Directory


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of the port, and the error it met."""

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
        """Do again what another one recorded: the same operations leave the same tree."""
        for operation in operations:
            if operation.error is None:
                # What the tree refused there, it refuses here.
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
        # Never given out twice, so that a record of them tells one file from another.
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
