"""Where the files of a job go whose id is free for another one.

The next job of that id begins to count where this one began. Its first agent would find the sockets
of later ones and think itself succeeded, and how ranks ended would be believed of its own.
"""

from muster.checkpoints.durable import replace_file
from muster.checkpoints.filesystem import LocalFileSystem
from muster.contracts.job import JobUid
from muster.contracts.layout import JobFiles


def aside_of(files: JobFiles, uid: JobUid) -> JobFiles:
    """Return where the files of the job of this uid are once they are set aside."""
    return JobFiles(files.root.with_name(f"{files.root.name}.{uid}"))


def set_aside(files: JobFiles, uid: JobUid) -> JobFiles:
    """Keep a job's files, and return where: under a name that no job can have, as no id has a dot.

    Those of a job of another uid stay where they are. Nothing happens if there are none, as after a
    call that was cut short. Raises `OSError`.
    """
    aside = aside_of(files, uid)
    if files.root.is_dir() and _owner_of(files) in {None, uid}:
        files.root.rename(aside.root)
    return aside


def claim(files: JobFiles, uid: JobUid) -> None:
    """Make a job's directory its own; what a job of another uid has left in it is set aside.

    Such a one is left by a database that is gone: that of another day, or of a copy from before.
    Raises `OSError`.
    """
    owner = _owner_of(files)
    if owner == uid:
        return
    if owner is not None:
        set_aside(files, owner)
    files.root.mkdir(parents=True, exist_ok=True)
    replace_file(LocalFileSystem(), str(files.owner), uid.encode())


def _owner_of(files: JobFiles) -> JobUid | None:
    try:
        return JobUid(files.owner.read_text())
    except FileNotFoundError:
        return None
