"""Stores that do not keep what checkpoints rely on."""

from dataclasses import replace

import pytest

from muster.contracts.location import S3Location
from muster.objects.client import Conditions, S3Client
from muster.objects.errors import PreconditionFailed, StoreRefused
from muster.objects.probe import check_store
from tests.support.faulty_store import FaultyStore, Rewrite

Headers = dict[str, str]


def overwrites(_operation: str, headers: Headers) -> None:
    headers.pop("If-None-Match", None)


def lets_racers_win(operation: str, headers: Headers) -> None:
    if operation == "PUT race":
        headers.pop("If-None-Match", None)


def wants_no_quotes(_operation: str, headers: Headers) -> None:
    if '"' in headers.get("If-Match", ""):
        headers["If-Match"] = "never"


def never_swaps(_operation: str, headers: Headers) -> None:
    if "If-Match" in headers:
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
        (never_swaps, "does not replace an object"),
        (always_swaps, "with another ETag"),
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
    accepted = S3Client(replace(faulty_store.access, unfenced=True))
    assert check_store(accepted, place) is Conditions.NONE
    etag = accepted.compare_and_swap(place / "head", b"1", None)
    accepted.put_if_absent(place / "new", [memoryview(b"1")])
    with pytest.raises(PreconditionFailed):
        accepted.put_if_absent(place / "new", [memoryview(b"2")])
    accepted.compare_and_swap(place / "head", b"2", etag)
    with pytest.raises(PreconditionFailed):
        accepted.compare_and_swap(place / "head", b"3", etag)


def test_a_store_that_loses_metadata_is_never_accepted(
    faulty_store: FaultyStore, place: S3Location
) -> None:
    faulty_store.rewrite = loses_metadata
    for unfenced in True, False:
        with pytest.raises(StoreRefused, match="loses the metadata"):
            check_store(S3Client(replace(faulty_store.access, unfenced=unfenced)), place)


def test_etags_are_sent_as_the_store_wants_them(
    faulty_store: FaultyStore, place: S3Location
) -> None:
    client = S3Client(faulty_store.access)
    assert check_store(client, place) is Conditions.QUOTED
    asked = len(faulty_store.operations)
    assert check_store(client, place / "other") is Conditions.QUOTED
    assert len(faulty_store.operations) == asked
    faulty_store.rewrite = wants_no_quotes
    other = S3Client(faulty_store.access)
    assert check_store(other, place) is Conditions.UNQUOTED
    etag = other.compare_and_swap(place / "head", b"1", None)
    other.compare_and_swap(place / "head", b"2", etag)
    assert [it.name for it in other.list(place)] == ["head"]
