"""Move a job's files aside when its id is used by another job.

The next job of that id starts counting at zero. With the old files in place, its first agent would
take the old agents' sockets for successors, and old exit records for its own.
"""

from muster.checkpoints.local import LocalFileSystem, replace_file
from muster.contracts.job.status import JobUid
from muster.contracts.settings.paths import JobFiles


def archived_files(files: JobFiles, uid: JobUid) -> JobFiles:
    """Return where the files of the job with this uid are once they are archived.

    The name contains a dot, which no job id does.
    """
    return JobFiles(files.root.with_name(f"{files.root.name}.{uid}"))


def archive_files(files: JobFiles, uid: JobUid) -> JobFiles:
    """Move the files of the job with this uid aside, and return where they are.

    Files of another job stay. May be repeated after a call that was cut short. Raises OSError.
    """
    archived = archived_files(files, uid)
    if files.root.is_dir() and _owner_of(files) in {None, uid}:
        files.root.rename(archived.root)
    return archived


def claim_directory(files: JobFiles, uid: JobUid) -> None:
    """Create a job's directory with this uid as its owner; archive another job's files there.

    Those exist if the database was replaced, for example by an older copy. Raises OSError.
    """
    owner = _owner_of(files)
    if owner == uid:
        return
    if owner is not None:
        archive_files(files, owner)
    files.root.mkdir(parents=True, exist_ok=True)
    replace_file(LocalFileSystem(), str(files.owner), uid.encode())


def _owner_of(files: JobFiles) -> JobUid | None:
    try:
        return JobUid(files.owner.read_text())
    except FileNotFoundError:
        return None
