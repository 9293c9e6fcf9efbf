"""The images and the compose file, without an engine: what must not slip in."""

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return dict(YAML(typ="safe").load(ROOT / "docker-compose.yml")["services"])


def test_no_password_has_a_default(services: dict[str, Any]) -> None:
    secret = re.compile("PASSWORD|TOKEN|_KEY")
    found = {
        name: value
        for service in services.values()
        for name, value in service.get("environment", {}).items()
        if secret.search(name)
    }
    assert len(found) >= 4
    assert {value.partition(":")[2] for value in found.values()} == {"?run make compose-env}"}


def test_ports_are_published_on_this_machine_only(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports == ["127.0.0.1:8000:8000"]


def test_images_of_others_are_pinned(services: dict[str, Any]) -> None:
    others = {each["image"] for each in services.values() if "muster" not in each["image"]}
    assert others
    assert all(re.search(r":\d", image) for image in others)


@pytest.mark.parametrize("image", ["api", "worker"])
def test_image_runs_without_root_below_an_init(image: str) -> None:
    text = (ROOT / f"Dockerfile.{image}").read_text()
    last = text[text.rindex("\nFROM ") :]
    assert "\nUSER muster\n" in last
    assert '\nENTRYPOINT ["tini", "--", ' in last
    assert text.count("--require-hashes") == 1


def test_both_images_install_the_same() -> None:
    stages = [
        (ROOT / f"Dockerfile.{image}").read_text().partition("\nFROM ")[2].partition("\nFROM ")[0]
        for image in ("api", "worker")
    ]
    assert stages[0] == stages[1]
