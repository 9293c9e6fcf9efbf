"""What a command's exit code says. A script may rely on it.

==== ==========================================================
0    done; of `wait` and an attached `submit`: the job completed
1    the job failed, or what was asked for did not come about
2    the command, its environment or the job was described wrongly
3    nobody answers at the API's address, or it is not (or not provably) Muster
4    no token, a wrong one, or one that may not do this
5    there is no such job, checkpoint, token or secret
6    the job's present state forbids it, as one that has begun otherwise
7    the time to wait is over, and the job goes on
8    the job was stopped
130  Ctrl-C, also at a question; or SIGTERM, of what watched a job: that goes on
==== ==========================================================

`muster audit` has its own three: 0 exactly once, 1 not, 2 not known.
"""

from enum import IntEnum
from typing import Final

from cli.misuse import Misuse
from cli.untimely import Untimely
from muster.checkpoints.errors import CheckpointMissing
from muster.client.errors import (
    Ambiguous,
    Conflict,
    Invalid,
    NoCertificates,
    NotAllowed,
    NotFound,
    NotMuster,
    Replaced,
    Unconfirmed,
    Unreachable,
    Unsendable,
    Untrusted,
    WaitTimedOut,
)
from muster.contracts.endings import INTERRUPTED_CODE
from muster.contracts.errors import (
    BegunOtherwise,
    InvalidEnvironment,
    InvalidSpec,
    MusterError,
)
from muster.contracts.job import EXIT_CODES, JobStatus
from muster.contracts.secrets import SecretUnavailable


class ExitCode(IntEnum):
    """Each is explained above."""

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


_OF_ERRORS: Final = (
    (
        (Invalid, Ambiguous, InvalidSpec, InvalidEnvironment, Misuse, NoCertificates, Unsendable),
        ExitCode.USAGE,
    ),
    ((Unreachable, Untrusted, NotMuster), ExitCode.UNREACHABLE),
    (NotAllowed, ExitCode.NOT_ALLOWED),
    ((NotFound, Replaced, CheckpointMissing, SecretUnavailable), ExitCode.NOT_FOUND),
    ((Conflict, BegunOtherwise, Untimely), ExitCode.CONFLICT),
    (WaitTimedOut, ExitCode.TIMED_OUT),
)


def code_of_error(error: MusterError) -> ExitCode:
    """Return the exit code of a command that an error ended."""
    if isinstance(error, Unconfirmed):
        return code_of_error(error.lost)
    return next((code for kinds, code in _OF_ERRORS if isinstance(error, kinds)), ExitCode.FAILED)


def code_of_end(status: str) -> ExitCode:
    """Return the exit code of a command that has seen a job to its end."""
    return ExitCode(EXIT_CODES[JobStatus(status)])
