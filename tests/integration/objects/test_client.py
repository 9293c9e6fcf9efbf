"""The client against a real server, with answers that are lost, late or broken."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from muster.contracts.location import S3Location
from muster.contracts.settings.services import S3Settings
from muster.objects import client
from muster.objects.client import PART_BYTES, S3Client
from muster.objects.errors import (
    ObjectMissing,
    ObjectStoreError,
    PreconditionFailed,
    StoreRefused,
    StoreUnavailable,
    store_errors,
)
from tests.support.certificates import key_of, needs_openssl, own_certificate
from tests.support.faulty_store import FAULTS, FaultyStore, Rewrite, as_ceph
from tests.support.marks import long
from tests.support.s3_server import bare_client, shared_store, store_settings

LONG = bytes(range(256)) * ((PART_BYTES + 1_000_000) // 256)


def views(*contents: bytes) -> list[memoryview]:
    return [memoryview(content) for content in contents]


def failing(fault: str, of: str = "") -> Callable[[str], str | None]:
    """Return a script that fails the first request of each kind."""
    seen = set()

    def script(operation: str) -> str | None:
        is_first = operation not in seen
        seen.add(operation)
        return fault if is_first and operation.startswith(of) else None

    return script


@contextmanager
def untrusted_server(directory: Path) -> Iterator[int]:
    certificate = own_certificate(directory)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key_of(certificate))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with suppress(OSError), listener.accept()[0] as connection:
                context.wrap_socket(connection, server_side=True)

        thread = threading.Thread(target=accept)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def test_only_one_of_two_writers_wins(s3: S3Client, place: S3Location) -> None:
    s3.put_if_absent(place / "new", views(b"one", b"two"))
    with pytest.raises(PreconditionFailed):
        s3.put_if_absent(place / "new", views(b"other"))
    etag = s3.compare_and_swap(place / "head", b"1", None)
    newer = s3.compare_and_swap(place / "head", b"2", etag)
    for outdated in None, etag:
        with pytest.raises(PreconditionFailed):
            s3.compare_and_swap(place / "head", b"3", outdated)
    with pytest.raises((PreconditionFailed, ObjectMissing)):
        s3.compare_and_swap(place / "missing", b"3", etag)
    assert s3.read(place / "head", 9) == (b"2", newer)
    assert s3.read(place / "new", 9)[0] == b"onetwo"


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "412"])
def test_a_write_is_done_once_despite_a_fault(
    fault: str, s3: S3Client, faulty_store: FaultyStore, place: S3Location
) -> None:
    etag = s3.compare_and_swap(place / "head", b"1", None)
    faulty_store.fault = failing(fault)
    s3.put_if_absent(place / "new", views(b"content"))
    assert s3.read(place / "new", 9)[0] == b"content"
    assert s3.compare_and_swap(place / "head", b"2", etag) == s3.read(place / "head", 9)[1]
    s3.delete([place / "new", place / "never"])
    assert [it.name for it in s3.list(place)] == ["head"]


@pytest.mark.parametrize("fault", ["drop before", "drop after", "503", "200", "cut 40"])
def test_a_long_object_is_whole_despite_a_fault(
    fault: str, s3: S3Client, faulty_store: FaultyStore, place: S3Location
) -> None:
    faulty_store.fault = failing(fault)
    stored = s3.put_if_absent(place / "long", views(LONG[:7], b"", LONG[7:]))
    assert s3.head(place / "long") == stored
    content = s3.get(place / "long", lambda _, pieces: b"".join(pieces), stored.etag)
    assert content == LONG
    with pytest.raises(PreconditionFailed):
        s3.put_if_absent(place / "long", views(LONG[1:]))
    if fault not in {"drop after", "cut 40"}:  # the id of an upload may be lost; a claim finds it
        assert [*s3.uploads(place)] == []


@pytest.mark.parametrize("step", [29, long(7)])
def test_an_answer_cut_anywhere_is_asked_for_again(
    s3: S3Client,
    faulty_store: FaultyStore,
    place: S3Location,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
) -> None:
    monkeypatch.setattr(client, "PAUSE_SECONDS", 0.0)
    bare_client(shared_store()).create_multipart_upload(Bucket=place.bucket, Key=place.prefix)
    stored = s3.put_if_absent(place / "whole", views(b"content"))
    etag = s3.compare_and_swap(place / "head", b"0", None)
    uploads = [*s3.uploads(place)]
    for end in range(0, 700, step):
        new, now = place / f"new{end}", b"%d" % (end + 1)
        faulty_store.fault = failing(f"cut {end}")
        etag = s3.compare_and_swap(place / "head", now, etag)
        assert s3.read(place / "head", 9) == (now, etag)
        written = s3.put_if_absent(new, views(b"new"))
        assert s3.put_if_absent(new, views(b"new")) == written
        assert s3.read(place / "whole", 9) == (b"content", stored.etag)
        assert [it.name for it in s3.list(place, new.name)] == [new.name]
        assert [*s3.uploads(place)] == uploads


@pytest.mark.parametrize("store", [as_ceph, lambda _operation, _headers: None])
def test_a_swap_finds_how_the_store_spells_etags(
    store: Rewrite, s3: S3Client, faulty_store: FaultyStore, place: S3Location
) -> None:
    faulty_store.rewrite = store
    first = s3.compare_and_swap(place / "head", b"1", None)
    second = s3.compare_and_swap(place / "head", b"2", first)
    faulty_store.operations.clear()
    third = s3.compare_and_swap(place / "head", b"3", second)
    assert faulty_store.operations == ["PUT head"]
    for either in s3, S3Client(faulty_store.access, retry_seconds=0):
        with pytest.raises(PreconditionFailed):
            either.compare_and_swap(place / "head", b"4", second)
    assert s3.read(place / "head", 9) == (b"3", third)


def test_an_upload_is_aborted_if_the_store_refuses_it(
    s3: S3Client, faulty_store: FaultyStore, place: S3Location
) -> None:
    faulty_store.fault = failing("403", "COMPLETE")
    with pytest.raises(StoreRefused):
        s3.put_if_absent(place / "long", views(LONG))
    assert [*s3.uploads(place)] == []
    assert [*s3.list(place)] == []


def test_another_version_is_not_read(s3: S3Client, place: S3Location) -> None:
    etag = s3.compare_and_swap(place / "head", b"one", None)
    s3.compare_and_swap(place / "head", b"two", etag)
    with pytest.raises(PreconditionFailed):
        s3.get(place / "head", memoryview(bytearray(3)), etag)
    with pytest.raises(PreconditionFailed):
        s3.read(place / "head", 2)
    with pytest.raises(ObjectMissing):
        s3.read(place / "none", 2)


def test_listings_stay_below_their_location(s3: S3Client, place: S3Location) -> None:
    for name in "a", "step_1/x", "step_1/y", "worker_0/x":
        s3.put_if_absent(place / name, views(name.encode()))
    s3.put_if_absent(S3Location(place.bucket, f"{place.prefix}-other"), views(b""))
    assert [it.name for it in s3.list(place, "step_")] == ["step_1/x", "step_1/y"]
    assert [it.size_bytes for it in s3.list(place)] == [1, 8, 8, 10]
    assert [*s3.folders(place)] == ["step_1", "worker_0"]


@pytest.mark.slow
def test_a_listing_has_every_page(s3: S3Client, place: S3Location) -> None:
    names = [f"{number:04d}" for number in range(1_001)]
    without_proxy = S3Client(shared_store())  # half the work for each of so many
    for name in names:
        without_proxy.put_if_absent(place / name, views(b""))
    assert [it.name for it in s3.list(place)] == names


@needs_openssl
def test_errors_say_what_to_do_and_hold_no_key(
    faulty_store: FaultyStore, place: S3Location, tmp_path: Path
) -> None:
    key, secret = "canary-key", "canary-secret"
    answering = store_settings(faulty_store.access.endpoint, key, secret)

    def sentence(access: S3Settings, fault: str | None = None) -> str:
        faulty_store.fault = lambda _operation: fault
        with pytest.raises(ObjectStoreError) as caught:
            S3Client(access, retry_seconds=0).read(place, 1)
        text = str(caught.value).replace(str(place), "s3://b/x").replace(place.bucket, "b")
        assert key not in text
        assert secret not in text
        return f"{type(caught.value).__name__}: {text}".replace(str(access.endpoint), "STORE")

    assert secret not in repr(answering)
    assert key not in repr(answering)
    assert sentence(answering, "403") == (
        "StoreRefused: STORE refuses access to s3://b/x (Injected, status 403): check "
        "S3_ACCESS_KEY, S3_SECRET_KEY and what they permit there, and the clock of this machine"
    )
    assert sentence(answering, "503") == (
        "StoreUnavailable: STORE fails for s3://b/x (Injected, status 503): try again later"
    )
    assert sentence(answering, "400") == (
        "StoreRefused: STORE refuses a request for s3://b/x (Injected, status 400): check "
        "S3_ENDPOINT, and that an S3-compatible store answers there"
    )
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = store_settings(f"http://127.0.0.1:{closed.getsockname()[1]}", key, secret)
    assert sentence(nowhere) == (
        "StoreUnavailable: STORE does not answer for s3://b/x (EndpointConnectionError): check "
        "that it runs and that S3_ENDPOINT names it, then try again"
    )
    assert sentence(store_settings(answering.endpoint.replace("http", "https"), key, secret)) == (
        "StoreUnavailable: STORE does not answer for s3://b/x (SSLError): try S3_ENDPOINT with "
        "http:// in place of https://"
    )
    assert sentence(store_settings(answering.endpoint, key, None)) == (
        "StoreRefused: S3_ACCESS_KEY and S3_SECRET_KEY go together: set both, or none"
    )
    with untrusted_server(tmp_path) as port:
        assert sentence(store_settings(f"https://127.0.0.1:{port}", key, secret)) == (
            "StoreRefused: the certificate of STORE is not trusted: name the file of its authority "
            "in AWS_CA_BUNDLE, or correct S3_ENDPOINT"
        )


@pytest.mark.parametrize(
    ("endpoint", "key", "secret"),
    [
        ("127.0.0.1:9000", "a", "b"),
        ("http://key:canary@127.0.0.1:9000", "a", "b"),
        (None, "canary\n", "b"),
        (None, "a", ""),
        (None, "a", "canary canary"),
    ],
)
def test_unusable_access_is_refused_at_once(endpoint: str | None, key: str, secret: str) -> None:
    with pytest.raises(StoreRefused) as caught:
        S3Client(store_settings(endpoint, key, secret))
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "status", "said", "sentence"),
    [
        ("ExpiredToken", 400, "It has expired.", "have expired (ExpiredToken, status 400: It has"),
        (
            "QuotaExceeded",
            403,
            f"no {'k' * 16}",
            "no room for s3://b/x (QuotaExceeded, status 403)",
        ),
        ("507", 507, "Insufficient", "no room for s3://b/x (507, status 507: Insufficient)"),
    ],
)
def test_an_error_says_what_the_store_said(
    code: str, status: int, said: str, sentence: str
) -> None:
    answer: Any = {
        "Error": {"Code": code, "Message": said},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    kind = StoreRefused if code == "ExpiredToken" else StoreUnavailable
    with pytest.raises(kind) as caught, store_errors("STORE", S3Location("b", "x")):
        raise ClientError(answer, "PutObject")
    assert sentence in str(caught.value)
    assert "S3_" not in str(caught.value), "neither endpoint nor keys are wrong"
