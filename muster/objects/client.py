"""The client of an S3-compatible store: the only place that uses boto3.

The outcome of a write whose answer is lost is unknown, and botocore's own retry of a conditional
write would meet what the first attempt wrote. So botocore's retries are off. Ours repeat the same
request, and where its condition then fails they read back and compare: the object may be our own.

boto3 takes 0.6 s to import and belongs to an extra: it is imported with the first client.
"""

import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

from xxhash import xxh3_64

from muster.contracts.location import S3Location
from muster.contracts.settings import S3Settings
from muster.host.extras import install_command
from muster.objects.errors import (
    ObjectMissing,
    ObjectStoreError,
    PreconditionFailed,
    StoreRefused,
    StoreUnavailable,
    store_errors,
)

PART_BYTES: Final = 16 << 20  # a longer object is uploaded in parts, one copied by each thread
THREADS: Final = 8
READ_BYTES: Final = 1 << 20  # urllib3 holds a copy of what is read at once

BRIEF_SECONDS: Final = 3.0  # where a user waits for the answer
PATIENCE_SECONDS: Final = 75.0  # how long failures are retried: a store may be away for a minute
PAUSE_SECONDS: Final = 0.1  # doubled up to the longest, less up to half of it at random
LONGEST_PAUSE_SECONDS: Final = 5.0

HASH: Final = "xxh3"  # metadata that says what we wrote: ETags differ between stores

_MARKERS: Final = "ContinuationToken", "KeyMarker", "UploadIdMarker"
_URL: Final = re.compile(r"https?://[^\s/@?#]+/?")
_KEY: Final = re.compile(r"[!-~]+")

T = TypeVar("T")

PATIENCE: Final = ContextVar("PATIENCE", default=PATIENCE_SECONDS)  # of `shared_client`


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """A store, and the keys to it, which are not printed."""

    endpoint: str | None = None  # None is AWS
    access_key: str | None = field(default=None, repr=False)
    """None takes both keys from where AWS's own tools find them."""
    secret_key: str | None = field(default=None, repr=False)
    unfenced: bool = False
    """True accepts a store without conditional writes, where one host runs everything."""

    def __post_init__(self) -> None:
        """Refuse what boto3 would repeat in an error."""
        if self.endpoint is not None and not _URL.fullmatch(self.endpoint):
            raise StoreRefused("S3_ENDPOINT is not a URL such as http://127.0.0.1:9000")
        for name, key in ("S3_ACCESS_KEY", self.access_key), ("S3_SECRET_KEY", self.secret_key):
            if key is not None and not _KEY.fullmatch(key):
                raise StoreRefused(f"{name} is empty, or has a character that no key has")


class Conditions(StrEnum):
    """How a bucket compares ETags in conditional writes; `muster.objects.probe` finds out."""

    QUOTED = "quoted"
    UNQUOTED = "unquoted"
    NONE = "none"  # we look before a write, which is safe for one writer only


class Stored(NamedTuple):
    """An object; its name is the part below the location that was asked for."""

    name: str
    size_bytes: int
    etag: str
    xxh3: str = ""  # what `put_if_absent` noted; listings do not have it


class S3Client:
    """Objects by location. For any number of threads.

    Methods raise `StoreRefused`, `StoreUnavailable` (after `patience_seconds` of retries), and
    what they say.
    """

    def __init__(self, access: StoreAccess, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        try:
            import boto3  # noqa: PLC0415  see the module's docstring
            from botocore.config import Config  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise StoreRefused(f"s3:// needs boto3: {install_command('s3')}") from error
        self.access: Final = access
        self.endpoint: Final = access.endpoint or "AWS"
        self.conditions: Final[dict[str, Conditions]] = {}  # of the buckets that were probed
        self._patience_seconds: Final = patience_seconds
        # Some stores refuse the checksums that boto3 adds since 1.36.
        checksums = "when_required" if access.endpoint else "when_supported"
        with store_errors(self.endpoint, S3Location("")):
            self._s3: Final = boto3.session.Session().client(
                "s3",
                endpoint_url=access.endpoint,
                aws_access_key_id=access.access_key,
                aws_secret_access_key=access.secret_key,
                config=Config(
                    connect_timeout=5,
                    read_timeout=min(30, 5 + patience_seconds),
                    max_pool_connections=2 * THREADS,
                    retries={"total_max_attempts": 1, "mode": "standard"},
                    s3={"addressing_style": "path"},
                    request_checksum_calculation=checksums,
                    response_checksum_validation=checksums,
                ),
            )

    def get(self, location: S3Location, buffer: memoryview, etag: str | None = None) -> Stored:
        """Read an object into the start of `buffer`; with `etag`, only that version of it.

        Raises `ObjectMissing`, and `PreconditionFailed` if it is another version or too long.
        """
        condition = self._condition(location, etag) if etag else {}

        def receive() -> Stored:
            answer = self._s3.get_object(Bucket=location.bucket, Key=location.prefix, **condition)
            size_bytes = answer["ContentLength"]
            with closing(answer["Body"]) as body:
                if size_bytes > len(buffer):
                    raise PreconditionFailed(f"{location} has {size_bytes} bytes: too many")
                filled = 0
                while filled < size_bytes:  # botocore raises if it ends before
                    end = min(filled + READ_BYTES, size_bytes)
                    filled += body.readinto(buffer[filled:end])
            return Stored(location.name, size_bytes, answer["ETag"])

        return self._patiently(location, receive)

    def read(self, location: S3Location, limit_bytes: int) -> tuple[bytearray, str]:
        """Return the content of an object, and its ETag; raises as `get`."""
        content = bytearray(limit_bytes)
        with memoryview(content) as view:
            stored = self.get(location, view)
        del content[stored.size_bytes :]
        return content, stored.etag

    def head(self, location: S3Location) -> Stored:
        """Describe an object; raises `ObjectMissing`."""
        answer = self._call("head_object", location)
        noted = {key.lower(): value for key, value in answer["Metadata"].items()}
        return Stored(location.name, answer["ContentLength"], answer["ETag"], noted.get(HASH, ""))

    def put_if_absent(self, location: S3Location, buffers: Sequence[memoryview]) -> Stored:
        """Create an object, a long one by parts in parallel, without a copy of the whole.

        Raises `PreconditionFailed` if it exists with other bytes.
        """
        digest = xxh3_64()
        for buffer in buffers:
            digest.update(buffer)
        size_bytes, xxh3 = sum(map(len, buffers)), digest.hexdigest()
        etag = ""
        with suppress(PreconditionFailed, ObjectMissing):  # missing: an upload that is completed
            if size_bytes > PART_BYTES:
                self._upload(location, buffers, size_bytes, xxh3)
            else:
                whole = {"Body": b"".join(buffers), "Metadata": {HASH: xxh3}}
                etag = self._call("put_object", location, whole, self._condition(location))["ETag"]
        if not etag:  # some stores do not answer it after an upload; or the object exists
            found = self.head(location)
            if (found.size_bytes, found.xxh3) != (size_bytes, xxh3):
                raise PreconditionFailed(f"{location} exists with other bytes")
            etag = found.etag
        return Stored(location.name, size_bytes, etag, xxh3)

    def compare_and_swap(self, location: S3Location, content: bytes, etag: str | None) -> str:
        """Replace the version `etag` of an object (None: create it), and return the new ETag.

        `content` must be unique: it tells whether a write without an answer took place. Raises
        `PreconditionFailed` if there is another version, or `ObjectMissing`.
        """
        try:
            body, condition = {"Body": content}, self._condition(location, etag)
            return str(self._call("put_object", location, body, condition)["ETag"])
        except (PreconditionFailed, ObjectMissing):
            with suppress(PreconditionFailed, ObjectMissing):
                found, now = self.read(location, len(content))
                if found == content:
                    return now
            raise

    def list(self, location: S3Location, start: str = "") -> Iterator[Stored]:
        """Yield the objects below `location` whose names begin with `start`, page by page."""
        for page in self._pages("list_objects_v2", location / start):
            for each in page.get("Contents", ()):
                yield Stored(_below(location, each["Key"]), each["Size"], each["ETag"])

    def folders(self, location: S3Location) -> Iterator[str]:
        """Yield the first parts of longer names below `location`."""
        for page in self._pages("list_objects_v2", location / "", Delimiter="/"):
            for each in page.get("CommonPrefixes", ()):
                yield _below(location, each["Prefix"]).removesuffix("/")

    def uploads(self, location: S3Location, start: str = "") -> Iterator[tuple[str, str]]:
        """Yield name and id of the unfinished uploads, as `list`."""
        for page in self._pages("list_multipart_uploads", location / start):
            for each in page.get("Uploads", ()):
                yield _below(location, each["Key"]), each["UploadId"]

    def abort(self, location: S3Location, upload_id: str) -> None:
        """Remove an unfinished upload; a missing one is no error."""
        with suppress(ObjectMissing):
            self._call("abort_multipart_upload", location, {"UploadId": upload_id})

    def delete(self, locations: Iterable[S3Location]) -> None:
        """Delete objects in parallel, in no order; missing ones are no error."""
        # One by one: boto3 sends DeleteObjects without the MD5 that many stores demand.
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda each: self._call("delete_object", each), locations))

    def _upload(
        self, location: S3Location, buffers: Sequence[memoryview], size_bytes: int, xxh3: str
    ) -> None:
        noted = {"Metadata": {HASH: xxh3}}
        upload_id = self._call("create_multipart_upload", location, noted)["UploadId"]
        upload = {"UploadId": upload_id}

        def send(start: int) -> dict[str, Any]:
            views, first = [], start
            for buffer in buffers:
                views.append(buffer[max(first, 0) : max(first + PART_BYTES, 0)])
                first -= len(buffer)
            part = {"PartNumber": start // PART_BYTES + 1}
            body = {**upload, **part, "Body": b"".join(views)}
            return {**part, "ETag": self._call("upload_part", location, body)["ETag"]}

        try:
            with ThreadPoolExecutor(THREADS) as pool:
                parts = list(pool.map(send, range(0, size_bytes, PART_BYTES)))
            whole = {**upload, "MultipartUpload": {"Parts": parts}}
            self._call("complete_multipart_upload", location, whole, self._condition(location))
        except BaseException as error:
            if not isinstance(error, StoreUnavailable):  # it would be asked in vain again
                with suppress(ObjectStoreError):
                    self.abort(location, upload_id)
            raise

    def _condition(self, location: S3Location, etag: str | None = None) -> dict[str, str]:
        """Return the condition for the version `etag` of an object, or for none."""
        conditions = self.conditions.get(location.bucket, Conditions.QUOTED)
        if conditions is Conditions.NONE:
            now = None
            with suppress(ObjectMissing):
                now = self.head(location).etag
            if now != etag:
                raise PreconditionFailed(f"{location} exists or has changed")
            return {}
        if etag is None:
            return {"IfNoneMatch": "*"}
        return {"IfMatch": etag.strip('"') if conditions is Conditions.UNQUOTED else etag}

    def _pages(self, operation: str, location: S3Location, **more: str) -> Iterator[dict[str, Any]]:
        while True:
            page = self._call(operation, location, more, key="Prefix")
            yield page
            if not page.get("IsTruncated"):
                return
            more |= {name: page[f"Next{name}"] for name in _MARKERS if f"Next{name}" in page}

    def _call(
        self, operation: str, location: S3Location, *arguments: Mapping[str, Any], key: str = "Key"
    ) -> dict[str, Any]:
        request = {"Bucket": location.bucket, key: location.prefix}
        for each in arguments:
            request |= each
        return self._patiently(location, lambda: getattr(self._s3, operation)(**request))

    def _patiently(self, location: S3Location, send: Callable[[], T]) -> T:
        """Send a request, and again as long as the store fails."""
        until = time.monotonic() + self._patience_seconds
        is_certain, pause_seconds = True, PAUSE_SECONDS
        while True:
            try:
                with store_errors(self.endpoint, location):
                    return send()
            except PreconditionFailed as failed:
                failed.is_certain = is_certain
                raise
            except StoreUnavailable:
                if time.monotonic() + pause_seconds > until:
                    raise
                is_certain = False
            time.sleep(pause_seconds * random.uniform(0.5, 1))  # noqa: S311  spreads the retries
            pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)


def _below(location: S3Location, key: str) -> str:
    return key.removeprefix((location / "").prefix)


def shared_client() -> S3Client:
    """Return the client of the store that the environment of this process describes."""
    found = S3Settings.read(os.environ)
    access = StoreAccess(found.endpoint, found.access_key, found.secret_key, found.unfenced)
    return _client(access, PATIENCE.get())


@cache
def _client(access: StoreAccess, patience_seconds: float) -> S3Client:
    return S3Client(access, patience_seconds=patience_seconds)
