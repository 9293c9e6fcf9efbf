"""The client over TLS: whom it believes, and what it says of whom it does not."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.errors import exit_code_of
from cli.main import app
from muster import Client
from muster.client import ClientError, Untrusted
from muster.client.errors import HungUp
from tests.integration.api.service import Service
from tests.support.certificates import key_of, needs_openssl, own_certificate

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for this machine that nobody else has signed; its key is beside it."""
    return own_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory, certificate: Path) -> Iterator[Service]:
    service = Service(
        tmp_path_factory.mktemp("encrypted"),
        MUSTER_TLS_CERTFILE=str(certificate),
        MUSTER_TLS_KEYFILE=str(key_of(certificate)),
    )
    service.start()
    yield service
    service.end(signal.SIGKILL)


def test_a_certificate_of_ones_own_is_believed_where_it_is_named(
    encrypted: Service, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"https://127.0.0.1:{encrypted.port}"
    with Client(url, ca_file=certificate) as client:
        assert not list(client.jobs())
    monkeypatch.setenv("MUSTER_CA_FILE", str(certificate))
    monkeypatch.setenv("MUSTER_URL", url)
    result = CliRunner().invoke(app, ["ps", "-o", "name"])
    assert (result.exit_code, result.stdout) == (0, "")


def test_who_proves_nothing_is_told_nothing(encrypted: Service) -> None:
    with (
        Client(f"https://127.0.0.1:{encrypted.port}", token="mst_x") as client,  # noqa: S106  of nobody
        pytest.raises(Untrusted, match=r"self-signed certificate.*set MUSTER_CA_FILE") as caught,
    ):
        client.jobs().__next__()
    assert exit_code_of(caught.value) == 3


def test_a_certificate_for_another_name_is_none(encrypted: Service, certificate: Path) -> None:
    with (
        Client(f"https://localhost:{encrypted.port}", ca_file=certificate) as client,
        pytest.raises(Untrusted, match="Set MUSTER_URL to a name that its certificate is for"),
    ):
        client.job("@latest")


def test_who_speaks_no_tls_is_named_so(service: Service) -> None:
    with (
        Client(f"https://127.0.0.1:{service.port}") as client,
        pytest.raises(Untrusted, match="write http:// in MUSTER_URL"),
    ):
        client.job("@latest")


def test_who_speaks_tls_only_is_named_so(encrypted: Service) -> None:
    with (
        Client(f"http://127.0.0.1:{encrypted.port}", retry_seconds=0.0) as client,
        pytest.raises(HungUp, match="if it speaks TLS, write https:// in MUSTER_URL"),
    ):
        client.job("@latest")


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_file_without_certificates_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ClientError, match=f"{file} cannot be trusted: .*PEM in MUSTER_CA_FILE"):
        Client("https://127.0.0.1:1", ca_file=file)
