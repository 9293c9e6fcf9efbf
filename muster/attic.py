"""Where the files of a job go whose id is free for another one.

The next job of that id begins to count where this one began. Its first agent would find the sockets
of later ones and think itself succeeded, and how ranks ended would be believed of its own.
"""

from muster.contracts.job import JobUid
from muster.contracts.layout import JobFiles


def set_aside(files: JobFiles, uid: JobUid) -> None:
    """Keep a job's files, under a name that no job can have: no id holds a dot.

    Nothing happens if they are not there, as after a call that was cut short. Raises `OSError`.
    """
    if files.root.is_dir():
        files.root.rename(files.root.with_name(f"{files.root.name}.{uid}"))
