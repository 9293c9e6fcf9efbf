"""Files that are no certificate and key: which they are, and what is wrong with them."""

from pathlib import Path

import pytest
from certificates import key_of, needs_openssl, own_certificate

from api.tls_files import InvalidCertificate, check_certificate


def test_a_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    shopping_list = tmp_path / "list.pem"
    shopping_list.write_text("milk\n")
    for path in (shopping_list, tmp_path / "nowhere.pem", tmp_path):
        with pytest.raises(InvalidCertificate, match=f"{path}.*MUSTER_TLS_CERTFILE is to name"):
            check_certificate(path, None)


def test_a_key_that_no_variable_names_is_said_to_be_missing(tmp_path: Path) -> None:
    certfile, keyfile = tmp_path / "cert.pem", tmp_path / "key.pem"
    with pytest.raises(InvalidCertificate, match=r"MUSTER_TLS_KEYFILE.*; it is not set"):
        check_certificate(certfile, None)
    with pytest.raises(InvalidCertificate) as caught:
        check_certificate(certfile, keyfile)
    assert "it is not set" not in str(caught.value)


@needs_openssl
def test_files_that_are_taken_for_each_other_are_told_apart(tmp_path: Path) -> None:
    certfile = own_certificate(tmp_path)
    keyfile = key_of(certfile)
    check_certificate(certfile, keyfile)
    with pytest.raises(InvalidCertificate, match="look swapped") as swapped:
        check_certificate(keyfile, certfile)
    assert swapped.value.fix == (
        f"export MUSTER_TLS_CERTFILE={certfile} MUSTER_TLS_KEYFILE={keyfile}"
    )
    with pytest.raises(InvalidCertificate, match=r"\.pem holds a certificate and no key"):
        check_certificate(certfile, certfile)
    with pytest.raises(InvalidCertificate, match=r"key\.pem holds a key and no certificate"):
        check_certificate(keyfile, keyfile)
