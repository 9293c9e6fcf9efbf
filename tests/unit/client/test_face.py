"""The names that scripts import, and the cost of an import."""

import subprocess
import sys

import pytest

import muster
from muster import client


@pytest.mark.parametrize("face", [muster, client], ids=["muster", "muster.client"])
def test_every_exported_name_exists(face: object) -> None:
    names = face.__all__  # type: ignore[attr-defined]
    assert sorted(names) == names == dir(face)
    assert all(getattr(face, name).__name__ == name for name in names)
    with pytest.raises(AttributeError, match="has no attribute 'Clinet'"):
        face.Clinet  # type: ignore[attr-defined]  # noqa: B018  the access is the point


def test_importing_an_error_imports_no_http() -> None:
    words = "import sys, muster.client.errors; print('httpx' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"
