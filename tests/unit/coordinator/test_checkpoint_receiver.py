"""What a host may ask for that sends its checkpoints."""

from pathlib import Path

import pytest

from coordinator.agents.checkpoint_receiver import JobDirectories
from muster.contracts.messages.storage import StoreCall, StoreMethod

JOB = JobDirectories(own=Path("/runs/job"), inherited=Path("/runs/earlier"))


@pytest.mark.parametrize(
    ("location", "method", "file", "may"),
    [
        ("/runs/job", "commit", "", True),
        ("/runs/job/worker_3", "commit", "", True),
        ("/runs/job/worker_3", "read", "manifest.json", True),
        ("/runs/earlier/worker_3", "read", "state.safetensors", True),
        ("/runs/earlier", "by_trust", "", True),
        ("/runs/earlier", "claim", "", False),
        ("/runs/earlier/worker_3", "remove", "", False),
        ("/runs/other", "latest", "", False),
        ("/runs", "names", "", False),
        ("/runs/job/../other", "names", "", False),
        ("/runs/job/worker_3/worker_3", "commit", "", False),
        ("/runs/job/below", "commit", "", False),
        ("job", "commit", "", False),
        ("/runs/job", "read", "../../secret", False),
    ],
)
def test_a_host_uses_the_places_of_its_job(
    location: str, method: StoreMethod, file: str, *, may: bool
) -> None:
    assert JOB.may(StoreCall(location=location, method=method, file=file)) is may
