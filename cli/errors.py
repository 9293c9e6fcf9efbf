"""Exit codes, and how an error becomes one. Scripts may rely on them.

==== ==============================================================================
0    success; `wait` and an attached `submit`: the job completed
1    the job failed, or the command could not do what it should
2    the command line, the environment or the job description is invalid
3    the API cannot be reached, or it is not (or not provably) Muster
4    the token is missing, invalid, or does not have the scope
5    no such job, checkpoint, token or secret
6    the job's state does not allow it, such as another job that has this id
7    the timeout expired while the job continues
8    the job was stopped
130  interrupted with Ctrl-C; `wait`, `check`, `demo` and an attached `submit` also with SIGTERM
==== ==============================================================================

`muster audit` has three of its own: 0 exactly once, 1 not exactly once, 2 not known.
"""

from enum import IntEnum

from muster.contracts.errors import (
    InvalidDescription,
    InvalidEnvironment,
    InvalidSpec,
    JobDiffers,
    MusterError,
)
from muster.contracts.job.retry import INTERRUPTED_CODE
from muster.contracts.location import InvalidLocation


class ExitCode(IntEnum):
    """What a command's exit code says; the table above explains each."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    NOT_ALLOWED = 4
    NOT_FOUND = 5
    CONFLICT = 6
    TIMED_OUT = 7
    STOPPED = 8
    INTERRUPTED = INTERRUPTED_CODE


class Misuse(MusterError):
    """The command line or a setting is wrong. Nothing was done."""


class WrongState(MusterError):
    """The job's present state does not allow this. Nothing was done."""


def exit_code_of(error: Exception) -> ExitCode:
    """Return the exit code of a command that this error ended."""
    # Imported here because `muster ps --help` needs none of it.
    from muster.checkpoints.errors import CheckpointMissing  # noqa: PLC0415
    from muster.client import errors as of_client  # noqa: PLC0415
    from muster.contracts.job.secrets import SecretUnavailable  # noqa: PLC0415
    from muster.host.private import UnusableDirectory  # noqa: PLC0415
    from muster.mesh.secret import NoSecret  # noqa: PLC0415
    from muster.runtime.secrets import InvalidSecret  # noqa: PLC0415

    if isinstance(error, of_client.Unconfirmed):
        return exit_code_of(error.lost)
    invalid_input = (
        InvalidSecret,
        of_client.Invalid,
        of_client.Ambiguous,
        of_client.InvalidRequest,
        InvalidDescription,
        InvalidLocation,
        InvalidSpec,
    )
    invalid_setting = (InvalidEnvironment, of_client.NoCertificates, UnusableDirectory, NoSecret)
    misuse = (Misuse, UnicodeError, PermissionError)
    wrong_path = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError)
    unreachable = (of_client.Unreachable, of_client.CertificateRejected, of_client.NotMuster)
    missing = (of_client.NotFound, of_client.Replaced, CheckpointMissing, SecretUnavailable)
    groups = (
        (ExitCode.USAGE, (*invalid_input, *invalid_setting, *wrong_path, *misuse)),
        (ExitCode.UNREACHABLE, unreachable),
        (ExitCode.NOT_ALLOWED, (of_client.NotAllowed,)),
        (ExitCode.NOT_FOUND, missing),
        (ExitCode.CONFLICT, (of_client.Conflict, JobDiffers, WrongState)),
        (ExitCode.TIMED_OUT, (of_client.WaitTimedOut,)),
    )
    return next((code for code, kinds in groups if isinstance(error, kinds)), ExitCode.FAILED)
