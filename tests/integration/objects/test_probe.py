"""Stores that do not keep what checkpoints rely on."""

import pytest

from muster.contracts.location import S3Location
from muster.objects.client import PART_BYTES, S3Client
from muster.objects.errors import PreconditionFailed, StoreRefused
from muster.objects.probe import check_store
from tests.support.faulty_store import FaultyStore, Rewrite, as_ceph

Headers = dict[str, str]


def overwrites(_operation: str, headers: Headers) -> None:
    headers.pop("If-None-Match", None)


def lets_racers_win(operation: str, headers: Headers) -> None:
    if operation == "PUT race":
        headers.pop("If-None-Match", None)


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


@pytest.mark.parametrize(("rewrite", "times"), [(loses_metadata, 1), (never_swaps, 2)])
def test_a_store_is_refused_for_one_broken_answer(
    rewrite: Rewrite, times: int, faulty_store: FaultyStore, place: S3Location
) -> None:
    left = iter(range(times))

    def at_first(operation: str, headers: Headers) -> None:
        before = dict(headers)
        rewrite(operation, headers)
        if headers != before and next(left, None) is None:
            headers.update(before)

    faulty_store.rewrite = at_first
    check_store(S3Client(faulty_store.access), place)
    assert next(left, None) is None


def test_ceph_is_accepted_and_keeps_long_objects(
    faulty_store: FaultyStore, place: S3Location
) -> None:
    faulty_store.rewrite = as_ceph
    client = S3Client(faulty_store.access)
    check_store(client, place)
    long = bytes(PART_BYTES + 1)
    stored = client.put_if_absent(place / "long", [memoryview(long)])
    with pytest.raises(PreconditionFailed):
        client.put_if_absent(place / "long", [memoryview(long[1:])])
    assert client.head(place / "long") == stored


def test_a_bucket_is_tried_once(faulty_store: FaultyStore, place: S3Location) -> None:
    client = S3Client(faulty_store.access)
    check_store(client, place)
    asked = len(faulty_store.operations)
    check_store(client, place / "other")
    assert len(faulty_store.operations) == asked
