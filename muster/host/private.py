"""A directory that no other user can read or replace, whatever the umask.

A user who can write to the data directory, or above it, can put another database there, with a
token of the scope admin in it.
"""

import grp
import os
import pwd
import shlex
import stat
from contextlib import suppress
from pathlib import Path

from muster.contracts.errors import MusterError


class UnusableDirectory(MusterError):
    """The data directory cannot be written, or other users could."""

    @classmethod
    def because_of(cls, directory: Path, error: OSError) -> "UnusableDirectory":
        return cls(
            f"{directory} cannot hold the data ({error.strerror}): make it a directory with room "
            "that this user may write to, or set MUSTER_DATA_DIR"
        )


def make_private(directory: Path) -> None:
    """Create a directory for this user alone, or correct its mode and that of what is in it.

    Raises `UnusableDirectory` if another user owns something there or may write above it.
    """
    umask = os.umask(0o077)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Of the path as it is used and as it is without links: either can lead elsewhere later.
        named, directory = directory.absolute(), directory.resolve()
        for parent in dict.fromkeys((*directory.parents, *named.parents)):
            _refuse_open_parent(parent, directory)
        for path in (named, directory, *directory.iterdir()):
            with suppress(FileNotFoundError):  # a temporary file
                _make_private(path)
    except OSError as error:
        raise UnusableDirectory.because_of(directory, error) from error
    finally:
        os.umask(umask)


def _refuse_open_parent(parent: Path, directory: Path) -> None:
    owner, found = parent.lstat().st_uid, parent.stat()  # of a link, and of what it leads to
    if owner not in {0, os.geteuid()}:
        raise UnusableDirectory(
            f"other users can replace {directory}, as user {owner} owns {parent}: set "
            "MUSTER_DATA_DIR to a directory below one of your own"
        )
    is_shared = found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)
    # In a directory like /tmp, which has the sticky bit, each user can only move their own files.
    if (is_shared or found.st_mode & stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
        raise UnusableDirectory(
            f"other users can replace {directory}, as they may write to {parent}: run "
            f"`chmod go-w {shlex.quote(str(parent))}`, or set MUSTER_DATA_DIR"
        )


def _make_private(path: Path) -> None:
    found = path.lstat()
    if found.st_uid != os.geteuid():
        raise UnusableDirectory(
            f"{path} belongs to user {found.st_uid}: if it should be yours, run "
            f"`sudo chown -R {os.geteuid()} {shlex.quote(str(path))}`; or set MUSTER_DATA_DIR"
        )
    if found.st_mode & 0o077 and not stat.S_ISLNK(found.st_mode):
        path.chmod(found.st_mode & 0o700)


def _is_own_group(group_id: int) -> bool:
    """Return whether this is the group that many systems make for each user, with no other member.

    Found by its name: a directory service need not list who is in a group.
    """
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(group_id)
    except KeyError:  # without an entry
        return False
    return user.pw_gid == group_id and user.pw_name == group.gr_name and not group.gr_mem
