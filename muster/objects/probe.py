"""What a store must promise before it is trusted, tried with objects that are removed again.

Several S3-compatible stores accept conditional writes and ignore the condition, or let several of
those that race win. On such a store a replaced writer could still commit.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import Final

from muster.contracts.location import S3Location
from muster.objects.client import S3Client
from muster.objects.errors import ObjectMissing, ObjectStoreError, PreconditionFailed, StoreRefused

WRITERS: Final = 16

NOT_TRIED: Final = "swaps that race, reads through another server of the store, its crash"

_LOSES_METADATA: Final = "it loses the metadata or changes the ETags of objects"
_NEVER_SWAPS: Final = "it does not replace an object with If-Match and the right ETag"

_PROBING: Final = Lock()  # many ranks of one process may begin at once


def check_store(client: S3Client, location: S3Location) -> None:
    """Try the bucket of `location`, once per client.

    Raises `StoreRefused`, naming the promise that the store does not keep; and as the client does.
    """
    with _PROBING:
        if location.bucket in client.probed:
            return
        scratch = location / f".probe-{os.urandom(8).hex()}"
        one, race = scratch / "object", scratch / "race"
        doubtful = {_LOSES_METADATA, _NEVER_SWAPS}  # a broken answer may look like that, once
        try:
            while (lacking := _lacking(client, one, race)) in doubtful:
                doubtful.remove(lacking)
                client.delete([one, race])
        finally:
            with suppress(ObjectStoreError):
                client.delete([one, race])
        if lacking:
            raise StoreRefused(
                f"{client.endpoint} cannot protect checkpoints from replaced writers: {lacking}. "
                "Use another store"
            )
        client.probed.add(location.bucket)


def _lacking(client: S3Client, one: S3Location, race: S3Location) -> str | None:
    """Return what the store does wrong, or None."""
    first = client.put_if_absent(one, [memoryview(b"first")])
    if client.head(one) != first:
        return _LOSES_METADATA
    if _writes(client, one, b"second"):
        return "it overwrites an object in spite of If-None-Match"
    with ThreadPoolExecutor(WRITERS) as pool:
        won = sum(pool.map(lambda writer: _writes(client, race, b"%d" % writer), range(WRITERS)))
    if won > 1:
        return f"of {WRITERS} writers that race to create an object, {won} win"
    try:
        client.compare_and_swap(one, b"swapped", first.etag)
    except (PreconditionFailed, StoreRefused):
        return _NEVER_SWAPS
    with suppress(PreconditionFailed):
        client.compare_and_swap(one, b"swapped again", first.etag)
        return "it replaces an object in spite of If-Match with another ETag"
    try:
        client.upload(one, [memoryview(b"parts")], 5, "")
    except (PreconditionFailed, ObjectMissing) as error:
        client.puts_whole = isinstance(error, ObjectMissing)  # complete, and the answer was lost
    else:
        client.puts_whole = True
    return None


def _writes(client: S3Client, location: S3Location, content: bytes) -> bool:
    try:
        client.put_if_absent(location, [memoryview(content)])
    except PreconditionFailed:
        return False
    return True
