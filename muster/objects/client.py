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
from functools import cache
from itertools import chain
from typing import Any, Final, NamedTuple, TypeVar

from xxhash import xxh3_64

from muster.contracts.location import S3Location
from muster.contracts.settings.services import S3Settings
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

RETRY_SECONDS: Final = 75.0  # a store may be away for a minute
BRIEF_RETRY_SECONDS: Final = 3.0  # a user waits for the answer
PAUSE_SECONDS: Final = 0.1  # doubled up to the longest, less up to half of it at random
LONGEST_PAUSE_SECONDS: Final = 5.0

HASH: Final = "xxh3"  # metadata that says what we wrote: ETags differ between stores

_REQUIRED_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "get_object": ("ContentLength", "ETag"),
    "head_object": ("ContentLength", "ETag"),
    "put_object": ("ETag",),
    "create_multipart_upload": ("UploadId",),
    "upload_part": ("ETag",),
    "complete_multipart_upload": ("Key",),  # some stores leave out the ETag
    "list_objects_v2": ("IsTruncated",),
    "list_multipart_uploads": ("IsTruncated",),
}
"""What a whole answer has. http.client takes the end of a connection for the end of the headers,
and botocore an empty body for an empty result."""

_MARKERS: Final = "ContinuationToken", "KeyMarker", "UploadIdMarker"
_URL: Final = re.compile(r"https?://[^\s/@?#]+/?")
_KEY: Final = re.compile(r"[!-~]+")

T = TypeVar("T")


class Stored(NamedTuple):
    """An object; its name is the part below the location that was asked for."""

    name: str
    size_bytes: int
    etag: str
    xxh3: str = ""  # what `put_if_absent` noted; listings do not have it


class S3Client:
    """Objects by location. For any number of threads.

    Methods raise `StoreRefused`, `StoreUnavailable` (after `retry_seconds`), and what they say.
    """

    retry_seconds: float = RETRY_SECONDS
    """How long failed requests are repeated; the API and commands shorten it for their process."""

    def __init__(self, settings: S3Settings, *, retry_seconds: float | None = None) -> None:
        """Connect to nothing yet. Raises `StoreRefused` for unusable settings."""
        if settings.endpoint is not None and not _URL.fullmatch(settings.endpoint):
            raise StoreRefused("S3_ENDPOINT is not a URL such as http://127.0.0.1:9000")
        keys = {"S3_ACCESS_KEY": settings.access_key, "S3_SECRET_KEY": settings.secret_key}
        for name, key in keys.items():  # boto3 would repeat it in an error
            if key is not None and not _KEY.fullmatch(key):
                raise StoreRefused(f"{name} is empty, or has a character that no key has")
        if (settings.access_key is None) != (settings.secret_key is None):
            raise StoreRefused("S3_ACCESS_KEY and S3_SECRET_KEY go together: set both, or none")
        try:
            import boto3  # noqa: PLC0415  see the module's docstring
            from botocore.config import Config  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise StoreRefused(f"s3:// needs boto3: {install_command('s3')}") from error
        self.endpoint: Final = settings.endpoint or "AWS"
        self.probed: Final = set[str]()  # buckets that `muster.objects.probe` has accepted
        self.puts_whole = False  # set by the probe where uploads in parts ignore conditions
        self._is_bare: bool | None = None  # how If-Match spells ETags; None until one has matched
        if retry_seconds is not None:
            self.retry_seconds = retry_seconds
        # Some stores refuse the checksums that boto3 adds since 1.36.
        checksums = "when_required" if settings.endpoint else "when_supported"
        with store_errors(self.endpoint, S3Location("")):
            self._s3: Final = boto3.session.Session().client(
                "s3",
                endpoint_url=settings.endpoint,
                aws_access_key_id=settings.access_key,
                aws_secret_access_key=settings.secret_key,
                config=Config(
                    connect_timeout=5,
                    read_timeout=min(30, 5 + self.retry_seconds),
                    max_pool_connections=2 * THREADS,
                    retries={"total_max_attempts": 1, "mode": "standard"},
                    s3={"addressing_style": "path"},
                    request_checksum_calculation=checksums,
                    response_checksum_validation=checksums,
                ),
            )

    def get(
        self,
        location: S3Location,
        receive: Callable[[Stored, Iterator[bytes]], T],
        etag: str | None = None,
    ) -> T:
        """Return what `receive` makes of an object; with `etag`, only of that version of it.

        It is given the content in pieces, and again from the start after a failure. Raises
        `ObjectMissing`, and `PreconditionFailed` if it is another version.
        """
        condition = _condition(etag) if etag else {}

        def attempt() -> T:
            request = {"Bucket": location.bucket, "Key": location.prefix, **condition}
            answer = self._ask("get_object", location, request)
            stored = Stored(location.name, answer["ContentLength"], answer["ETag"])
            with closing(answer["Body"]) as body:
                pieces = body.iter_chunks(READ_BYTES)  # raises if it is cut short
                first = next(
                    pieces, b""
                )  # raises if the size was cut short: nothing follows it then
                return receive(stored, chain((first,), pieces))

        return self._retry(location, attempt)

    def read(self, location: S3Location, limit_bytes: int) -> tuple[bytearray, str]:
        """Return the content of an object, and its ETag.

        Raises as `get`, and `PreconditionFailed` if it is longer.
        """

        def receive(stored: Stored, pieces: Iterator[bytes]) -> tuple[bytearray, str]:
            if stored.size_bytes > limit_bytes:
                raise PreconditionFailed(f"{location} has {stored.size_bytes} bytes: too many")
            content, end = bytearray(stored.size_bytes), 0
            for piece in pieces:
                start, end = end, end + len(piece)
                content[start:end] = piece
            return content, stored.etag

        return self.get(location, receive)

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
        with suppress(PreconditionFailed, ObjectMissing):  # NoSuchUpload: ours is complete
            if size_bytes > PART_BYTES and not self.puts_whole:
                self.upload(location, buffers, size_bytes, xxh3)
            else:
                whole = {"Body": b"".join(buffers), "Metadata": {HASH: xxh3}}
                etag = self._call("put_object", location, whole, _condition())["ETag"]
        if etag:
            return Stored(location.name, size_bytes, etag, xxh3)
        # Some stores do not answer it after an upload; or the object exists.
        for _ in range(2):  # an answer that is cut short may end within the size or the hash
            found = self.head(location)
            if (found.size_bytes, found.xxh3) == (size_bytes, xxh3):
                return found
        raise PreconditionFailed(f"{location} exists with other bytes")

    def compare_and_swap(self, location: S3Location, content: bytes, etag: str | None) -> str:
        """Replace the version `etag` of an object (None: create it), and return the new ETag.

        `content` must be unique: it tells whether a write without an answer took place. Raises
        `PreconditionFailed` if there is another version, or `ObjectMissing`.
        """
        spelled, other = etag, etag and etag.strip('"')
        if self._is_bare:
            spelled, other = other, spelled
        try:
            now = self._swap(location, content, spelled)
        except PreconditionFailed:
            # Ceph matches only an ETag without its quotes. A store that has matched one with them
            # is not asked this way: it might ignore a condition that it cannot read.
            if etag is None or self._is_bare is False or self.head(location).etag != etag:
                raise
            spelled = other
            now = self._swap(location, content, spelled)
        if etag is not None:
            self._is_bare = spelled != etag
        return now

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

    def upload(
        self, location: S3Location, buffers: Sequence[memoryview], size_bytes: int, xxh3: str
    ) -> None:
        """Create an object by parts. Raises `PreconditionFailed`, unless the store ignores that."""
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
            self._call("complete_multipart_upload", location, whole, _condition())
        except BaseException as error:
            if not isinstance(error, StoreUnavailable):  # an abort would fail too
                with suppress(ObjectStoreError):
                    self.abort(location, upload_id)
            raise

    def _swap(self, location: S3Location, content: bytes, if_match: str | None) -> str:
        try:
            body, condition = {"Body": content}, _condition(if_match)
            return str(self._call("put_object", location, body, condition)["ETag"])
        except (PreconditionFailed, ObjectMissing):
            with suppress(PreconditionFailed, ObjectMissing):
                found, now = self.read(location, len(content))
                if found == content:
                    return now
            raise

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
        return self._retry(location, lambda: self._ask(operation, location, request))

    def _ask(
        self, operation: str, location: S3Location, request: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Send a request once; an answer that was cut short is no answer."""
        truncated = f"{self.endpoint} cut its answer for {location} short: try again later"
        try:
            answer: dict[str, Any] = getattr(self._s3, operation)(**request)
        except ValueError as error:  # botocore could not parse a truncated number or date
            raise StoreUnavailable(truncated) from error
        etag = answer.get("ETag", "none")
        is_whole = all(name in answer for name in _REQUIRED_FIELDS.get(operation, ()))
        if not is_whole or not etag or etag.count('"') == 1:
            raise StoreUnavailable(truncated)
        return answer

    def _retry(self, location: S3Location, send: Callable[[], T]) -> T:
        """Send a request, and again as long as the store fails."""
        until = time.monotonic() + self.retry_seconds
        pause_seconds = PAUSE_SECONDS
        while True:
            try:
                with store_errors(self.endpoint, location):
                    return send()
            except StoreUnavailable:
                if time.monotonic() + pause_seconds > until:
                    raise
            time.sleep(pause_seconds * random.uniform(0.5, 1))  # noqa: S311  spreads the retries
            pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)


def _condition(etag: str | None = None) -> dict[str, str]:
    """Return the condition for the version `etag` of an object, or for none."""
    return {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}


def _below(location: S3Location, key: str) -> str:
    return key.removeprefix((location / "").prefix)


def default_client() -> S3Client:
    """Return the client of the store that the environment of this process describes."""
    return _client(S3Settings.read(os.environ))


_client: Final = cache(S3Client)
