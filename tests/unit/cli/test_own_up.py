"""Which API a command asks, and so who is shown the token: one's own `up`, or whom one names."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.office import sole_office
from cli.own_up import own_up, way_to
from muster.contracts.layout import DataDirectory

URL = "https://127.0.0.1:8443"
NAMES = ("localhost", "muster.example")

NOBODY = (None, None)
"""Nothing is known of an own `up`: the environment has to say it all."""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataDirectory:
    """Give a data directory that is the only thing the environment says."""
    for name in os.environ:
        if name.startswith("MUSTER_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MUSTER_DATA_DIR", str(tmp_path / "data"))
    return DataDirectory(tmp_path / "data")


@pytest.fixture
def ca_file(tmp_path: Path) -> Path:
    path = tmp_path / "cert.pem"
    path.touch()
    return path


@contextmanager
def up(files: DataDirectory, ca_file: Path | None) -> Iterator[None]:
    with sole_office(files) as office:
        office.publish(URL, NAMES, ca_file)
        yield


@pytest.mark.parametrize(
    ("environ", "url", "is_trusted"),
    [
        ({}, URL, True),
        ({"MUSTER_PORT": ""}, URL, True),
        ({"MUSTER_PORT": "0"}, URL, True),
        ({"MUSTER_PORT": "8443"}, URL, True),
        ({"MUSTER_URL": "", "MUSTER_PORT": "8443"}, URL, True),
        # Whoever has named it is asked by that name, and known by its own certificate.
        ({"MUSTER_URL": URL}, None, True),
        ({"MUSTER_URL": f"{URL}/"}, None, True),
        ({"MUSTER_URL": "https://localhost:8443"}, None, True),
        ({"MUSTER_URL": "https://muster.example:8443", "MUSTER_PORT": "1"}, None, True),
        # What a person trusts is not added to.
        ({"MUSTER_CA_FILE": "/etc/ssl/other.pem"}, URL, False),
        ({"MUSTER_URL": URL, "MUSTER_CA_FILE": "/etc/ssl/other.pem"}, None, False),
        # Somebody else is meant.
        ({"MUSTER_PORT": "8000"}, None, False),
        ({"MUSTER_URL": "https://muster.example:8444"}, None, False),
        ({"MUSTER_URL": "https://muster.example"}, None, False),
        ({"MUSTER_URL": "http://127.0.0.1:8443"}, None, False),
        ({"MUSTER_URL": "https://elsewhere.example:8443", "MUSTER_PORT": "8443"}, None, False),
    ],
    ids=str,
)
def test_one_s_own_up_is_asked_and_believed_unless_somebody_else_is_meant(
    files: DataDirectory,
    ca_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    url: str | None,
    is_trusted: bool,  # noqa: FBT001  a column
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with up(files, ca_file):
        assert way_to(own_up()) == (url, str(ca_file) if is_trusted else None)
    assert way_to(own_up()) == NOBODY, "it is not up any more"


def test_a_certificate_that_is_not_there_is_not_asked_for(
    files: DataDirectory, ca_file: Path
) -> None:
    with up(files, None):
        assert way_to(own_up()) == (URL, None)
    with up(files, ca_file):
        ca_file.unlink()
        assert way_to(own_up()) == (URL, None)


def test_where_nothing_can_be_up_nobody_is(
    tmp_path: Path, files: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert own_up() is None
    with up(files, None):
        monkeypatch.setenv("MUSTER_PORT", "a port")
        assert own_up() is None
    monkeypatch.delenv("MUSTER_PORT")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    monkeypatch.delenv("MUSTER_DATA_DIR")
    assert own_up() is None
