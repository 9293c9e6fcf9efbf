"""The names that scripts import, and the cost of an import."""

import subprocess
import sys

import pytest

import muster
from muster import client, collectives
from muster.client import job
from muster.collectives import errors


def test_every_exported_name_exists() -> None:
    assert sorted(muster.__all__) == muster.__all__ == dir(muster)
    assert all(getattr(muster, name).__name__ == name for name in muster.__all__)
    assert [client.Client, client.Job] == [muster.Client, job.Job]


def test_errors_of_collectives_are_names_of_the_package() -> None:
    declared = {name for name, it in vars(errors).items() if isinstance(it, type)} - {"MusterError"}
    assert {name for name in declared if name not in collectives.__all__} == set()
    assert all(getattr(collectives, name) is getattr(errors, name) for name in declared)


@pytest.mark.parametrize("face", [muster, client], ids=["muster", "muster.client"])
def test_a_misspelt_name_is_no_export(face: object) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Clinet'"):
        face.Clinet  # type: ignore[attr-defined]  # noqa: B018  the access is the point


def test_importing_an_error_imports_no_http() -> None:
    words = "import sys, muster.client.errors; print('httpx' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"
