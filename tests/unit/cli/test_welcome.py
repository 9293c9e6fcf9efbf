"""The lines that a person is given to copy lead to the service."""

import shutil
import subprocess
from pathlib import Path

import pytest

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


def test_a_certificate_that_others_signed_is_for_a_name_of_the_service(tmp_path: Path) -> None:
    tls = {"MUSTER_TLS_CERTFILE": str(tmp_path / "chain.pem"), "MUSTER_HOST": "0.0.0.0"}  # noqa: S104
    assert exports(**tls) == ["export MUSTER_URL=https://NAME:8000"]
    named = {"MUSTER_ALLOWED_HOSTS": "train.example"}
    assert exports(**tls, **named) == ["export MUSTER_URL=https://train.example:8000"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl")
def test_a_certificate_of_ones_own_is_to_be_trusted(tmp_path: Path) -> None:
    words = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
        " -keyout key.pem -out own.pem -subj /CN=muster -addext subjectAltName=DNS:train.example"
    )
    subprocess.run(words.split(), cwd=tmp_path, capture_output=True, check=True)
    certfile = tmp_path / "own.pem"
    assert own_names(certfile) == ["train.example"]
    tls = {"MUSTER_TLS_CERTFILE": str(certfile), "MUSTER_ALLOWED_HOSTS": "a, train.example"}
    assert exports(**tls) == [
        "export MUSTER_URL=https://train.example:8000",
        f"export MUSTER_CA_FILE={certfile}",
    ]
