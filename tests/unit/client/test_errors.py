"""Whoever looks for an error finds it: in the tree, in the face, and in the table for people."""

import re
import socket
from pathlib import Path

import httpx
import pytest

from muster import Client, client
from muster.client import errors
from muster.client.errors import ClientError, Unreachable

KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, ClientError)
}

PEOPLE = Path(__file__).parents[3] / "docs" / "python-client.md"


def test_the_tree_that_is_drawn_is_the_tree_there_is() -> None:
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
def test_every_error_can_be_imported_and_is_explained(name: str) -> None:
    assert getattr(client, name) is KINDS[name]
    assert f"`{name}`" in PEOPLE.read_text()


@pytest.mark.parametrize(
    ("url", "way"),
    [
        ("http://127.0.0.1:8000", "start it with `muster up -d`"),
        ("http://nobody.invalid", "its name leads nowhere"),
        ("http://192.0.2.1:8000", "see whether it is up there"),
    ],
)
def test_where_nobody_answers_the_way_on_is_that_of_the_place(url: str, way: str) -> None:
    def unanswered(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no connection") from (
            socket.gaierror(-2, "Name or service not known")
            if request.url.host.endswith(".invalid")
            else ConnectionRefusedError()
        )

    asked = Client(url, retry_seconds=0, transport=httpx.MockTransport(unanswered))
    with pytest.raises(Unreachable, match=re.escape(f"nobody answers at {url}: {way}")):
        asked.job("a")
