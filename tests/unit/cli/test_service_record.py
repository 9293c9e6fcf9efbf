"""The lock and the record of `muster up`, and which API a command talks to."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread, Timer

import msgspec
import pytest

from cli import service_record
from cli.service_record import (
    AlreadyUp,
    NoDataDirectory,
    ServiceRecord,
    address_of,
    find_own_services,
    is_locked,
    is_serving,
    read_record,
    service_lock,
)
from muster.contracts.paths import DataDir
from muster.host.processes import this_process

URL = "https://127.0.0.1:8443"
NAMES = ("localhost", "muster.example")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataDir:
    """The data directory, which is all that the environment sets."""
    for name in os.environ:
        if name.startswith("MUSTER_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MUSTER_DATA_DIR", str(tmp_path / "data"))
    return DataDir(tmp_path / "data")


@pytest.fixture
def ca_file(tmp_path: Path) -> Path:
    path = tmp_path / "cert.pem"
    path.touch()
    return path


@contextmanager
def up(files: DataDir, ca_file: Path | None = None) -> Iterator[None]:
    with service_lock(files) as lock:
        lock.publish(URL, NAMES, ca_file)
        yield


def test_record_exists_as_long_as_the_lock_is_held(files: DataDir) -> None:
    assert (is_locked(files), read_record(files)) == (False, None)
    with service_lock(files) as lock:
        assert (is_locked(files), read_record(files)) == (True, None)
        lock.publish_end()
        assert read_record(files) is None, "there is no record to mark"
        lock.publish(URL, ["localhost"], None)
        record = read_record(files)
        assert record is not None
        assert (record.url, record.process, record.is_ending) == (URL, this_process(), False)
        lock.publish_end()
        ending = read_record(files)
        assert ending is not None
        assert (ending.url, ending.is_ending) == (URL, True)
    assert (is_locked(files), read_record(files)) == (False, None)


def test_second_up_is_refused_with_the_place_of_the_first(
    files: DataDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_record, "LOCK_SECONDS", 0.0)
    with service_lock(files) as first:
        with pytest.raises(AlreadyUp, match="Muster is up already"), service_lock(files):
            pass
        first.publish(URL, [], None)
        with pytest.raises(AlreadyUp, match=f"at {URL}: use that one"), service_lock(files):
            pass
        assert is_locked(files)
        assert read_record(files) is not None


def test_a_short_look_at_the_lock_does_not_refuse_an_up(files: DataDir) -> None:
    files.root.mkdir()
    with files.keeper_lock.open("ab") as looker:
        fcntl.flock(looker, fcntl.LOCK_SH)
        assert not is_locked(files), "two processes that look do not see each other"
        release = Timer(0.05, fcntl.flock, [looker, fcntl.LOCK_UN])
        release.start()
        with service_lock(files):
            assert is_locked(files)
        release.join()


def test_damaged_record_or_ended_process_counts_as_none(files: DataDir) -> None:
    files.root.mkdir()
    files.keeper.write_text('{"url": 7')
    assert read_record(files) is None
    ended = replace(this_process(), start_ticks=this_process().start_ticks - 1)
    record = ServiceRecord(url=URL, process=ended, log=None, is_ending=False)
    files.keeper.write_bytes(msgspec.json.encode(record))
    assert read_record(files) is None


def test_data_directory_that_cannot_exist_is_refused(files: DataDir) -> None:
    files.root.write_text("a file is in its place")
    with pytest.raises(NoDataDirectory, match="cannot hold the data"), service_lock(files):
        pass
    assert files.root.read_text() == "a file is in its place"
    assert not is_locked(files)


@pytest.mark.parametrize(
    ("environ", "url", "is_trusted"),
    [
        ({}, URL, True),
        ({"MUSTER_PORT": ""}, URL, True),
        ({"MUSTER_PORT": "0"}, URL, True),
        ({"MUSTER_PORT": "8443"}, URL, True),
        ({"MUSTER_URL": "", "MUSTER_PORT": "8443"}, URL, True),
        # A URL that names our services stays as it is, and their certificate is trusted.
        ({"MUSTER_URL": f"{URL}/"}, None, True),
        ({"MUSTER_URL": "https://localhost:8443"}, None, True),
        ({"MUSTER_URL": "https://Muster.example:8443", "MUSTER_PORT": "1"}, None, True),
        # A CA file of the environment replaces ours.
        ({"MUSTER_CA_FILE": "/etc/ssl/other.pem"}, URL, False),
        ({"MUSTER_URL": URL, "MUSTER_CA_FILE": "/etc/ssl/other.pem"}, None, False),
        # Other services are meant.
        ({"MUSTER_PORT": "8000"}, None, False),
        ({"MUSTER_URL": "https://muster.example:8444"}, None, False),
        ({"MUSTER_URL": "http://127.0.0.1:8443"}, None, False),
        ({"MUSTER_URL": "https://elsewhere.example:8443", "MUSTER_PORT": "8443"}, None, False),
        ({"MUSTER_PORT": "a port"}, None, False),
    ],
    ids=str,
)
def test_commands_ask_their_own_services_unless_told_otherwise(
    files: DataDir,
    ca_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    url: str | None,
    is_trusted: bool,  # noqa: FBT001  a column
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with up(files, ca_file):
        assert address_of(find_own_services()) == (url, str(ca_file) if is_trusted else None)
    assert address_of(find_own_services()) == (None, None), "it is not up any more"


def test_certificate_that_is_gone_is_not_used(files: DataDir, ca_file: Path) -> None:
    with up(files, ca_file):
        ca_file.unlink()
        assert address_of(find_own_services()) == (URL, None)


def health(**ill: str) -> bytes:
    checks = dict.fromkeys(("database", "coordinator", "disk"), "ok") | ill
    return json.dumps({"checks": {name: {"status": it} for name, it in checks.items()}}).encode()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (health(), True),
        (health(disk="degraded"), True),
        (health(coordinator="degraded"), False),
        (health(database="degraded"), False),
        (b'{"status": "ok"}', False),
        (b"[]", False),
        (b"hello", False),
    ],
)
def test_services_serve_once_database_and_coordinator_work(*, body: bytes, expected: bool) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            assert is_serving(f"http://127.0.0.1:{server.server_port}") is expected
        finally:
            server.shutdown()
            thread.join()
    assert not is_serving(f"http://127.0.0.1:{server.server_port}")
