"""The directory of an installation's secrets: one file each, readable by its own user only.

A secret that others could read is refused like a missing one, so that the mistake is noticed.
Symbolic links are not followed.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from muster.checkpoints.local import UNFINISHED, LocalFileSystem, ensure_directory, replace_file
from muster.contracts.errors import MusterError
from muster.contracts.job.secrets import (
    SECRET_LIMIT_BYTES,
    SECRET_NAME_PATTERN,
    Reference,
    SecretUnavailable,
)
from muster.host.files import closing, open_directory, open_file

_OTHERS: Final = 0o077

_PROBLEMS: Final = {
    errno.ENOENT: "missing",
    errno.ENOTDIR: "missing",
    errno.EINVAL: "not a regular file",
    errno.ENXIO: "not a regular file",
    errno.ELOOP: "a symbolic link",
    errno.EACCES: "not readable by this user",
    errno.EPERM: "not readable by this user",
}
"""Errors that a second try would meet again."""


class InvalidSecret(MusterError):
    """The name or the value cannot be stored as a secret."""


class SecretStore:
    """The secrets of one installation. Names are those of `Reference.name`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def place(self) -> str:
        """Where they are, for people."""
        return f"in {self.directory}"

    def read(self, name: str) -> str:
        """Return a secret, without one newline at its end.

        Raises `SecretUnavailable` if it is missing, unusable, or open to other users; OSError if
        it cannot be read at the moment.
        """
        reference = Reference("file", name)
        if not _is_name(name):
            raise SecretUnavailable(reference, "is not the name of a secret")
        try:
            with closing(open_directory(self.directory)) as directory:
                _refuse_open_to_others(directory, self.directory, reference)
                with closing(open_file(name, directory)) as file:
                    _refuse_open_to_others(file, self.directory / name, reference)
                    content = os.read(file, SECRET_LIMIT_BYTES + 1)
        except OSError as error:
            if error.errno not in _PROBLEMS:
                raise
            raise SecretUnavailable(
                reference,
                f"cannot be read: {self.directory / name} is {_PROBLEMS[error.errno]}. Set it on "
                f"the machine of the service with: muster secret set {name}",
            ) from error
        return _decode(content, reference)

    def put(self, name: str, text: str) -> None:
        """Store a secret durably, replacing an earlier one; raises `InvalidSecret`, OSError."""
        _check_name(name)
        content = text.encode(errors="surrogateescape")
        try:
            _decode(content, Reference("file", name))
        except SecretUnavailable as error:
            raise InvalidSecret(f"{error}: not stored") from None
        disk = LocalFileSystem()
        ensure_directory(disk, str(self.directory))
        self.directory.chmod(stat.S_IRWXU)
        replace_file(disk, str(self.directory / name), content)

    def names(self) -> list[str]:
        """Return the names of all secrets, sorted."""
        try:
            found = os.listdir(self.directory)  # noqa: PTH208  names, not paths
        except FileNotFoundError:
            return []
        return sorted(filter(_is_name, found))

    def faults(self) -> Iterator[str]:
        """Yield a sentence on each secret that exists but cannot be used; raises OSError."""
        for name in self.names():
            try:
                self.read(name)
            except SecretUnavailable as error:
                yield str(error)

    def remove(self, name: str) -> None:
        """Delete a secret; raises `SecretUnavailable` if it does not exist."""
        _check_name(name)
        for unfinished in self.directory.glob(name + UNFINISHED[1:]):  # of a `put` that was killed
            unfinished.unlink(missing_ok=True)
        try:
            (self.directory / name).unlink()
        except FileNotFoundError:
            reference = Reference("file", name)
            raise SecretUnavailable(reference, f"is not in {self.directory}") from None


def _refuse_open_to_others(descriptor: int, path: Path, reference: Reference) -> None:
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid():
        raise SecretUnavailable(
            reference, f"is not used: {path} belongs to user {found.st_uid}, not to this user"
        )
    if found.st_mode & _OTHERS:
        mode = stat.S_IMODE(found.st_mode)
        raise SecretUnavailable(
            reference,
            f"is not used: {path} has mode {mode:04o}, so other users could access it. Correct it "
            f"with: chmod go= {path}",
        )


def _decode(content: bytes, reference: Reference) -> str:
    if len(content) > SECRET_LIMIT_BYTES:
        raise SecretUnavailable(reference, f"is longer than {SECRET_LIMIT_BYTES} bytes")
    try:
        text = content.decode().removesuffix("\n")
    except UnicodeDecodeError:
        # `from None`: the error contains the value.
        raise SecretUnavailable(reference, "is not UTF-8 text") from None
    if not text:
        raise SecretUnavailable(reference, "is empty")
    if "\0" in text:
        raise SecretUnavailable(reference, "contains a NUL, which a variable cannot")
    return text


def _check_name(name: str) -> None:
    if not _is_name(name):
        raise InvalidSecret(
            f"{name!r} cannot be the name of a secret: use letters, digits, '_', '-' and '.', and "
            "start with a letter or digit"
        )


def _is_name(name: str) -> bool:
    """Return whether it is the name of a secret, and not of a temporary file."""
    is_name = re.fullmatch(SECRET_NAME_PATTERN, name, re.ASCII) is not None
    return is_name and not name.endswith(".tmp")
