"""Stores that do not keep what checkpoints rely on."""

import pytest

from muster.contracts.location import S3Location
from muster.objects.client import S3Client
from muster.objects.errors import StoreRefused
from muster.objects.probe import check_store
from tests.support.faulty_store import FaultyStore, Rewrite

Headers = dict[str, str]


def overwrites(_operation: str, headers: Headers) -> None:
    headers.pop("If-None-Match", None)


def lets_racers_win(operation: str, headers: Headers) -> None:
    if operation == "PUT race":
        headers.pop("If-None-Match", None)


def wants_no_quotes(_operation: str, headers: Headers) -> None:
    """As some releases of Ceph: an ETag matches only without its quotes."""
    if '"' in headers.get("If-Match", ""):
        headers["If-Match"] = "never"


def always_swaps(_operation: str, headers: Headers) -> None:
    headers.pop("If-Match", None)


def loses_metadata(_operation: str, headers: Headers) -> None:
    headers.pop("x-amz-meta-xxh3", None)


@pytest.mark.parametrize(
    ("rewrite", "lacking"),
    [
        (overwrites, "overwrites an object"),
        (lets_racers_win, "16 win"),
        (wants_no_quotes, "does not replace an object"),
        (always_swaps, "with another ETag"),
        (loses_metadata, "loses the metadata"),
    ],
)
def test_a_store_that_breaks_a_promise_is_refused(
    rewrite: Rewrite,
    lacking: str,
    faulty_store: FaultyStore,
    place: S3Location,
) -> None:
    faulty_store.rewrite = rewrite
    client = S3Client(faulty_store.access)
    for _ in range(2):
        with pytest.raises(StoreRefused, match=lacking):
            check_store(client, place)
    assert [*client.list(place)] == []


def test_a_bucket_is_tried_once(faulty_store: FaultyStore, place: S3Location) -> None:
    client = S3Client(faulty_store.access)
    check_store(client, place)
    asked = len(faulty_store.operations)
    check_store(client, place / "other")
    assert len(faulty_store.operations) == asked
