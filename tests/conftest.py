"""What several suites share."""

import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from muster.contracts.location import S3Location
from muster.objects.client import S3Client
from tests.support.faulty_store import FaultyStore, faulty
from tests.support.s3_server import new_bucket, shared_store

RETRY_SECONDS = 30.0

SHOWN_CHARACTERS = 3000
"""Of the reason of a failure: the events of a job come first."""

# No test asserts on time: a busy machine may take seconds for what takes milliseconds.
settings.register_profile("muster", deadline=None)
settings.load_profile("muster")

# A shell starts what it runs in the background with SIGINT ignored, which processes inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print each failure at once: a run that is cut prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = " ".join((crash.message if crash else report.longreprtext).split())
        sys.__stderr__.write(
            f"\nFAILED {report.nodeid} ({report.when}): {reason[:SHOWN_CHARACTERS]}\n"
        )


@pytest.fixture(scope="session")
def bucket() -> S3Location:
    return new_bucket(shared_store())


@pytest.fixture
def faulty_store() -> Iterator[FaultyStore]:
    with faulty(shared_store()) as store:
        yield store


@pytest.fixture
def s3(faulty_store: FaultyStore) -> S3Client:
    return S3Client(faulty_store.access, retry_seconds=RETRY_SECONDS)


@pytest.fixture
def place(bucket: S3Location, request: pytest.FixtureRequest) -> S3Location:
    """A prefix of the test's own."""
    return bucket / str(hash(request.node.nodeid))
