"""The directory of an installation's secrets: a file each, of its own user and nobody else's.

A secret that others could read is refused like one that is missing: who would go on with it would
never learn of it. A name is one file of this directory, or refused, and no link is followed.
"""

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from muster.checkpoints.durable import UNFINISHED, ensure_directory, replace_file
from muster.checkpoints.filesystem import LocalFileSystem
from muster.contracts.errors import MusterError
from muster.contracts.secrets import (
    SECRET_LIMIT_BYTES,
    SECRET_NAME_PATTERN,
    Reference,
    SecretUnavailable,
)
from muster.strange_files import closing, open_directory, open_file

_OTHERS: Final = 0o077

_NO_FILE: Final = frozenset({errno.EINVAL, errno.ENXIO})
"""A directory or a pipe; a socket."""

_MISSING: Final = _NO_FILE | {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.EACCES,
    errno.EPERM,
}
"""Another look would find the same; what else goes wrong is the moment's fault."""


class InvalidSecret(MusterError):
    """What is to be kept is no secret: it has no name that a file can have, or is no text."""


class Safe:
    """The secrets of one installation. Names are those of `Reference.name`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def read(self, name: str) -> str:
        """Return a secret, without the newline at its end if there is one.

        Raises `SecretUnavailable` for one that is missing, or open to others than this user;
        OSError where nobody can look now.
        """
        reference = Reference("file", name)
        if not _is_name(name):
            raise SecretUnavailable(reference, "is none that could be kept: that is no name of one")
        try:
            with closing(open_directory(self.directory)) as directory:
                self._refuse_open(directory, self.directory, reference)
                with closing(open_file(name, directory)) as file:
                    self._refuse_open(file, self.directory / name, reference)
                    content = _content(file, reference)
        except OSError as error:
            if error.errno not in _MISSING:
                raise
            raise SecretUnavailable(
                reference,
                f"cannot be read: {self.directory / name} is {_fault(error)}. Whoever runs the "
                f"service puts it there with: muster secret set {name}",
            ) from error
        return _text(content, reference)

    def put(self, name: str, text: str) -> None:
        """Keep a secret, durable, in place of an earlier one; raises `InvalidSecret`, OSError."""
        content = _checked(name, text)
        disk = LocalFileSystem()
        ensure_directory(disk, str(self.directory))
        self.directory.chmod(stat.S_IRWXU)
        self._sweep()
        with self._locked(fcntl.LOCK_SH):
            replace_file(disk, str(self.directory / name), content)

    def names(self) -> list[str]:
        """Return the names of all secrets, sorted."""
        try:
            found = os.listdir(self.directory)  # noqa: PTH208  names, not paths
        except FileNotFoundError:
            return []
        return sorted(filter(_is_name, found))

    def faults(self) -> Iterator[str]:
        """Yield a sentence on each secret that no job gets, though it is there; raises OSError."""
        for name in self.names():
            try:
                self.read(name)
            except SecretUnavailable as error:
                yield str(error)

    def remove(self, name: str) -> None:
        """Keep a secret no longer. Raises `SecretUnavailable` if it is not there."""
        _check_name(name)
        self._sweep()
        try:
            (self.directory / name).unlink()
        except FileNotFoundError:
            reference = Reference("file", name)
            raise SecretUnavailable(reference, f"is not in {self.directory}") from None

    def _sweep(self) -> None:
        """Remove what those have left who were killed while they kept a secret, as far as one may.

        Whoever is at it now holds the lock; who puts files there by hand has names of their own.
        """
        with suppress(OSError), self._locked(fcntl.LOCK_EX | fcntl.LOCK_NB):
            for path in self.directory.glob(UNFINISHED):
                if not path.is_dir():
                    path.unlink()

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        with closing(open_directory(self.directory)) as directory:
            fcntl.flock(directory, kind)
            yield

    def _refuse_open(self, descriptor: int, path: Path, reference: Reference) -> None:
        """Raise `SecretUnavailable` if others than this user could read or write it."""
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise SecretUnavailable(
                reference, f"is not used: {path} belongs to user {found.st_uid}, not to this one"
            )
        if found.st_mode & _OTHERS:
            mode = stat.S_IMODE(found.st_mode)
            raise SecretUnavailable(
                reference,
                f"is not used: {path} has mode {mode:04o}, which lets others in. Correct it with: "
                f"chmod go= {path}",
            )


def _content(file: int, reference: Reference) -> bytes:
    content = os.read(file, SECRET_LIMIT_BYTES + 1)
    if len(content) > SECRET_LIMIT_BYTES:
        raise SecretUnavailable(reference, f"is longer than {SECRET_LIMIT_BYTES} bytes")
    return content


def _text(content: bytes, reference: Reference) -> str:
    try:
        text = content.decode().removesuffix("\n")
    except UnicodeDecodeError:
        # `from None`: the error holds what could not be decoded.
        raise SecretUnavailable(reference, "is no text in UTF-8") from None
    if not text or "\0" in text:
        why = "holds a NUL, which no variable can" if text else "is empty"
        raise SecretUnavailable(reference, why)
    return text


def _fault(error: OSError) -> str:
    if error.errno in {errno.ENOENT, errno.ENOTDIR}:
        return "not there"
    if error.errno in _NO_FILE:
        return "no file"
    return "a link" if error.errno == errno.ELOOP else "not this user's to read"


def _checked(name: str, text: str) -> bytes:
    """Return what to write down."""
    _check_name(name)
    content = text.encode(errors="surrogateescape")
    if len(content) > SECRET_LIMIT_BYTES:
        raise InvalidSecret(f"{name} is longer than {SECRET_LIMIT_BYTES} bytes: nothing is kept")
    try:
        _text(content, Reference("file", name))
    except SecretUnavailable as error:
        raise InvalidSecret(f"{error}: nothing is kept") from None
    return content


def _check_name(name: str) -> None:
    if not _is_name(name):
        raise InvalidSecret(
            f"{name!r} is no name of a secret: use letters, digits, '_', '-' and '.', and begin "
            "with a letter or digit"
        )


def _is_name(name: str) -> bool:
    """Whether it is one of a secret, and not of what somebody is writing down."""
    is_one = re.fullmatch(SECRET_NAME_PATTERN, name, re.ASCII) is not None
    return is_one and not name.endswith(".tmp")
