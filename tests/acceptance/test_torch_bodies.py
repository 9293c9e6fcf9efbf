"""Bodies that are no function of state and batch are refused, and others are not."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from tests.support.torch_bodies import IMPURE, PURE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def refusals() -> dict[str, str]:
    """Why each body was refused, or ""."""
    names = [it.__name__ for it in (*PURE, *IMPURE)]
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.torch_bodies", *names]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(ended.stdout))


@pytest.mark.parametrize("body", PURE)
def test_a_pure_or_unchecked_body_is_not_refused(refusals: dict[str, str], body: type) -> None:
    assert refusals[body.__name__] == ""


@pytest.mark.parametrize("body", IMPURE)
def test_an_impure_body_is_refused_with_the_cause(refusals: dict[str, str], body: type) -> None:
    assert IMPURE[body] in refusals[body.__name__]
