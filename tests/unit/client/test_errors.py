"""The errors of the client: their tree, their documentation, and the advice they give."""

import re
import socket
from pathlib import Path

import httpx
import pytest

from muster import Client, client
from muster.client import errors
from muster.client.errors import ClientError, Unreachable, advice_for, refusal
from muster.contracts.views.service import ProblemView

KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, ClientError)
}

DOCUMENTATION = Path(__file__).parents[3] / "docs" / "python-client.md"


def test_the_drawn_tree_is_the_class_tree() -> None:
    above = [ClientError.__name__]
    drawn = {}
    for branch, name in re.findall(r"^([│├└─ ]+)(\w+)", errors.__doc__ or "", re.MULTILINE):
        depth = len(branch) // 4
        above[depth:] = [name]
        drawn[name] = above[depth - 1]
    assert drawn == {
        name: kind.__base__.__name__ for name, kind in KINDS.items() if kind is not ClientError
    }


@pytest.mark.parametrize("name", KINDS)
def test_every_error_is_exported_and_documented(name: str) -> None:
    assert getattr(client, name) is KINDS[name]
    assert f"`{name}`" in DOCUMENTATION.read_text()


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("http://127.0.0.1:8000", "start it with `muster up -d`"),
        ("http://unknown.invalid", "its host name has no address"),
        ("http://192.0.2.1:8000", "check that it is up"),
    ],
)
def test_advice_depends_on_the_address(url: str, advice: str) -> None:
    def unanswered(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no connection") from (
            socket.gaierror(-2, "Name or service not known")
            if request.url.host.endswith(".invalid")
            else ConnectionRefusedError()
        )

    asked = Client(url, retry_seconds=0, transport=httpx.MockTransport(unanswered))
    with pytest.raises(Unreachable, match=re.escape(f"no answer from {url}: {advice}")):
        asked.job("a")


@pytest.mark.parametrize(
    ("kind", "instance", "advice"),
    [
        ("job-not-found", "/jobs/gone", "there is no job gone: muster ps lists them"),
        ("job-not-over", "/jobs/lg", "(muster stop lg)"),
        ("job-not-over", "/api/v1/jobs/lg", "lg is not over: stop it first (muster stop lg)"),
        ("never-pauses", "/jobs/lg/pause", "--set resume_from=lg"),
        ("job-exists", "/jobs", "muster rm"),
        ("no-token", "/jobs", "export MUSTER_TOKEN=mst_…"),
        ("token-required", "/tokens", "MUSTER_REQUIRE_TOKEN=0 muster up -d; muster token create"),
        ("token-not-found", "/tokens/a%20b", "there is no token a b, "),
        ("token-not-found", "/muster/api/v1/tokens/jobs", "there is no token jobs, "),
        ("worker-not-found", "/jobs/lg/workers/7", "muster workers lg lists them"),
    ],
)
def test_a_refusal_names_the_next_command(kind: str, instance: str, advice: str) -> None:
    problem = ProblemView(
        status=409, detail="POST this.", type=f"/problems/{kind}", instance=instance
    )
    error = refusal(problem)
    assert advice in str(error)
    assert error.detail == "POST this."


def test_other_refusals_keep_the_documents_sentence() -> None:
    assert advice_for("/problems/full", "/jobs") is None
    assert advice_for("/problems/job-not-found", "") is None
    assert str(refusal(ProblemView(status=409, detail="No room."))) == "No room."
