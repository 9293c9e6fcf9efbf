"""The lock and the record of `muster up`, and which API a command talks to."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from cli.services.record import (
    address_of,
    find_own_services,
    is_serving,
    read_record,
    service_lock,
    write_record,
)
from muster.contracts.errors import MusterError
from muster.contracts.settings.paths import DataDir
from muster.host.private import UnusableDirectory
from muster.host.processes import this_process
from tests.support.services import service_record

URL = "https://127.0.0.1:8443"


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
    with service_lock(files):
        write_record(files, service_record(URL, ca_file=ca_file))
        yield


def test_record_is_gone_with_the_lock(files: DataDir) -> None:
    assert read_record(files) is None
    with up(files):
        assert read_record(files) == service_record(URL)
    assert read_record(files) is None
    assert not files.services_record.exists()


def test_second_up_is_refused_with_the_place_of_the_first(files: DataDir) -> None:
    with up(files):
        with pytest.raises(MusterError, match=f"at {URL}: use that one"), service_lock(files):
            pass
        assert read_record(files) is not None


def test_damaged_record_or_ended_process_counts_as_none(files: DataDir) -> None:
    files.root.mkdir()
    files.services_record.write_text('{"url": 7')
    assert read_record(files) is None
    ended = replace(this_process(), start_ticks=this_process().start_ticks - 1)
    write_record(files, service_record(URL, ended))
    assert read_record(files) is None


def test_data_directory_that_cannot_exist_is_refused(files: DataDir) -> None:
    files.root.write_text("a file is in its place")
    with pytest.raises(UnusableDirectory, match="cannot hold the data"), service_lock(files):
        pass
    assert files.root.read_text() == "a file is in its place"


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
        # A CA file of the environment replaces ours.
        ({"MUSTER_CA_FILE": "/etc/ssl/other.pem"}, URL, False),
        ({"MUSTER_URL": URL, "MUSTER_CA_FILE": "/etc/ssl/other.pem"}, None, False),
        # Other services are meant.
        ({"MUSTER_PORT": "8000"}, None, False),
        ({"MUSTER_URL": "https://localhost:8444"}, None, False),
        ({"MUSTER_URL": "http://127.0.0.1:8443"}, None, False),
        ({"MUSTER_URL": "https://elsewhere.example:8443", "MUSTER_PORT": "8443"}, None, False),
        ({"MUSTER_PORT": "a port"}, None, False),
        ({"MUSTER_URL": "http://me:hunter2secretpw"}, None, False),
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
