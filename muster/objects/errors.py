"""The errors of object stores. None of them holds a key.

ObjectStoreError
├── StoreRefused          wrong or expired key, missing bucket, untrusted certificate, a promise
│                         that the store does not keep: a retry would not help
├── StoreUnavailable      no answer or a broken one, again and again: a write may have taken place;
│                         or no room
├── ObjectMissing         there is no object or upload of that name
└── PreconditionFailed    the object exists, has changed or is too long: another writer was first
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from muster.contracts.errors import MusterError
from muster.contracts.location import S3Location

_TRANSIENT: Final = frozenset(
    {200, 408, 409, 429, 500, 502, 503, 504}
)  # 200: also CompleteMultipartUpload
# "400": the body, with the code, was cut off.
_TRANSIENT_CODES: Final = frozenset({"RequestTimeout", "BadDigest", "IncompleteBody", "400"})

_EXPIRED: Final = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
_NO_ROOM: Final = re.compile("quota|storagefull|insufficientstorage", re.IGNORECASE)
"""Of Ceph (403), MinIO (400 and 507) and Swift (413)."""

_SECRET: Final = re.compile(r"\S{16}")
"""A server may repeat a key in its sentence."""


class ObjectStoreError(MusterError):
    """An object store did not do what it was asked for."""


class StoreRefused(ObjectStoreError):
    """The store cannot be used as it is configured."""


class StoreUnavailable(ObjectStoreError):
    """The store did not answer, or its answer was broken."""


class ObjectMissing(ObjectStoreError):
    """There is no such object."""


class PreconditionFailed(ObjectStoreError):
    """The object is not in the state that the request requires."""


@contextmanager
def store_errors(endpoint: str, location: S3Location) -> Iterator[None]:
    """Turn botocore's errors into these; not chained, as servers may repeat what they got."""
    from botocore import exceptions, parsers  # noqa: PLC0415  imported with boto3, which is slow

    broken = (
        exceptions.HTTPClientError,
        exceptions.ConnectionError,
        exceptions.IncompleteReadError,
        parsers.ResponseParserError,
    )
    try:
        yield
    except exceptions.ClientError as error:
        raise _answered(endpoint, location, error.response) from None
    except broken as error:
        if "CERTIFICATE" in str(error):
            raise StoreRefused(
                f"the certificate of {endpoint} is not trusted: name the file of its authority in "
                "AWS_CA_BUNDLE, or correct S3_ENDPOINT"
            ) from None
        fix = "check that it runs and that S3_ENDPOINT names it, then try again"
        if isinstance(error, exceptions.SSLError):
            fix = "try S3_ENDPOINT with http:// in place of https://"
        kind = type(error).__name__
        raise StoreUnavailable(
            f"{endpoint} does not answer for {location} ({kind}): {fix}"
        ) from None
    except exceptions.BotoCoreError as error:
        raise StoreRefused(
            f"{location} cannot be used: {error}. Check S3_ENDPOINT, S3_ACCESS_KEY and "
            "S3_SECRET_KEY, or the profile of AWS's own tools"
        ) from None


def _answered(endpoint: str, location: S3Location, answer: dict[str, Any]) -> ObjectStoreError:
    code = str(answer["Error"].get("Code"))[:64]
    status = answer["ResponseMetadata"]["HTTPStatusCode"]
    what = f"{code}, status {status}"
    if code == "NoSuchBucket":
        return StoreRefused(
            f"{endpoint} has no bucket {location.bucket!r}: create it, or correct the location"
        )
    sentence = str(answer["Error"].get("Message", "")).strip(" .")[:200]
    said = what if not sentence or _SECRET.search(sentence) else f"{what}: {sentence}"
    if code in _EXPIRED:
        fix = "renew them, then start the services again"
        return StoreRefused(f"the credentials for {endpoint} have expired ({said}): {fix}")
    if status == 507 or _NO_ROOM.search(code):  # noqa: PLR2004
        fix = "make room there, or raise the quota"
        return StoreUnavailable(f"{endpoint} has no room for {location} ({said}): {fix}")
    if status in {401, 403}:
        return StoreRefused(
            f"{endpoint} refuses access to {location} ({what}): check S3_ACCESS_KEY, S3_SECRET_KEY "
            "and what they permit there, and the clock of this machine"
        )
    if status == 404:  # noqa: PLR2004
        return ObjectMissing(f"{location} does not exist")
    if status == 412:  # noqa: PLR2004
        return PreconditionFailed(f"{location} exists or has changed: another writer was first")
    if status in _TRANSIENT or code in _TRANSIENT_CODES:
        return StoreUnavailable(f"{endpoint} fails for {location} ({what}): try again later")
    return StoreRefused(
        f"{endpoint} refuses a request for {location} ({what}): check S3_ENDPOINT, and that an "
        "S3-compatible store answers there"
    )
