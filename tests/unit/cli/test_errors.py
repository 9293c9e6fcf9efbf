"""An exit code for every error and every end of a job."""

from typing import cast

import pytest

from cli import errors
from cli.errors import ExitCode, Misuse, WrongState, exit_code_of
from muster.client.errors import (
    Ambiguous,
    Busy,
    ClientError,
    InvalidRequest,
    NoCertificates,
    NotMuster,
    Refused,
    Unconfirmed,
    Unreachable,
    WaitTimedOut,
    refusal,
)
from muster.contracts.errors import (
    FieldProblem,
    InvalidEnvironment,
    InvalidSpec,
    JobDiffers,
    MusterError,
)
from muster.contracts.job.secrets import Reference, SecretUnavailable
from muster.contracts.job.status import EXIT_CODES, TERMINAL
from muster.contracts.location import InvalidLocation
from muster.contracts.views.service import ProblemView


def refused(status: int) -> Refused:
    return refusal(ProblemView(status=status, detail="No."))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Unreachable("http://api"), ExitCode.UNREACHABLE),
        (NotMuster("http://api", 200), ExitCode.UNREACHABLE),
        (Ambiguous("a", ["a1", "a2"]), ExitCode.USAGE),
        (WaitTimedOut("a", "RUNNING", 1.0), ExitCode.TIMED_OUT),
        (ClientError("anything else"), ExitCode.FAILED),
        (InvalidLocation("s3://"), ExitCode.USAGE),
        (InvalidSpec([FieldProblem("job_id", "is not an id")]), ExitCode.USAGE),
        (InvalidEnvironment("MUSTER_PORT", "x", "a number"), ExitCode.USAGE),
        (JobDiffers("a", ["command"]), ExitCode.CONFLICT),
        (MusterError("ours"), ExitCode.FAILED),
        (NoCertificates("no PEM"), ExitCode.USAGE),
        (InvalidRequest("an impossible token"), ExitCode.USAGE),
        (Misuse("wrong words"), ExitCode.USAGE),
        (WrongState("it has ended"), ExitCode.CONFLICT),
        (SecretUnavailable(Reference("file", "a"), "is missing"), ExitCode.NOT_FOUND),
        (PermissionError(13, "Permission denied", "/x"), ExitCode.USAGE),
        (OSError(28, "No space left on device", "/x"), ExitCode.FAILED),
        (refused(401), ExitCode.NOT_ALLOWED),
        (refused(404), ExitCode.NOT_FOUND),
        (refused(409), ExitCode.CONFLICT),
        (refused(422), ExitCode.USAGE),
        (refused(429), ExitCode.FAILED),
        (refused(500), ExitCode.FAILED),
        (Unconfirmed(cast("Busy", refused(503))), ExitCode.FAILED),
        (Unconfirmed(Unreachable("http://api")), ExitCode.UNREACHABLE),
    ],
)
def test_exit_code_of_an_error(error: Exception, code: ExitCode) -> None:
    assert exit_code_of(error) is code


def test_each_end_of_a_job_has_its_own_code() -> None:
    assert len({ExitCode(EXIT_CODES[status]) for status in TERMINAL}) == len(TERMINAL)


def test_every_exit_code_is_documented() -> None:
    documented = {line.split()[0] for line in (errors.__doc__ or "").splitlines() if line}
    assert {str(code.value) for code in ExitCode} <= documented
