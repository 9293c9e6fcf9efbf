"""Where a real service listens, what makes it refuse to start, and which one a client trusts."""

import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from cli.errors import ExitCode, exit_code_of
from cli.main import app
from database.engine import Database
from database.tokens import Tokens
from muster import Client
from muster.client import CertificateRejected, ClientError
from muster.client.errors import ConnectionClosed
from muster.contracts.token import Scope
from tests.support.api_service import DEADLINE_SECONDS, Service
from tests.support.certificates import key_of, needs_openssl, own_certificate

TOKEN = "0123456789abcdef" * 4

STARTING_SECONDS = 60.0
"""Far beyond what a start takes on a busy machine."""

ANYWHERE = "0.0.0.0"  # noqa: S104  refused


def refused_start(service: Service, **environment: str) -> str:
    """Return the one line that a service prints which does not start."""
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "api"],
        cwd=service.root,
        env=dict(service.environment) | environment,
        capture_output=True,
        text=True,
        timeout=STARTING_SECONDS,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    return ended.stderr


@pytest.fixture(scope="module")
def unstarted(tmp_path_factory: pytest.TempPathFactory) -> Service:
    """A service whose database has a revoked token only."""
    service = Service(tmp_path_factory.mktemp("unstarted"))
    database = Database.open(service.database_url)
    tokens = Tokens(database)
    tokens.create("gone", Scope.ADMIN, lifetime=None, created_by=None)
    tokens.revoke("gone")
    database.close()
    return service


def test_it_listens_on_loopback_by_default(service: Service) -> None:
    listening = [
        fields[1].partition(":")[0]
        for table in ("tcp", "tcp6")
        for fields in map(str.split, Path("/proc/net", table).read_text().splitlines()[1:])
        if fields[3] == "0A" and fields[1].endswith(f":{service.port:04X}")
    ]
    assert listening == [f"{int.from_bytes(bytes((127, 0, 0, 1)), sys.byteorder):08X}"]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {"MUSTER_HOST": ANYWHERE, "MUSTER_ALLOW_PLAIN_HTTP": "1"},
            "refusing to listen on",
        ),
        ({"MUSTER_HOST": ANYWHERE, "MUSTER_TOKEN": TOKEN}, "MUSTER_ALLOW_PLAIN_HTTP=1"),
        ({"MUSTER_REQUIRE_TOKEN": "1"}, "muster token create NAME --scope admin"),
        ({"MUSTER_PORT": "many"}, "MUSTER_PORT"),
        ({"MUSTER_TLS_CERTFILE": "/nowhere.pem"}, "MUSTER_TLS_KEYFILE"),
    ],
)
def test_it_refuses_to_start_in_one_line(
    unstarted: Service, environment: dict[str, str], said: str
) -> None:
    assert said in refused_start(unstarted, **environment)


def test_a_taken_port_is_one_line(service: Service) -> None:
    assert f"cannot listen on 127.0.0.1 port {service.port} (" in refused_start(service)


def test_a_token_of_another_service_is_ignored(tmp_path: Path) -> None:
    token = f"mst_{'a' * 12}_{'b' * 64}"
    service = Service(tmp_path, MUSTER_TOKEN=token)
    service.start()
    shown = {"Authorization": f"Bearer {token}"}
    assert httpx.get(f"{service.url}/jobs", headers=shown).status_code == 401
    assert httpx.get(f"{service.url}/jobs").status_code == 200
    service.end(signal.SIGKILL)
    assert "MUSTER_TOKEN is a token that a Muster service created" in service.log.read_text()
    assert token not in service.log.read_text()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new certificate for this machine, with its key beside it."""
    directory = tmp_path_factory.mktemp("certificate")
    return own_certificate(directory, "IP:127.0.0.1,DNS:muster.example")


@pytest.fixture(scope="module")
def encrypted(
    tmp_path_factory: pytest.TempPathFactory, certificate: Path
) -> Iterator[tuple[Service, httpx.Client]]:
    settings = {
        "MUSTER_TLS_CERTFILE": str(certificate),
        "MUSTER_TLS_KEYFILE": str(key_of(certificate)),
        "MUSTER_ALLOWED_HOSTS": "muster.example, 192.0.2.7",
    }
    service = Service(tmp_path_factory.mktemp("encrypted"), **settings)
    service.start()
    trusted = ssl.create_default_context(cafile=certificate)
    url = f"https://127.0.0.1:{service.port}"
    with httpx.Client(base_url=url, verify=trusted, timeout=DEADLINE_SECONDS) as client:
        yield service, client
    service.end(signal.SIGKILL)


@needs_openssl
def test_with_a_certificate_it_speaks_only_tls(encrypted: tuple[Service, httpx.Client]) -> None:
    service, client = encrypted
    assert client.get("/jobs").status_code == 200
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{service.url}/jobs")
    assert f"listens on https://127.0.0.1:{service.port}" in service.log.read_text()


@needs_openssl
def test_allowed_hosts_are_accepted(encrypted: tuple[Service, httpx.Client]) -> None:
    _, client = encrypted
    for host, expected in [
        ("muster.example", 200),
        ("MUSTER.example:443", 200),
        ("192.0.2.7", 200),
        ("localhost", 200),
        ("192.0.2.8", 403),
        ("other.example", 403),
    ]:
        answer = client.get("/jobs", headers={"Host": host})
        assert answer.status_code == expected, host
    assert "MUSTER_ALLOWED_HOSTS" in answer.json()["detail"]


@needs_openssl
def test_a_named_certificate_is_trusted(
    encrypted: tuple[Service, httpx.Client], certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"https://127.0.0.1:{encrypted[0].port}"
    with Client(url, ca_file=certificate) as client:
        assert not list(client.jobs())
    monkeypatch.setenv("MUSTER_CA_FILE", str(certificate))
    monkeypatch.setenv("MUSTER_URL", url)
    result = CliRunner().invoke(app, ["ps", "-o", "name"])
    assert (result.exit_code, result.stdout) == (0, "")


@needs_openssl
@pytest.mark.parametrize(
    ("url", "is_trusted", "error", "said"),
    [
        ("https://127.0.0.1:{tls}", False, CertificateRejected, "self-signed .*set MUSTER_CA_FILE"),
        (
            "https://localhost:{tls}",
            True,
            CertificateRejected,
            "a name that its certificate is for",
        ),
        ("https://127.0.0.1:{plain}", True, CertificateRejected, "write http:// in MUSTER_URL"),
        ("http://127.0.0.1:{tls}", True, ConnectionClosed, "write https:// in MUSTER_URL"),
    ],
)
def test_untrusted_server_gets_no_token(
    service: Service,
    encrypted: tuple[Service, httpx.Client],
    certificate: Path,
    url: str,
    is_trusted: bool,  # noqa: FBT001  a table's column
    error: type[ClientError],
    said: str,
) -> None:
    filled = url.format(tls=encrypted[0].port, plain=service.port)
    ca_file = certificate if is_trusted else None
    with (
        Client(filled, token=TOKEN, ca_file=ca_file, retry_seconds=0.0) as client,
        pytest.raises(error, match=said) as caught,
    ):
        client.job("@latest")
    assert exit_code_of(caught.value) == ExitCode.UNREACHABLE


@pytest.mark.parametrize("content", [None, "milk"])
def test_a_file_without_certificates_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ClientError, match=f"{file} cannot be trusted: .*PEM in MUSTER_CA_FILE"):
        Client("https://127.0.0.1:1", ca_file=file)
