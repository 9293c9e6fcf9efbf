"""The secret of a household as people write it, keep it, and lose it."""

from pathlib import Path

import pytest

from muster.mesh.secret import (
    NoSecret,
    keep_secret,
    make_secret,
    parse_secret,
    shared_key,
)


def test_a_secret_is_read_however_it_is_typed() -> None:
    text = make_secret()
    assert len(text.split("-")) == 7
    secret = parse_secret(text)
    assert secret is not None
    assert len(secret) == 16
    assert parse_secret(f" {text.upper().replace('-', ' ')}\n") == secret
    assert parse_secret(text.replace("-", "")) == secret
    assert parse_secret(make_secret()) != secret


@pytest.mark.parametrize("text", ["", "abcd", "a" * 27, "correct horse battery staple", "8" * 26])
def test_any_other_text_is_no_secret(text: str) -> None:
    assert parse_secret(text) is None


def test_a_machine_keeps_its_secret(tmp_path: Path) -> None:
    file, text = tmp_path / "cluster.key", make_secret()
    keep_secret(file, text)
    assert file.stat().st_mode & 0o777 == 0o600
    keep_secret(file, text.upper())
    with pytest.raises(NoSecret, match="holds another secret"):
        keep_secret(file, make_secret())
    assert shared_key({}, file) == shared_key({"MUSTER_CLUSTER_KEY": text}, tmp_path / "none")


@pytest.mark.slow
def test_other_names_and_secrets_give_other_keys(tmp_path: Path) -> None:
    file = tmp_path / "none"
    environments: list[dict[str, str]] = [
        {"MUSTER_CLUSTER_KEY": "correct horse battery staple"},
        {"MUSTER_CLUSTER_KEY": "correct horse battery staples"},
        {
            "MUSTER_CLUSTER_KEY": "correct horse battery staple",
            "MUSTER_CLUSTER_NAME": "lab",
        },
        {"MUSTER_CLUSTER_KEY": make_secret()},
    ]
    keys = [shared_key(environ, file) for environ in environments]
    assert len({*keys}) == len(keys)
    assert keys == [shared_key(environ, file) for environ in environments]


def test_an_unusable_secret_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.key"
    with pytest.raises(NoSecret, match="run `muster mesh secret` on one machine"):
        shared_key({}, file)
    with pytest.raises(NoSecret, match="fewer than 16 characters"):
        shared_key({"MUSTER_CLUSTER_KEY": "too short"}, file)
    with pytest.raises(NoSecret, match="a character is wrong"):
        keep_secret(file, "correct horse battery staple")
    keep_secret(file, make_secret())
    file.chmod(0o644)
    with pytest.raises(NoSecret, match="can be read by others"):
        shared_key({}, file)
    file.chmod(0o600)
    file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(NoSecret, match="is not whole"):
        shared_key({}, file)
    file.write_bytes(b"\xff")
    with pytest.raises(NoSecret, match="cannot be read"):
        shared_key({}, file)
