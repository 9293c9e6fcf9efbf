"""An exit code for every error and every end of a job."""

import pytest

from cli import entrance, exit_codes
from cli.chaos import FaultRefused, NoSuchRank, NothingRuns
from cli.exit_codes import ExitCode, code_of_end, code_of_error
from cli.held import WhoseUnsaid
from cli.preferences import InvalidPreferences
from muster.client.errors import (
    Ambiguous,
    Busy,
    ClientError,
    NoCertificates,
    NotMuster,
    Problem,
    Unconfirmed,
    Unreachable,
    Unsendable,
    WaitTimedOut,
    refusal,
)
from muster.contracts.errors import (
    BegunOtherwise,
    FieldProblem,
    InvalidEnvironment,
    InvalidSpec,
    MusterError,
)
from muster.contracts.job import TERMINAL
from muster.contracts.secrets import Reference, SecretUnavailable


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Unreachable("http://api"), ExitCode.UNREACHABLE),
        (NotMuster("http://api", 200), ExitCode.UNREACHABLE),
        (Ambiguous("a", ["a1", "a2"]), ExitCode.USAGE),
        (WaitTimedOut("a", "RUNNING", 1.0), ExitCode.TIMED_OUT),
        (ClientError("what else there is"), ExitCode.FAILED),
        (InvalidSpec([FieldProblem("job_id", "is no id")]), ExitCode.USAGE),
        (InvalidEnvironment("MUSTER_PORT", "x", "a number"), ExitCode.USAGE),
        (BegunOtherwise("a", ["command"]), ExitCode.CONFLICT),
        (MusterError("ours"), ExitCode.FAILED),
        (NoCertificates("no PEM"), ExitCode.USAGE),
        (Unsendable("no token is like that"), ExitCode.USAGE),
        (WhoseUnsaid("whose?"), ExitCode.USAGE),
        (NoSuchRank("it has rank 0 only"), ExitCode.USAGE),
        (FaultRefused("not certain"), ExitCode.FAILED),
        (NothingRuns("it is over"), ExitCode.CONFLICT),
        (InvalidPreferences("no TOML"), ExitCode.USAGE),
        (SecretUnavailable(Reference("file", "a"), "is not there"), ExitCode.NOT_FOUND),
    ],
)
def test_an_error_has_its_code(error: MusterError, code: ExitCode) -> None:
    assert code_of_error(error) is code


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (401, ExitCode.NOT_ALLOWED),
        (403, ExitCode.NOT_ALLOWED),
        (404, ExitCode.NOT_FOUND),
        (409, ExitCode.CONFLICT),
        (412, ExitCode.CONFLICT),
        (422, ExitCode.USAGE),
        (429, ExitCode.FAILED),
        (500, ExitCode.FAILED),
        (503, ExitCode.FAILED),
    ],
)
def test_a_refusal_has_the_code_of_its_status(status: int, code: ExitCode) -> None:
    assert code_of_error(refusal(Problem(status=status, detail="Not so."))) is code


def test_an_order_that_nobody_confirms_has_the_code_of_why_that_is() -> None:
    busy = refusal(Problem(status=503, detail="The database is away."))
    assert isinstance(busy, Busy)
    assert code_of_error(Unconfirmed(busy)) is ExitCode.FAILED
    assert code_of_error(Unconfirmed(Unreachable("http://api"))) is ExitCode.UNREACHABLE


def test_every_end_of_a_job_has_a_code_of_its_own() -> None:
    codes = [code_of_end(status) for status in TERMINAL]
    assert len(set(codes)) == len(TERMINAL)


def test_ctrl_c_has_the_same_code_before_anything_is_imported() -> None:
    assert entrance.INTERRUPTED == ExitCode.INTERRUPTED


def test_every_code_is_explained() -> None:
    explained = {line.split()[0] for line in (exit_codes.__doc__ or "").splitlines() if line}
    assert {str(code.value) for code in ExitCode} <= explained
