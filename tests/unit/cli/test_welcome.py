"""The lines that a person is given to copy lead to the service."""

from pathlib import Path

import pytest
from certificates import key_of, needs_openssl, own_certificate

from cli.certificate import own_names
from cli.welcome import next_steps
from muster.contracts.environ import DoorSettings, own_url


def exports(**environ: str) -> list[str]:
    steps = next_steps(own_url(environ), Path("/data"), DoorSettings.read(environ))
    return [line for line in steps if line.startswith("export MUSTER_") and "DATA_DIR" not in line]


@pytest.mark.parametrize(
    ("environ", "lines"),
    [
        ({}, []),
        ({"MUSTER_PORT": "8001"}, ["export MUSTER_PORT=8001"]),
        ({"MUSTER_HOST": "0.0.0.0"}, []),  # noqa: S104  nobody listens
        ({"MUSTER_HOST": "192.0.2.1"}, ["export MUSTER_URL=http://192.0.2.1:8000"]),
        ({"MUSTER_HOST": "::1"}, ["export MUSTER_URL=http://[::1]:8000"]),
    ],
)
def test_what_is_not_as_usual_is_exported(environ: dict[str, str], lines: list[str]) -> None:
    assert exports(**environ) == lines


def test_where_everybody_needs_a_token_a_new_terminal_does() -> None:
    required = {"MUSTER_REQUIRE_TOKEN": "1"}
    assert exports(**required) == ["export MUSTER_TOKEN=mst_…"]
    (line,) = exports(**required, MUSTER_TOKEN="t" * 32)
    assert line.startswith("export MUSTER_TOKEN=…  # that of the service")


def test_a_certificate_that_others_signed_is_for_a_name_of_the_service(tmp_path: Path) -> None:
    tls = {"MUSTER_TLS_CERTFILE": str(tmp_path / "chain.pem"), "MUSTER_HOST": "0.0.0.0"}  # noqa: S104
    assert exports(**tls) == ["export MUSTER_URL=https://NAME:8000"]
    named = {"MUSTER_ALLOWED_HOSTS": "train.example"}
    assert exports(**tls, **named) == ["export MUSTER_URL=https://train.example:8000"]


@needs_openssl
@pytest.mark.parametrize("more", [(), ("basicConstraints=critical,CA:FALSE",)], ids=str)
def test_a_certificate_of_ones_own_is_to_be_trusted(tmp_path: Path, more: tuple[str, ...]) -> None:
    certfile = own_certificate(tmp_path, "DNS:train.example,IP:::1", *more)
    assert own_names(certfile, key_of(certfile)) == ["train.example", "::1"]
    tls = {
        "MUSTER_TLS_CERTFILE": str(certfile),
        "MUSTER_TLS_KEYFILE": str(key_of(certfile)),
        "MUSTER_HOST": "127.0.0.1",
        "MUSTER_ALLOWED_HOSTS": "a, train.example",
    }
    assert exports(**tls) == [
        "export MUSTER_URL=https://[::1]:8000",
        f"export MUSTER_CA_FILE={certfile}",
    ]


@pytest.mark.parametrize("is_activated", [False, True])
def test_an_environment_that_a_new_terminal_does_not_know_is_activated_first(
    is_activated: bool,  # noqa: FBT001  a table's column
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    programs = tmp_path / "my env" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").touch()
    (programs / "muster").touch(mode=0o755)
    monkeypatch.setattr("sys.prefix", str(programs.parent))
    monkeypatch.setenv("PATH", f"{programs}:/nowhere" if is_activated else "/nowhere")
    monkeypatch.setenv("VIRTUAL_ENV", str(programs.parent) if is_activated else "")
    steps = next_steps(own_url({}), Path("/data"), DoorSettings.read({}))
    assert next(steps) == f"source '{programs}/activate'"
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("VIRTUAL_ENV")
    assert not [
        line
        for line in next_steps(own_url({}), Path("/data"), DoorSettings.read({}))
        if line.startswith("source")
    ], "it is in the PATH of every terminal"
