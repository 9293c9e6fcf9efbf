"""What to do next, in the words of whoever asks: no requests for people."""

import pytest

from muster.client.errors import Problem, refusal
from muster.client.ways_on import way_on


@pytest.mark.parametrize(
    ("kind", "instance", "said"),
    [
        ("job-not-found", "/jobs/gone", "there is no job gone: muster ps lists them"),
        ("job-not-over", "/jobs/lg", "(muster stop lg)"),
        ("job-not-over", "/api/v1/jobs/lg", "lg is not over: stop it first (muster stop lg)"),
        ("never-pauses", "/jobs/lg/pause", "--set resume_from=lg"),
        ("job-exists", "/jobs", "muster rm"),
        ("no-token", "/jobs", "export MUSTER_TOKEN=mst_…"),
        (
            "token-required",
            "/tokens",
            "MUSTER_REQUIRE_TOKEN=0 muster up -d; muster token create",
        ),
        ("token-not-found", "/tokens/a%20b", "there is no token a b, "),
        ("token-not-found", "/muster/api/v1/tokens/jobs", "there is no token jobs, "),
        ("worker-not-found", "/jobs/lg/workers/7", "muster workers lg lists them"),
    ],
)
def test_a_refusal_names_the_next_command(kind: str, instance: str, said: str) -> None:
    problem = Problem(status=409, detail="POST this.", type=f"/problems/{kind}", instance=instance)
    error = refusal(problem)
    assert said in str(error)
    assert error.detail == "POST this."


def test_any_other_refusal_says_what_its_document_says() -> None:
    assert way_on("/problems/full", "/jobs") is None
    assert way_on("/problems/job-not-found", "") is None  # found out by looking, not by asking
    assert str(refusal(Problem(status=409, detail="No room."))) == "No room."
