"""The images and the compose file, without an engine: what must not slip in."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return dict(YAML(typ="safe").load(ROOT / "docker-compose.yml"))


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, Any]:
    return dict(compose["services"])


def test_keys_are_files_that_compose_env_writes(compose: dict[str, Any], tmp_path: Path) -> None:
    command = ["make", "-f", str(ROOT / "Makefile"), "compose-env"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    files = {name: tmp_path / secret["file"] for name, secret in compose["secrets"].items()}
    assert set((tmp_path / ".secrets").iterdir()) == set(files.values())
    assert (tmp_path / ".secrets").stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o444 for file in files.values())
    assert files["postgres_password"].read_text() in files["database_url"].read_text()
    assert len({file.read_text() for file in files.values()}) == len(files)
    again = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True)
    assert b".secrets exists" in again.stderr


def test_no_service_has_a_key_in_its_environment(services: dict[str, Any]) -> None:
    secret = re.compile("PASSWORD|TOKEN|_KEY|DATABASE_URL")
    for service in services.values():
        keys = {k: v for k, v in service.get("environment", {}).items() if secret.search(k)}
        assert all(name.endswith("_FILE") for name in keys)
        assert {f"/run/secrets/{name}" for name in service["secrets"]} >= set(keys.values())


def test_ports_are_published_on_this_machine_only(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports == ["127.0.0.1:${MUSTER_PORT:-8000}:8000"]


def test_no_service_has_rights_that_it_does_not_need(services: dict[str, Any]) -> None:
    for service in services.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "muster" in service["image"] or int(service["user"].partition(":")[0]) > 0


def test_images_of_others_are_pinned(services: dict[str, Any]) -> None:
    others = {each["image"] for each in services.values() if "muster" not in each["image"]}
    assert others
    assert all(re.search(r":\d", image) for image in others)


def stages(image: str) -> list[str]:
    return re.split(r"(?m)^FROM ", (ROOT / f"Dockerfile.{image}").read_text())[1:]


@pytest.mark.parametrize("image", ["api", "coordinator", "worker"])
def test_image_runs_without_root_below_an_init(image: str) -> None:
    last = stages(image)[-1]
    assert "\nUSER 10001\n" in last
    assert '\nENTRYPOINT ["tini", "--", ' in last
    assert last.startswith("scratch\n"), "with the layers of no other image, so without their tools"


@pytest.mark.parametrize("image", ["coordinator", "worker"])
def test_images_differ_in_extras_and_last_stage(image: str) -> None:
    shared = ["\n".join(stages(it)[:-1]) for it in ("api", image)]
    first, second = (re.sub('ARG EXTRAS=".*"', "", text) for text in shared)
    assert first == second
    assert first.count("--require-hashes") == 1
    assert shared[0] == shared[1] or image == "worker", "API and coordinator share their layers"


@pytest.mark.slow
def test_a_setting_can_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("postgresql+psycopg://me@db/muster\n")
    environment = {"HOME": str(tmp_path), "MUSTER_DATABASE_URL_FILE": str(tmp_path / "url")}
    done = _show_settings(environment)
    (found,) = (it for it in json.loads(done.stdout) if it["name"] == "MUSTER_DATABASE_URL")
    assert found["value"] == "postgresql+psycopg://me@db/muster"
    (tmp_path / "url").unlink()
    done = _show_settings(environment)
    assert done.returncode == 2
    assert re.fullmatch(
        f"MUSTER_DATABASE_URL_FILE: {tmp_path}/url cannot be read .No such file or directory.: "
        "correct the path, or set MUSTER_DATABASE_URL\n",
        done.stderr,
    )
    (tmp_path / "url").write_bytes(b"\xff\xfe")
    assert "url cannot be read (it is no text): " in _show_settings(environment).stderr


def _show_settings(environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "muster", "config", "show", "-o", "json"]
    return subprocess.run(
        command, env=environment, cwd=ROOT, check=False, capture_output=True, text=True
    )
